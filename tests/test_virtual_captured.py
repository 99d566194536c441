"""Names of PyTorch's that a program imported before the virtual GPU was turned on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

# What a notebook's first cell says, in a module of its own.
FIRST_CELL = """
from torch import arange, as_tensor, device, load, rand, tensor, zeros
from torch.cuda import Stream, is_available, memory_allocated

def make(size, factory=zeros):
    return factory(size, device="cuda")

here = zeros
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = ModuleType("a_notebook_of_the_users")
    exec(FIRST_CELL, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    gpu.turn_off()


def test_names_that_were_imported_before_work_on_the_device(notebook: Any) -> None:
    assert notebook.is_available() is torch.cuda.is_available()
    gpu.turn_on("T4")
    assert notebook.is_available()
    assert notebook.tensor([1, 2], device="cuda").tolist() == [1, 2]
    assert notebook.as_tensor([1.0], device=notebook.device("cuda")).is_cuda
    kept = notebook.zeros(1 << 20, device="cuda")
    assert notebook.memory_allocated() == torch.cuda.memory_allocated() == 4 << 20
    assert isinstance(notebook.Stream(), torch.cuda.Stream)
    del kept


def test_a_module_of_the_programs_may_be_called_as_one_of_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("test")
    exec("from torch import zeros", module.__dict__)
    monkeypatch.setitem(sys.modules, "test", module)
    before = torch.zeros
    gpu.turn_on("T4")
    assert module.zeros is torch.zeros is not before
    gpu.turn_off()
    assert module.zeros is torch.zeros is before


@pytest.mark.parametrize(
    "call",
    [
        lambda factories: factories["zeros"](256, device="cuda"),
        lambda factories: factories["rand"](256, device="cuda:0", generator=torch.Generator("cuda")),
        lambda factories: factories["arange"](256, device="cuda", dtype=torch.float32),
        lambda factories: factories["full"]((256,), 1.5, device="cuda", requires_grad=True),
        lambda factories: factories["eye"](16, device="cuda"),
        lambda factories: factories["empty"](256, device=torch.device("cuda")),
        lambda factories: factories["randint"](5, (256,), device="cuda", dtype=torch.int32),
    ],
)
def test_originals_out_of_reach_make_one_tensor_each(notebook: Any, call: Callable[[Any], torch.Tensor]) -> None:
    # A dictionary is no name of a module's: its values stay the originals.
    factories = {name: getattr(torch, name) for name in ("zeros", "rand", "arange", "full", "eye", "empty", "randint")}
    gpu.turn_on("T4")
    made = call(factories)
    assert made.is_cuda
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 1024
    assert len(torch.cuda.memory_snapshot()) == 1
    assert factories["arange"](3, device="cuda").tolist() == [0, 1, 2]
    assert notebook.make(7).is_cuda


def test_every_name_is_put_back_and_what_was_imported_meanwhile_too(notebook: Any) -> None:
    before = dict(vars(notebook))
    gpu.turn_on("T4")
    assert notebook.zeros is not before["zeros"]
    assert notebook.here is notebook.zeros
    exec("from torch import ones\nfrom torch.cuda import max_memory_allocated\nload = None", vars(notebook))
    gpu.turn_off()
    assert notebook.ones is torch.ones
    assert notebook.max_memory_allocated is torch.cuda.max_memory_allocated
    assert notebook.load is None, "what the program itself has changed stays"
    assert {name: vars(notebook)[name] for name in before if name != "load"} == {
        name: value for name, value in before.items() if name != "load"
    }


def test_after_off_builds_for_the_host_refuse_as_before(notebook: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    gpu.turn_on("T4")
    notebook.zeros(3, device="cuda")
    gpu.turn_off()
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        notebook.zeros(3, device="cuda")


@pytest.mark.parametrize(
    "gather",
    [
        lambda x: torch.tensor([x[0], x[1]]),
        lambda x: torch.tensor([[number] for number in x], device="cuda"),
        lambda x: torch.as_tensor([x[0], 3]),
        lambda x: torch.LongTensor([[x[0], x[1]]]),
        lambda x: torch.Tensor([x[0], x[1]]),
        lambda x: torch.zeros(2).fill_(x[1]),
    ],
)
def test_numbers_of_the_device_are_gathered_in_a_list(gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    machine = gpu.turn_on("T4")
    expected = gather(torch.tensor([0, 1]))
    try:
        unknown = gather(torch.randint(0, 2, (2,), device="cuda"))
        assert sum(machine.reads.counts.values()) >= 1
        found = gather(torch.tensor([0, 1], device="cuda"))
        assert (found.shape, found.dtype) == (unknown.shape, unknown.dtype) == (expected.shape, expected.dtype)
        assert found.tolist() == expected.tolist()
    finally:
        gpu.turn_off()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Makes a module that looks like an installed package's, in the place of the one before."""

    def made() -> Any:
        module: Any = ModuleType("a_library")
        module.__file__, module.make = "/usr/lib/python3/site-packages/a_library.py", None
        monkeypatch.setitem(sys.modules, "a_library", module)
        gpu.turn_on("T4")
        gpu.turn_off()
        return module

    yield made
    gpu.turn_off()


def test_a_library_in_which_there_was_nothing_is_looked_through_once_it_has_more(library: Any) -> None:
    module = library()
    before = module.other = torch.zeros
    for _ in range(2):
        gpu.turn_on("T4")
        assert module.other is torch.zeros is not before
        assert module.other(3, device="cuda").is_cuda
        gpu.turn_off()
        assert module.other is before
    # As if it were loaded again, at whatever address.
    again = library()
    again.other = before
    gpu.turn_on("T4")
    assert again.other(3, device="cuda").is_cuda


def test_a_librarys_old_name_that_means_a_function_now_works_on_the_device_and_without_it(library: Any) -> None:
    module = library()
    for _ in range(2):
        gpu.turn_on("T4")
        module.make = module.make or torch.zeros
        assert module.make(3, device="cuda").is_cuda
        gpu.turn_off()
        assert module.make(3).tolist() == [0.0, 0.0, 0.0]
