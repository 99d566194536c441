"""Gradients that C++ works out in another way for subclasses of tensors: those of a device here, in memory and in value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from asked_for import made, steps
from torch_versions import TORCH

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import own_formulas


@pytest.fixture
def device() -> Any:
    yield gpu.turn_on("H100,torch=2.11")
    gpu.turn_off()


@pytest.fixture
def computing() -> Any:
    yield gpu.turn_on("H100,torch=2.11,values=real")
    gpu.turn_off()


def gradients(result: Any, *leaves: Any) -> list[int]:
    given = torch.ones_like(result)
    return made(lambda: torch.autograd.grad(result, leaves, given))


# Of 4 x 6 numbers: 96 bytes as float32, a mask of 24.
def source(**kwargs: Any) -> Any:
    return torch.arange(1.0, 25.0, **kwargs).view(4, 6)


def test_prod_of_what_has_no_zeros_is_divided_by_the_numbers(device: Any) -> None:
    x = source().cuda().requires_grad_()
    # The mask of zeros, how many each of six columns has (as numbers of eight bytes: first the mask so), how many in all;
    # the quotient and its product.
    assert gradients(x.prod(0), x) == [24, 48, 192, 8, 96, 96]


def test_prod_with_a_zero_multiplies_what_is_before_and_behind(device: Any) -> None:
    host = source()
    host[1, 2] = 0
    x = host.cuda().requires_grad_()
    # After the same search: ones, and with three rows of four their products; the three others turned, with ones, their products,
    # and these turned; both together, and the gradient.
    assert gradients(x.prod(0), x) == [24, 48, 192, 8, 24, 96, 96, 72, 96, 96, 96, 96, 96]


def test_masked_fill_by_a_tensor_selects_its_gradient(device: Any) -> None:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, :3] = True
    x, value = source().cuda().requires_grad_(), torch.tensor(2.0, device="cuda", requires_grad=True)
    found = gradients(x.masked_fill(mask.cuda(), value), x, value)
    # The gradient of x first; in the end the three numbers that were selected, and their sum.
    assert found[0] == 96
    assert found[-2:] == [12, 4]


@pytest.mark.parametrize(
    ("dtype", "item", "factors"), [(torch.float32, 4, []), (torch.float16, 2, [8]), (torch.complex64, 8, [32])]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_renorm_holds_norms_in_single_precision(
    device: Any, dtype: torch.dtype, item: int, factors: list[int], in_place: bool
) -> None:
    x = source().to(dtype).cuda()
    work = (lambda: x.renorm_(2, 0, 1)) if in_place else (lambda: x.renorm(2, 0, 1))
    # A norm of four bytes for each row; factors of the result's type where that is another.
    assert made(work) == [*([] if in_place else [24 * item]), 16, *factors]


def test_renorms_gradient_is_in_single_precision(device: Any) -> None:
    x = source().cuda().requires_grad_()
    # Norms, the product with the gradient, its sums; of the norms' gradient the quotient, a mask of four flags, the product;
    # the inverse norms in two steps, their product with it, what is left of the gradient, the factors, the product; a mask, and
    # which of both counts.
    of_norm, shrunk = [96, 4, 96], [16, 16, 96, 96, 16, 96]
    assert gradients(x.renorm(2, 0, 1), x) == [16, 96, 16, *of_norm, *shrunk, 4, 96]


@pytest.mark.parametrize(
    ("p", "of_norm"),
    [
        # The sizes' power, which are zero, the signs, both; the norms' power, two products.
        (0.5, [96, 24, 96, 96, 16, 96, 96]),
        # As before, where none is looked for; the norms' power, the share, which are zero; the product.
        (1.5, [96, 96, 96, 16, 16, 4, 96]),
        # The sizes' power and the product with the numbers.
        (3, [96, 96, 16, 16, 4, 96]),
    ],
)
def test_renorms_gradient_of_other_norms(device: Any, p: float, of_norm: list[int]) -> None:
    x = source().cuda().requires_grad_()
    assert gradients(x.renorm(p, 0, 1), x)[3 : 3 + len(of_norm)] == of_norm


def test_prod_with_a_zero_picks_out_what_is_turned_in_2_1() -> None:
    gpu.turn_on("H100,torch=2.1")
    host = source()
    host[1, 2] = 0
    x = host.cuda().requires_grad_()
    found = gradients(x.prod(0), x)
    gpu.turn_off()
    # Three places of eight bytes before the rows, and four.
    assert found[4:] == [24, 96, 96, 24, 72, 96, 96, 32, 96, 96, 96]


def test_index_fill_sorts_its_indices_for_the_values_gradient(device: Any) -> None:
    x, value = source().cuda().requires_grad_(), torch.tensor(2.0, device="cuda", requires_grad=True)
    index = torch.tensor([0, 2], device="cuda")
    found = gradients(x.index_fill(0, index, value), x, value)
    # x's; the indices in order, the sort's, the found ones and how many, what CUB compares in; two rows of the gradient; the sum.
    assert found[0] == 96
    assert found[1] == 16
    assert found[3:5] == [16, 8]
    assert found[-2:] == [48, 4]


def both(work: Any, *hosts: Any) -> list[tuple[Any, Any]]:
    """The result with its gradients and their own, on the host and on the device."""
    sides = []
    for where in ("cpu", "cuda"):
        leaves = [host.clone().to(where).requires_grad_() for host in hosts]
        out = work(*leaves)
        first = torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True)
        again = [one for one in first if one.requires_grad]
        second = torch.autograd.grad(again, leaves, [torch.ones_like(one) for one in again], allow_unused=True)
        sides.append([one.detach().cpu() for one in (out, *first, *second) if one is not None])
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("zeros", [[], [(1, 2)], [(1, 2), (3, 2)]])
@pytest.mark.parametrize("work", [lambda x: x.prod(), lambda x: x.prod(0), lambda x: torch.prod(x, 1, True)])
def test_gradients_of_prod_are_right(computing: Any, work: Any, zeros: Any) -> None:
    host = source() / 8
    for place in zeros:
        host[place] = 0
    for expected, found in both(work, host):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, math.inf])
def test_gradients_of_renorm_are_right(computing: Any, p: float) -> None:
    for expected, found in both(lambda x: x.renorm(p, 0, 0.5), source() / 8):
        torch.testing.assert_close(found, expected)


def test_gradients_of_masked_fill_are_right(computing: Any) -> None:
    for expected, found in both(lambda x, value: (x * 2).masked_fill(x > 2, value), source() / 8, torch.tensor(3.0)):
        torch.testing.assert_close(found, expected)


def test_function_transforms_go_through(computing: Any) -> None:
    x = source().cuda() / 8
    per_row = torch.func.vmap(torch.func.grad(lambda row: row.prod()))(x)
    torch.testing.assert_close(per_row, x.prod(1, True) / x)
    tangent = torch.func.jvp(lambda row: row.prod(), (x[0],), (x[0],))[1]
    torch.testing.assert_close(tangent, 6 * x[0].prod())


@pytest.mark.parametrize("operator", list(own_formulas._NODES), ids=str)
def test_the_nodes_have_the_names_of_cplusplus(device: Any, operator: Any) -> None:
    def node(where: str) -> str:
        x = source().to(where)
        # (Of squares only, and of no more columns than rows.)
        x = (x[:, :4] if "linalg" in str(operator) else x).requires_grad_()
        more = {
            "prod.dim_int": [0],
            "masked_fill.Tensor": [x.detach() > 2, torch.tensor(1.0, device=where)],
            "renorm": [2, 0, 1],
            "maximum": [x.detach()],
            "minimum": [x.detach()],
            "fmax": [x.detach()],
            "fmin": [x.detach()],
            "clamp_min.Tensor": [x.detach()],
            "clamp_max.Tensor": [x.detach()],
            "atan2": [x.detach()],
            "linalg_householder_product": [torch.ones(2, device=where)],
        }
        out = operator(x, *more.get(operator.__name__.removesuffix(".default"), []))
        return type((out[0] if isinstance(out, tuple) else out).grad_fn).__name__

    assert node("cuda") == node("cpu")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("singular", [[], [0], [0, 1]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_determinants_are_right(
    computing: Any, size: int, singular: list[int], dtype: torch.dtype
) -> None:
    host = (torch.arange(2.0 * size * size).view(2, size, size) + 4 * torch.eye(size)).to(dtype)
    host[singular, 0] = 0
    for expected, found in both(torch.linalg.det, host):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(("version", "between"), [("2.9", [96, 96, 96, 96, 96, 96, 96, 96, 96]), ("2.11", None)])
def test_up_to_2_9_an_angles_gradient_looks_for_no_zeros(version: str, between: list[int] | None) -> None:
    gpu.turn_on(f"A100-40GB,torch={version}")
    try:
        x, y = (source().cuda().requires_grad_() for _ in range(2))
        # The squares, their sum, and one by it; for each the product with the other, and with that (of the second the negative
        # first).
        asked = gradients(torch.atan2(x, y), x, y)
        assert (asked == between) == (between is not None)
    finally:
        gpu.turn_off()


def test_an_angles_gradients_before_2_10_are_the_hosts() -> None:
    gpu.turn_on("A100-40GB,torch=2.9,values=real")
    try:
        x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
        on_device = [one.detach().cuda().requires_grad_() for one in (x, y)]
        expected = torch.autograd.grad(torch.atan2(x, y).sum(), (x, y))
        found = torch.autograd.grad(torch.atan2(*on_device).sum(), on_device)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
    finally:
        gpu.turn_off()


def test_determinants_of_one_number_are_worked_out_before_2_12(device: Any) -> None:
    x = torch.ones(3, 1, 1, device="cuda", requires_grad=True)
    out, given = torch.linalg.det(x), torch.ones(3, device="cuda")
    # The product, on a diagonal; which are zero, the two that are chosen from, the choice, on a diagonal; factors without zeros,
    # the result, two lists of addresses (the samples of an H100 with 2.11).
    found = made(lambda: torch.autograd.grad(out, x, given, retain_graph=True))
    assert found[:11] == [12, 12, 3, 4, 4, 12, 12, 12, 12, 24, 24]
    again = made(lambda: torch.autograd.grad(out, x, given, create_graph=True))
    # The sizes, which are small, how many; the result, factors, pivots and codes, addresses of one and of two, whether any is
    # wrong.
    assert [*again[:6], *again[7:]] == [12, 12, 12, 3, 4, 1, 12, 12, 12, 12, 24, 24, 24, 1]
    alone = torch.ones(1, 1, device="cuda", requires_grad=True)
    out, given = torch.linalg.det(alone), torch.ones((), device="cuda")
    # One flag is read as it is.
    found = made(lambda: torch.autograd.grad(out, alone, given, create_graph=True))
    assert found == [4, 4, 4, 1, 4, 4, 4, 4, 768, 8, 8, 1, 1]


def test_determinants_of_one_number_hand_the_gradient_on_since() -> None:
    gpu.turn_on("H100,torch=2.13")
    x = torch.ones(3, 1, 1, device="cuda", requires_grad=True)
    found = gradients(torch.linalg.det(x), x)
    gpu.turn_off()
    assert found == []


def test_what_can_be_differentiated_again_of_determinants_is_solved(device: Any) -> None:
    x = torch.randn(4, 20, 20, device="cuda", requires_grad=True)
    out, given = torch.linalg.det(x), torch.ones(4, device="cuda")
    (found,) = torch.autograd.grad(out, x, given, create_graph=True)
    assert type(found.grad_fn).__name__ == "LinalgSolveExBackward0"


@pytest.mark.parametrize("zeros", [[], [(1, 2)], [(1, 2), (3, 2), (1, 4)]])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_cumprod_are_right(computing: Any, zeros: Any, dim: int) -> None:
    host = source() / 8
    for place in zeros:
        host[place] = 0
    for expected, found in both(lambda x: x.cumprod(dim), host):
        torch.testing.assert_close(found, expected)
    x, y = host.clone().cuda().requires_grad_(), host.clone().requires_grad_()
    (x.cumprod(dim).sum() + x.sum()).backward()
    (y.cumprod(dim).sum() + y.sum()).backward()
    torch.testing.assert_close(x.grad.cpu(), y.grad)


def test_cumprod_with_a_zero_looks_before_at_and_behind_it(device: Any) -> None:
    host = source()
    host[1, 2] = 0
    x = host.cuda().requires_grad_()
    found = gradients(x.cumprod(0), x)
    # Weighted, which are zero, whether any; the gradient; how many zeros so far, of flags made numbers.
    assert found[:6] == [96, 24, 1, 96, 192, 192]
    # Those before the first, the others, what is left without them; turned, added up, turned back.
    assert found[6:12] == [24, 24, 96, 96, 96, 96]
    x = source().cuda().requires_grad_()
    assert gradients(x.cumprod(0), x) == [96, 24, 1, 96, 96, 96, 96]


def test_cumprod_with_a_zero_and_a_graph_leaves_out_one_after_another(device: Any) -> None:
    host = torch.ones(2, 3)
    host[0, 1] = 0
    x = host.cuda().requires_grad_()
    out, given = x.cumprod(1), torch.ones(2, 3, device="cuda")
    found = made(lambda: torch.autograd.grad(out, x, given, create_graph=True))
    # Weighted, which are zero, whether any; the gradient and a one.
    assert found[:5] == [24, 6, 1, 24, 4]
    # The products behind the first (of a copy), with ones; times the gradient, and their sum.
    assert found[5:10] == [16, 16, 24, 24, 8]
    # What is before the second; behind it (of a copy), times that, both side by side; times the gradient, and their sum.
    assert found[10:17] == [8, 8, 8, 8, 16, 16, 8]
    # What is before the last.
    assert found[17:] == [8, 8, 8]


@pytest.mark.parametrize("larger", [torch.maximum, torch.minimum])
@pytest.mark.parametrize(
    ("version", "share"),
    [
        # The half, where both are equal, the choice, and where the other's alone is.
        ("2.13", [96, 24, 96, 24]),
        # That first (the build of 2.14).
        ("2.14", [24, 96, 24, 96]),
    ],
)
def test_the_larger_ones_gradient_is_that_of_the_devices_version(version: str, share: list[int], larger: Any) -> None:
    gpu.turn_on(f"H100,torch={version}")
    try:
        x, y = (source().cuda().requires_grad_() for _ in range(2))
        assert gradients(larger(x, y), x, y) == 2 * share
        assert gradients(larger(x.detach(), y), y) == share
        # Broadcast numbers get the sum of theirs.
        row = torch.zeros(6, device="cuda", requires_grad=True)
        assert gradients(larger(x, row), x, row) == [*share, *share, 24]
    finally:
        gpu.turn_off()


@pytest.mark.parametrize(
    "larger", [torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.clamp_min, torch.clamp_max]
)
def test_what_stands_for_another_version_is_what_this_one_does(
    device: Any, larger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory on this version, and in value."""
    gpu.turn_on(f"H100,torch={'.'.join(map(str, TORCH))},values=real")
    x, y = torch.tensor([1.0, 2.0, 3.0]).cuda().requires_grad_(), torch.tensor([2.0, 2.0, 1.0]).cuda().requires_grad_()

    def found() -> tuple[list[tuple[str, int]], list[Any]]:
        out, given = larger(x, y), torch.tensor([1.0, 3.0, 5.0], device="cuda")
        kept: list[Any] = []
        asked = steps(lambda: kept.extend(torch.autograd.grad(out, (x, y), given)))
        return asked, [type(out.grad_fn).__name__, *(one.tolist() for one in kept)]

    by_torch = found()
    monkeypatch.setattr(own_formulas, "_runs_since", lambda version: version > TORCH)
    assert found() == by_torch


@pytest.mark.parametrize(("version", "places"), [("2.9", 99), ("2.11", 99), ("2.13", 90)])
def test_the_gradient_of_a_trace_goes_on_below_the_diagonal_in_older_versions(version: str, places: int) -> None:
    gpu.turn_on(f"H100,torch={version}")
    try:
        x = torch.zeros(100, 90, device="cuda", requires_grad=True)
        assert gradients(x.trace(), x) == [100 * 90 * 4, places * 8]
        wide = torch.zeros(10, 12, device="cuda", requires_grad=True)
        assert gradients(wide.trace(), wide) == [10 * 12 * 4, 10 * 8]
    finally:
        gpu.turn_off()


def test_the_gradient_of_a_trace_is_right(computing: Any) -> None:
    x = source().cuda().requires_grad_()
    (found,) = torch.autograd.grad(x.trace(), x)
    assert found.cpu().equal(torch.eye(4, 6))


@pytest.mark.parametrize(
    "formula",
    [lambda x: x.prod(1), lambda x: x.masked_fill(x > 3, 1.0), lambda x: x.renorm(2, 0, 1.0), lambda x: x.mean(1)],
    ids=["prod", "masked_fill", "renorm", "mean"],
)
def test_an_operator_that_a_program_made_of_others_is_compiled(device: Any, formula: Any) -> None:
    def made_of_others(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = formula(x)
        return result

    library = torch.library.Library("own_formulas_test", "FRAGMENT")
    library.define("made_of_others(Tensor x) -> Tensor")
    library.impl("made_of_others", made_of_others, "CompositeImplicitAutograd")
    try:
        compiled = torch.compile(lambda x: torch.ops.own_formulas_test.made_of_others(x) * 2, backend="aot_eager")
        for x in (source().cuda(), source().cuda().requires_grad_()):
            assert compiled(x).shape == formula(x).shape
        compiled(x).sum().backward()
        assert x.grad is not None
    finally:
        library._destroy()
