"""Dynamo and virtual tensors: they are tensors of the program's like all others, and the device's own functions are PyTorch's."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from gpumem_magic.patching import Patches, behind_relays
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.tensors import is_ordinary
from gpumem_magic.virtual.operators.factories import Factories

_PACKAGE = Path(__file__).resolve().parents[2]
# What Dynamo must not look into: the device itself, and what relays calls to it. Hooks of a recording stay, which say nothing
# while it compiles, so that a measured program breaks into no other graphs.
_PASSED_OVER = (_PACKAGE / "virtual", _PACKAGE / "looks", _PACKAGE / "patching.py")
# What Dynamo takes for methods of tensors that go into graphs.
_METHODS = (MethodDescriptorType, WrapperDescriptorType)
_GRAPH_TREES = "torch._inductor.cudagraph_trees"
_A_LOOP = "graph break in a for/while loop"


def install(patches: Patches, factories: Factories) -> None:
    """Until the patches are undone, Dynamo takes graphs of programs on the device."""
    builder = importlib.import_module("torch._dynamo.variables.builder")
    plain_subclass = builder.infer_subclass_type

    def infer_subclass_type(value: Any) -> Any:
        return None if is_ordinary(value) else plain_subclass(value)

    patches.set(builder, "infer_subclass_type", infer_subclass_type)
    rules = importlib.import_module("torch._dynamo.trace_rules")
    # (What is looked at when it is on: the name's owner is another, or the frames of this package.)
    patches.also_undo(_forget)
    for path in _PASSED_OVER:
        patches.insert(rules, "SKIP_DIRS", path.as_posix())
    patches.set(factories, "traces", True)
    _know_who_asks(patches, rules)
    _know_methods(patches, rules)
    _know_streams(patches)
    _forget()


def _know_who_asks(patches: Patches, rules: Any) -> None:
    """What stands for `torch.overrides.has_torch_function` (`operators.encoder_layers`) is that function to Dynamo, too."""
    functions = importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable
    plain, ours = torch._C._has_torch_function, torch.overrides.has_torch_function
    handlers = functions._get_handlers()
    # Its list has the one that was in place when it was made.
    handler = handlers.get(plain) or handlers[ours]
    handlers.update({plain: handler, ours: handler})
    patches.insert(rules, "torch_name_rule_map", {"torch.overrides.has_torch_function": functions})


def _know_methods(patches: Patches, rules: Any) -> None:
    """What stands for a tensor's method is that method to Dynamo, too, which asks where a function mode hands it on, as the
    default device does (`get_tensor_method` in ``torch/_dynamo/trace_rules.py``, seen in 2.13)."""
    plain = rules.get_tensor_method
    # (What it remembered may be of another time.)
    plain.cache_clear()
    patches.also_undo(plain.cache_clear)
    methods = [method for method in vars(torch.Tensor).values() if behind_relays(method) is not method]
    known: frozenset[Any] = plain().union(method for method in methods if isinstance(behind_relays(method), _METHODS))

    @functools.cache
    def get_tensor_method() -> frozenset[Any]:
        return known

    patches.set(rules, "get_tensor_method", get_tensor_method)


def _know_streams(patches: Patches) -> None:
    """What guards and compiled code ask for the current stream is the device's: in C++ it asks the driver (`get_current_stream`
    in ``torch/csrc/dynamo/init.cpp``; every graph's code asks since 2.15)."""
    for name in ("utils", "guards"):
        module = importlib.import_module(f"torch._dynamo.{name}")
        if hasattr(module, "get_current_stream"):
            patches.set(module, "get_current_stream", _current_stream)


def _current_stream(device: torch.device) -> torch.Stream:
    return torch.cuda.current_stream(device)


def name_loops_that_break(patches: Patches, otherwise: Counter[str]) -> None:
    """Until the patches are undone, functions are counted that run eagerly because their graph breaks within a loop. Before 2.11
    Dynamo gives up such a function and says so to its log alone; later it raises an error, which is in its tables
    (`torch/_dynamo/symbolic_convert.py`)."""
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator
    if hasattr(translator, "raise_loop_graph_break"):
        return
    run = translator.run
    skipped = importlib.import_module("torch._dynamo.exc").SkipFrame

    def run_and_name(self: Any) -> Any:
        try:
            return run(self)
        except skipped as reason:
            if _A_LOOP in str(reason):
                code = self.f_code
                where = f"`{code.co_name}` ({Path(code.co_filename).name}:{code.co_firstlineno})"
                otherwise[f"eagerly, as on a card with PyTorch before 2.11: in a loop of {where} it breaks"] += 1
            raise

    patches.set(translator, "run", run_and_name)


def run_compiled_backwards_as_forwards(patches: Patches) -> None:
    """Until the patches are undone, a backward pass that compiled autograd made one graph of runs in the program's own thread,
    with its handles and their workspaces: autograd's thread for the device takes no part (`Engine::execute` in
    ``torch/csrc/autograd/engine.cpp``)."""
    instance = importlib.import_module("torch._dynamo.compiled_autograd").AutogradCompilerInstance
    capture = instance.end_capture

    def end_capture(self: Any, *args: Any) -> Any:
        run, compiled = capture(self, *args)

        def outside_of_backward(*given: Any) -> Any:
            before, STATE.backward = STATE.backward, 0
            try:
                return run(*given)
            finally:
                STATE.backward = before

        return outside_of_backward, compiled

    patches.set(instance, "end_capture", end_capture)


def _forget() -> None:
    """Dynamo looks anew at which functions are PyTorch's, which files it passes over, and at what it compiled for a device."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map.cache_clear()
    rules._recompile_re()
    # Which functions a function mode may stand in for, as the default device does: of another time they are none of these.
    functions = sys.modules.get("torch._dynamo.variables.torch")
    if functions is not None:
        functions.get_overridable_functions.cache_clear()
    # Without a frame that it has looked at there is nothing to reset.
    if importlib.import_module("torch._dynamo.convert_frame").input_codes.seen:
        with Patches() as patches:
            if _GRAPH_TREES not in sys.modules:
                # There are none, and where there is a card (since 2.15: one in use), `reset` loads Inductor to say so to it.
                for asked in ("is_available", "is_initialized"):
                    patches.set(torch.cuda, asked, lambda: False)
            importlib.import_module("torch._dynamo").reset()
