"""Training that rounds as a quantised network would: what its buffers hold is what they hold on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def _rounded(device: str, by_channel: bool) -> list[object]:
    """What a call gives, twice, with the lowest, the highest, the scales and the zero points that it keeps."""
    source = torch.linspace(-1.0, 2.0, 24).reshape(2, 3, 4).to(device)
    channels = source.shape[0] if by_channel else 1
    lowest, highest = (torch.empty(0).to(device) if by_channel else torch.tensor(end).to(device) for end in (9e9, -9e9))
    scale, zero_point = torch.ones(channels).to(device), torch.zeros(channels, dtype=torch.int32).to(device)
    on = torch.tensor([1]).to(device)
    given: list[object] = []
    for turn in (1, 3):
        out = torch.fused_moving_avg_obs_fake_quant(
            source * turn, on, on, lowest, highest, scale, zero_point, 0.01, -128, 127, 0, by_channel, True
        )
        given += [one.tolist() for one in (out, lowest, highest, scale, zero_point)]
    return given


@pytest.mark.parametrize("values", ["", ",values=auto", ",values=real"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_ends_that_are_kept_go_on_from_call_to_call(values: str, by_channel: bool) -> None:
    expected = _rounded("cpu", by_channel)
    gpu.turn_on(f"T4{values}")
    assert _rounded("cuda", by_channel) == expected


def test_the_ends_of_channels_take_memory_on_their_first_call() -> None:
    gpu.turn_on("T4")
    lowest, highest = torch.empty(0, device="cuda"), torch.empty(0, device="cuda")
    scale, zero_point = torch.ones(1024, device="cuda"), torch.zeros(1024, dtype=torch.int32, device="cuda")
    source, on = torch.randn(1024, 2, device="cuda"), torch.tensor([1], device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.fused_moving_avg_obs_fake_quant(
            source, on, on, lowest, highest, scale, zero_point, 0.01, -128, 127, 0, True, True
        )
        assert lowest.shape == highest.shape == (1024,)
        assert torch.cuda.memory_allocated() - before == 2 * 4096


def test_a_network_that_is_prepared_trains_and_is_converted_as_on_the_host() -> None:
    import torch.ao.quantization as quantization

    def trained(device: str) -> list[float]:
        torch.manual_seed(0)
        source = torch.randn(4, 8)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        prepared = quantization.prepare_qat(model.train()).to(device)
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        losses = []
        for _ in range(3):
            loss = prepared(source.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [*losses, *quantization.convert(prepared.cpu().eval())[0].weight().dequantize().flatten().tolist()]

    expected = trained("cpu")
    gpu.turn_on("T4,values=real")
    assert trained("cuda") == pytest.approx(expected, rel=1e-6)
