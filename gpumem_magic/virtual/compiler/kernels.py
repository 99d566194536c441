"""The kernels that Inductor writes in Triton for a virtual card: neither compiled nor launched. Triton is not needed for it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.compiler.tuning import Tuning
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_BITS = re.compile(r"\d+")
# A kernel's arguments. Inductor's own names say which it only reads; what it changes in place has another such name beside it
# (`KernelArgs` in `torch/_inductor/codegen/common.py`, the same in 2.9 to 2.13). The names in a program's kernel say nothing.
_ARGUMENTS = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)
_ONLY_READ = re.compile(r"\s*in_ptr\d+\b")
_A_PROGRAMS = "@triton_heuristics.user_autotune"


class _Launch:
    """A kernel of Triton's that is not launched. It would write into buffers that are there, whose values are known no longer."""

    def __init__(self, engine: Engine, source: str, tuning: Tuning) -> None:
        self._engine = engine
        self._source = source
        self._tuning: Tuning | None = tuning
        self._only_read = _only_read(source)

    def run(self, *args: Any, **kwargs: Any) -> None:
        tuning, self._tuning = self._tuning, None
        if tuning is not None:
            tuning.first_launch(self._source, args)
        # (Whose attributes are looked up as C++ has them: each would go through Python else.)
        with no_functions():
            for place, arg in enumerate(args):
                if place not in self._only_read and isinstance(arg, VirtualTensor):
                    self._engine.forget(arg)

    __call__ = run


def _only_read(source: str) -> frozenset[int]:
    """The places of arguments that a kernel does not write to."""
    found = None if _A_PROGRAMS in source else _ARGUMENTS.search(source)
    names = found[1].split(",") if found else []
    return frozenset(place for place, name in enumerate(names) if _ONLY_READ.match(name))


def install(patches: Patches, engine: Engine, tuning: Tuning) -> None:
    """Until the patches are undone, kernels are written and not compiled."""
    triton = importlib.import_module("torch.utils._triton")
    scheduler = importlib.import_module("torch._inductor.scheduler")
    patches.set(scheduler, "has_triton", lambda *args: True)
    patches.set(triton, "triton_hash_with_backend", lambda *args: "")
    compiling = importlib.import_module("torch._inductor.async_compile").AsyncCompile

    def triton_kernel(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> _Launch:
        return _Launch(engine, source_code, tuning)

    patches.set(compiling, "triton", triton_kernel)
    selection = importlib.import_module("torch._inductor.select_algorithm")
    files = selection.PyCodeCache

    class Unread(files):  # type: ignore[misc, valid-type]
        """A template's kernel is a file in the compiler's folder that nobody imports: it begins with Triton."""

        @classmethod
        def load(cls, code: str, extra: str = "", *args: Any, **kwargs: Any) -> Any:
            key, path = files.write(code, extra)
            return SimpleNamespace(key=key, __file__=path)

    patches.set(selection, "PyCodeCache", Unread)
    wrapper = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    graph = importlib.import_module("torch._inductor.virtualized").V

    def write_header(self: Any) -> None:
        """Without Triton itself, which the generated function does not need."""
        line = graph.graph.device_ops.import_get_raw_stream_as("get_raw_stream")
        if not self.imports.contains(line):
            self.imports.writeline(line)

    patches.set(wrapper, "write_triton_header_once", write_header)
    scans = importlib.import_module("torch._inductor.codegen.triton_split_scan").TritonSplitScanKernel
    scan = scans.scan

    def scan_without_triton(*args: Any) -> Any:
        with _widths_of_types():
            return scan(*args)

    if not triton.has_triton_package():
        patches.set(scans, "scan", scan_without_triton)


@contextmanager
def _widths_of_types() -> Iterator[None]:
    """What a scan in several blocks (`cumsum`) asks Triton itself while its kernel is written: how many bits a type has."""
    types = ModuleType("triton.language")
    # `tl.float32`, `tl.int1`, `tl.float8e4nv`
    types.__getattr__ = lambda name: SimpleNamespace(  # type: ignore[method-assign]
        primitive_bitwidth=int(_BITS.findall(name)[0])
    )
    package = ModuleType("triton")
    package.language = types  # type: ignore[attr-defined]
    sys.modules.update({"triton": package, types.__name__: types})
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules[types.__name__]
