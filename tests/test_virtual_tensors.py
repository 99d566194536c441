"""Tensors on the virtual GPU: what a program can ask of them, views and writes in place, sizes that depend on values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from asked_for import made, steps

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("2xT4")
    gpu.turn_off()


def allocated() -> int:
    return torch.cuda.memory_allocated()


def test_a_tensor_says_where_it_is() -> None:
    x = torch.ones(2, 3, device="cuda:1")
    assert x.is_cuda
    assert not x.is_cpu
    assert not x.is_meta
    assert x.device == torch.device("cuda:1")
    assert x.get_device() == 1
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.untyped_storage().device == torch.device("cuda:1")
    assert x.untyped_storage().nbytes() == 24
    assert isinstance(x, torch.Tensor)
    assert "device='cuda:1'" in repr(x)
    assert x.to("cuda:0").device.index == 0
    assert x.cpu().device.type == "cpu"
    assert not torch.ones(1).is_cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0])
def test_every_way_to_name_the_device(device: object) -> None:
    made = [
        torch.empty(4, device=device), torch.tensor([1.0, 2.0], device=device), torch.arange(3, device=device),
        torch.zeros(2).to(device), torch.zeros(2).cuda(device), torch.full((2,), 3.0, device=device),
        torch.randn(2, device=device), torch.as_tensor([1], device=device), torch.zeros(2).to(device, torch.float16),
        torch.empty_like(torch.zeros(2), device=device), torch.eye(3, device=device), torch.linspace(0, 1, 3, device=device),
        torch.zeros(2).new_zeros(3, device=device), torch.randperm(4, device=device), torch.tril_indices(3, 3, device=device),
    ]  # fmt: skip
    assert {str(tensor.device) for tensor in made} == {"cuda:0"}


@pytest.mark.parametrize(
    "convert",
    [
        lambda host, _: host.to("cuda", torch.float16),
        lambda host, _: host.to("cuda:1"),
        lambda host, _: host.to(torch.float64).to("cuda", copy=True),
        lambda host, virtual: host.to(virtual),
        lambda host, virtual: host.type_as(virtual),
        lambda host, virtual: torch.zeros(3, dtype=torch.int64).to(other=virtual),
        lambda _, virtual: virtual.to("cuda:1", torch.bfloat16),
        lambda _, virtual: virtual.to("cpu", torch.float64),
        lambda _, virtual: virtual.type_as(torch.zeros(1)),
        lambda host, _: torch.nn.Linear(64, 64).to("cuda:1", torch.bfloat16).weight,
        lambda host, _: host.to("meta", torch.float16),
        lambda _, virtual: virtual.to("meta"),
        lambda _, virtual: torch.empty_like(virtual, device="meta"),
    ],
)
def test_inference_mode_converts_as_no_grad_does(convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            host, virtual = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.float16, device="cuda:0")
            made = convert(host, virtual)
            seen.append((made.device, made.dtype, made.is_cuda, [torch.cuda.memory_allocated(one) for one in (0, 1)]))
        del host, virtual, made
    assert seen[0] == seen[1]


def test_the_default_device_and_the_device_context() -> None:
    with torch.device("cuda:1"):
        assert torch.zeros(3).device.index == 1
        assert torch.tensor([1.0]).device.index == 1
        assert torch.nn.Linear(2, 2).weight.device.index == 1
        assert torch.zeros(3, device="cpu").device.type == "cpu"
    assert torch.zeros(3).device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(3).is_cuda
    finally:
        torch.set_default_device(None)
        # In 2.9, `get_default_device` fails after that.
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def test_views_cost_nothing_and_share_the_address() -> None:
    x = torch.zeros(64, 64, device="cuda")
    before = allocated()
    views = [
        x[1:],
        x.t(),
        x.view(-1),
        x.reshape(32, 128),
        x.unsqueeze(0),
        x[:, ::2],
        x.expand(3, 64, 64),
        x.detach(),
        x.data,
        *x.split(16),
        *x.chunk(2),
        x.squeeze(),
        x.permute(1, 0),
        x.unfold(0, 2, 1),
        x.diagonal(),
        x.narrow(0, 1, 2),
    ]
    assert allocated() == before
    assert views[0].data_ptr() == x.data_ptr() + 64 * 4
    assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
    assert x.t().contiguous().data_ptr() != x.data_ptr()
    del x
    assert allocated() == before, "a view holds its storage"


def test_writing_in_place_allocates_nothing_and_counts_versions() -> None:
    x = torch.zeros(1024, device="cuda")
    address, before = x.data_ptr(), allocated()
    x += 1
    x.mul_(2).clamp_(0, 1).fill_(3)
    x[3:5] = 7
    x[0] = 1
    x.copy_(torch.ones(1024))
    x.zero_()
    torch.add(x, 1, out=x)
    assert (x.data_ptr(), allocated()) == (address, before)
    assert x._version >= 7
    w = torch.ones(3, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        w.add_(1)
    y = w.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_resizing_and_exchanging_data() -> None:
    x = torch.zeros(1024, device="cuda")
    x.resize_(4096)
    assert allocated() == 4096 * 4
    x.untyped_storage().resize_(0)
    assert allocated() == 0
    x.untyped_storage().resize_(4096 * 4)
    assert allocated() == 4096 * 4
    x.data = torch.zeros(8, device="cuda")
    assert allocated() == 512
    x.set_(torch.zeros(256, device="cuda"))
    assert (x.shape, allocated()) == ((256,), 1024)


def test_what_was_let_go_of_is_back_before_a_storage_grows() -> None:
    held, x = [torch.zeros(1024, device="cuda")], torch.zeros(1024, device="cuda")
    x.untyped_storage().resize_(0)

    def grow() -> None:
        held.clear()
        x.untyped_storage().resize_(2048 * 4)

    assert steps(grow) == [("free_requested", 4096), ("alloc", 8192)]


def test_half_of_the_memory_in_half_precision() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    y = x.half()
    assert y.dtype == torch.float16
    assert allocated() == 6 << 20
    assert x.float() is x
    assert x.to("cuda") is x
    assert x.to("cuda", copy=True) is not x


def test_a_users_meta_tensors_stay_meta() -> None:
    x = torch.zeros(3, device="meta")
    with torch.device("meta"):
        layer = torch.nn.Linear(3, 3)
        y = torch.ones(3)
    for tensor in (x, y, x + y, layer.weight, layer(y), torch.empty_like(x), torch.zeros(3, device="cuda").to("meta")):
        assert tensor.device == torch.device("meta")
        assert tensor.is_meta
        assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
    assert allocated() == 0
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        layer.to("cuda")
    assert layer.to_empty(device="cuda").weight.is_cuda


def test_sizes_that_depend_on_values_are_the_largest_possible_and_said(machine: gpu.VirtualMachine) -> None:
    x = torch.randn(40, 50, device="cuda")
    mask = x > 0.5
    assert x[mask].shape == (2000,)
    assert x[mask.any(1)].shape == (40, 50)
    assert torch.nonzero(mask).shape == (2000, 2)
    assert mask.nonzero(as_tuple=True)[1].shape == (2000,)
    assert torch.masked_select(x, mask).shape == (2000,)
    assert torch.unique(x).shape == (2000,)
    assert torch.where(mask)[0].shape == (2000,)
    (note,) = machine.notes()
    for word in ("boolean mask", "nonzero", "masked_select", "unique", "largest possible"):
        assert word in note


def test_writing_through_a_mask_needs_no_size() -> None:
    x = torch.rand(40, 50, device="cuda")
    before = allocated()
    x[x > 0.5] = 0
    x.masked_fill_(x > 0.5, 1)
    assert allocated() == before


def test_gradients_flow_through_a_mask() -> None:
    x = torch.rand(40, device="cuda", requires_grad=True)
    (x[x.detach() > 0.5] * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (40,)


def test_small_values_from_the_host_are_known(machine: gpu.VirtualMachine) -> None:
    x = torch.tensor([3, 1, 2], device="cuda")
    assert x.tolist() == [3, 1, 2]
    assert x.max().item() == 3
    assert (x + 1)[0].item() == 4
    assert torch.arange(4, device="cuda").sum().item() == 6
    boxes = torch.tensor([[1.0, 2.0, 5.0, 9.0], [0.0, 0.0, 3.0, 3.0]]).to("cuda")
    assert (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist() == [28.0, 9.0]
    times = torch.linspace(0, 25, 1000).cuda().type_as(boxes)
    assert (times[1:] > times[:-1]).all()
    assert x[torch.tensor([True, False, True], device="cuda")].shape == (2,)
    assert not machine.reads.counts
    assert torch.rand(3, device="cuda").sum().item() == 0.0
    assert sum(machine.reads.counts.values()) == 1


def test_copies_of_objects_share_what_the_originals_share() -> None:
    x = torch.zeros(1 << 18, device="cuda")
    pair = [x, x[10:]]
    before = allocated()
    other = copy.deepcopy(pair)
    assert allocated() == 2 * before
    assert other[0].untyped_storage()._cdata == other[1].untyped_storage()._cdata
    layer = torch.nn.Linear(4, 4, device="cuda")
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert copy.copy(x).data_ptr() == x.data_ptr()
    # What `_tensor.py` asks for, and a recording of a state dict's copies shows: the storage, and one element for its tensor.
    assert made(lambda: copy.deepcopy(torch.Tensor.detach(x))) == [1 << 20, 4]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(layer.weight * 2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_copied_parameter_has_values_and_no_gradient(device: str) -> None:
    layer = torch.nn.Linear(512, 512, bias=False, device=device)
    layer(torch.ones(1, 512, device=device)).sum().backward()
    layer.weight.note = "mine"  # type: ignore[attr-defined]
    before = allocated()
    twin = copy.deepcopy(layer)
    assert twin.weight.grad is None
    assert not hasattr(twin.weight, "note")
    assert allocated() - before == (1 << 20 if device == "cuda" else 0)
    leaf = torch.ones(512, device=device, requires_grad=True)
    leaf.sum().backward()
    assert copy.deepcopy(leaf).grad is not None


def test_pickles_come_back_on_the_device_as_zeros() -> None:
    x = torch.nn.Parameter(torch.rand(2000, device="cuda"))
    back = pickle.loads(pickle.dumps(x))
    assert isinstance(back, torch.nn.Parameter)
    assert back.device == x.device
    assert torch.equal(back.detach().cpu(), torch.zeros(2000))


def test_tensors_work_as_keys_and_compare_by_identity() -> None:
    x, y = torch.ones(2, device="cuda"), torch.ones(2, device="cuda")
    assert {x: 1, y: 2}[y] == 2
    assert len({x, x, y}) == 2
    assert len(x) == 2
    assert [part.shape for part in x] == [(), ()]
    assert f"{torch.tensor(2.5, device='cuda'):.2f}" == "2.50"


def test_strange_shapes() -> None:
    assert torch.zeros(0, device="cuda").data_ptr() == 0
    assert allocated() == 0
    assert torch.zeros((), device="cuda").shape == ()
    assert torch.zeros(0, 5, device="cuda").sum().shape == ()
    assert torch.cat([torch.zeros(0, device="cuda"), torch.zeros(3, device="cuda")]).shape == (3,)
    assert torch.zeros(2, 0, device="cuda").matmul(torch.zeros(0, 3, device="cuda")).shape == (2, 3)


def test_complex_integers_and_channels_last() -> None:
    assert torch.fft.fft(torch.zeros(8, device="cuda")).dtype == torch.complex64
    assert (torch.ones(4, dtype=torch.int8, device="cuda") + 1).dtype == torch.int8
    image = torch.zeros(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.zeros(2, 3, 8, 8).cuda(memory_format=torch.channels_last).stride() == image.stride()


def test_sparse_tensors_hold_their_parts() -> None:
    indices = torch.tensor([[0, 1], [2, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (3, 3), device="cuda")
    assert sparse.is_sparse
    assert sparse.device.type == "cuda"
    assert allocated() == 2 * 512
    assert sparse.to_dense().shape == (3, 3)


def test_a_module_has_other_parameters_where_it_goes_to_or_comes_from_meta() -> None:
    """As `Module._apply` has it: an optimizer keeps the memory of those from before."""
    model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    weight = model.weight
    weight.grad = torch.ones_like(weight)
    before = torch.cuda.memory_allocated()
    model.to("meta")
    assert model.weight is not weight
    assert (model.weight.device.type, weight.device.type) == ("meta", "cuda")
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "meta"
    assert torch.cuda.memory_allocated() == before
    del weight
    assert torch.cuda.memory_allocated() < before
    empty, other = model.weight, model.to_empty(device="cuda").weight
    assert (empty.device.type, other.device.type) == ("meta", "cuda")
    model.cpu().cuda()
    assert model.weight is other
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        assert model.cpu().weight is not other
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_a_weight_under_two_names_is_two_behind_meta() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2))).cuda()
    model[1].weight = model[0].weight
    model.to("meta")
    assert model[0].weight is not model[1].weight
