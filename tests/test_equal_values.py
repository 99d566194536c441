"""What is of equal elements is known in any size, and no longer than it is certain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("T4")
    gpu.turn_off()


def element(machine: gpu.VirtualMachine, tensor: Any) -> Any:
    """What all elements are known to be; None where they are not known."""
    found = machine.engine.known(tensor)
    return None if found is None else found.host.unique().item()


def test_a_mask_from_the_host_keeps_its_way(machine: gpu.VirtualMachine) -> None:
    mask = torch.ones(8, 1024, dtype=torch.int64).to("cuda")
    assert mask.all()
    assert mask.sum() == 8192
    seen = mask[:, None, None, :].bool()
    assert element(machine, seen.expand(8, 1, 1024, 1024)) is True
    assert element(machine, (1.0 - mask.float()).masked_fill(~mask.bool(), -1e9)) == 0.0
    labels = torch.full((8, 1024), -100).cuda()
    assert labels[labels != -100].shape == (0,)
    assert element(machine, torch.cat([labels, labels])) == -100
    assert not machine.reads.counts


def test_what_differs_is_unknown(machine: gpu.VirtualMachine) -> None:
    host = torch.ones(8, 1024)
    host[7, 1023] = 0
    assert element(machine, host.to("cuda")) is None
    assert element(machine, torch.cat([torch.ones(4096).cuda(), torch.zeros(4096).cuda()])) is None
    assert element(machine, torch.ones(4096, device="cuda").cumsum(0)) is None
    signs = torch.zeros(4096)
    signs[5] = -0.0
    assert element(machine, signs.cuda()) is None


def test_a_part_that_is_written_ends_it_for_all_views(machine: gpu.VirtualMachine) -> None:
    mask = torch.ones(8, 1 << 16, dtype=torch.int64, device="cuda")
    row = mask[1]
    row[3:5] = 1
    mask += 1
    assert element(machine, row) == 2
    row.zero_()
    assert element(machine, mask) is None
    assert element(machine, row) is None
    mask.copy_(torch.full((8, 1 << 16), 7))
    assert element(machine, row) == 7
    mask.view(torch.int32)[0, 0] = 1
    assert element(machine, mask) is None


def test_a_storage_that_was_away_has_other_bytes(machine: gpu.VirtualMachine) -> None:
    ones = torch.ones(8, 1024, device="cuda")
    storage = ones.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    assert element(machine, ones) is None


def test_a_replayed_graph_leaves_nothing_known_that_it_writes(machine: gpu.VirtualMachine) -> None:
    ones = torch.ones(8, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ones += 1
    ones.fill_(3)
    graph.replay()
    assert element(machine, ones) is None
