"""Two streams: each has segments and a cuBLAS workspace of its own."""

import torch

side = torch.cuda.Stream()
weight = torch.randn(2048, 2048, device="cuda")
batch = torch.randn(1024, 2048, device="cuda")
for _ in range(3):
    here = batch @ weight
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = batch @ weight
    torch.cuda.current_stream().wait_stream(side)
    there.record_stream(torch.cuda.current_stream())
    total = here + there
    del here, there
torch.cuda.synchronize()
