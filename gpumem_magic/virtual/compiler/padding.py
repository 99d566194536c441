"""Products whose sizes a card's kernels take slowly: Inductor times them padded, too, and takes the faster way.

Here a trial takes what it takes on a card, and nothing is timed. Those that a card would time are padded where a matrix has rows
that do not begin at multiples of 16 bytes, which is what they are timed for: the kernels for such rows are the slower ones; and
where the copies into longer rows take less time than the product itself would at the card's full rate. Where all rows begin
there, a copy would gain nothing. An H100 with 2.11 chose so for 17 of the 19 products of `benchmarks/compiled_programs.py`.
Published runs whose memory tells the ways apart went so, too: GPT-2 with 50,257 words was padded (`benchmarks/accuracy`), 50 rows
of 2,048 numbers were not (`benchmarks/compiled_published.py`). Which ones were padded is kept, also for graphs from the
compiler's cache. After `torch/_inductor/fx_passes/pad_mm.py` (2.9 to 2.13).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.compiler.tuning import Tuning
from gpumem_magic.virtual.engine.modes import TRIAL, origin

# What a compiled graph has beside its own attributes, and takes into the cache.
_UNTIMED = "gpumem_magic_untimed_products"
# Times, of which one is compared with the other.
_PLAIN, _FASTER = 1.0, 0.1
# Bytes.
_ROW = 16
# How many operations a card makes while its memory reads or writes a byte: an H100's 989 and 67 TFLOPS beside 3.35 TB/s.
_PER_BYTE = {torch.float32: 20}
_PER_BYTE_OF_OTHERS = 300


class Padding:
    """`untimed`: products of compiled graphs that a card would have timed and that are padded, by sizes, strides and types.

    buffer(device): bytes of what the card's cache is emptied with before each run of a trial.
    """

    def __init__(self, buffer: Callable[[int], int]) -> None:
        self._buffer = buffer
        # By a product's key, as PyTorch keeps it on disk: whether it is padded, and which were timed as they are.
        self._padded: dict[str, bool] = {}
        self._timed: set[str] = set()
        # Whether trials can be run; they are in the versions that were read, 2.11 to 2.13.
        self._tries = True
        # Of the product that is being decided: what a trial is to find, and whether the next is of the product as it is.
        self._gains = self._is_plain = False
        self.untimed: set[str] = set()
        self._since_a_graph: set[str] = set()

    def install(self, patches: Patches, compiled: Any) -> None:
        """compiled: the class of Inductor's compiled graphs."""
        padding = importlib.import_module("torch._inductor.fx_passes.pad_mm")
        plain = compiled.post_compile

        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> None:
            plain(graph, *args, **kwargs)
            self.untimed.update(vars(graph).get(_UNTIMED, ()))

        patches.set(compiled, "post_compile", post_compile)
        name_of = padding.should_pad_bench_key

        def should_pad_bench_key(
            match: Any, first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if not kwargs.get("is_base_time_key"):
                self._gains = _gains(first, second) and _is_worth_its_copies(padding, match, first, second)
            return name_of(match, first, second, *args, **kwargs)

        # (Without the table on disk, where a card's own trials are kept: 2.11 and newer.)
        deciding = next(name for name in ("_should_pad", "_should_pad_bench") if hasattr(padding, name))
        decide = getattr(getattr(padding, deciding), "__wrapped__", getattr(padding, deciding))

        def should_pad(*args: Any, **kwargs: Any) -> bool:
            with origin(TRIAL):
                return bool(decide(*args, **kwargs))

        replaced: dict[str, Any] = {
            "has_triton": lambda: True,
            "should_pad_bench_key": should_pad_bench_key,
            "get_cached_should_pad": self._known,
            "set_cached_should_pad": self._learn,
            "get_cached_base_mm_benchmark_time": self._time_of,
            "set_cached_base_mm_benchmark_time": lambda key, time: self._timed.add(key),
            "get_do_bench": lambda: self._tried,
            # The trace's modes are off, and ours is not: its tensors are the device's.
            "no_dispatch": importlib.import_module("torch.utils._python_dispatch")._disable_current_modes,
            deciding: should_pad,
        }
        self._tries = hasattr(padding, "get_do_bench") and not Tuning.left_out
        for name, function in replaced.items():
            if hasattr(padding, name):
                patches.set(padding, name, function)

    def note(self, compiled: Any) -> None:
        """What was compiled of a graph has the products that were met since the graph before."""
        setattr(compiled, _UNTIMED, sorted(self._since_a_graph))
        self._since_a_graph.clear()

    def _known(self, key: str) -> bool | None:
        found = self._padded.get(key, None if self._tries else self._gains)
        if found:
            self._since_a_graph.add(key)
        return found

    def _learn(self, key: str, padded: bool) -> None:
        self._padded[key] = padded
        self._known(key)

    def _time_of(self, key: str) -> float | None:
        self._is_plain = key not in self._timed
        return None if self._is_plain else _PLAIN

    def _tried(self, product: Callable[[], object]) -> float:
        """How long it takes. A trial runs it, and again beside a buffer for the card's cache."""
        product()
        buffer = torch.empty(self._buffer(torch.cuda.current_device()), dtype=torch.uint8, device="cuda")
        product()
        del buffer
        plain, self._is_plain = self._is_plain, False
        return _PLAIN if plain or not self._gains else _FASTER


def _gains(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a row of a factor's or of the product's begins elsewhere than at a multiple of 16 bytes, or may do so."""
    product = second.shape[-1], first.shape[-2] * second.shape[-1]
    steps = [*_steps(first), *_steps(second), *product[: first.dim() - 1]]
    return any(type(step) is not int or step * first.itemsize % _ROW for step in steps)


def _is_worth_its_copies(padding: Any, match: Any, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the factors that must be copied are so before the product would be done. Those that the graph itself makes are not
    copied: they are made with longer rows."""
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    if any(type(size) is not int for size in (*first.shape, *second.shape)):
        return True
    more = [padding.get_padded_length(size, padding.get_alignment_size(first)) for size in (rows, inner, columns)]
    sizes = ("mat1", (rows + more[0]) * (inner + more[1])), ("mat2", (inner + more[1]) * (columns + more[2]))
    copied = sum(
        size
        for (name, size), longer in zip(sizes, (more[0] or more[1], more[1] or more[2]), strict=True)
        if longer and not padding.should_exclude_padding_time(match, name)
    )
    # Each is read and written.
    moved = 2 * copied * first.itemsize
    return bool(moved * _PER_BYTE.get(first.dtype, _PER_BYTE_OF_OTHERS) < 2 * rows * inner * columns)


def _steps(matrix: torch.Tensor) -> list[Any]:
    """From one row, column or matrix of a batch to the next, without the step from number to number."""
    steps = [
        step for step, size in zip(matrix.stride(), matrix.shape, strict=True) if type(size) is not int or size > 1
    ]
    if 1 in steps:
        steps.remove(1)
    return steps
