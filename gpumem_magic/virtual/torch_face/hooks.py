"""The few functions of PyTorch through which the virtual GPU must see the program pass: backward, optimizers' grouping,
contexts."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch._subclasses.fake_tensor
import torch.autograd.graph
import torch.optim
import torch.utils._foreach_utils
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpumem_magic.patching import Patches
from gpumem_magic.tracebacks import cut
from gpumem_magic.virtual.engine.computing import with_tensors
from gpumem_magic.virtual.engine.engine import Engine, quiet
from gpumem_magic.virtual.engine.modes import STATE, pushed
from gpumem_magic.virtual.engine.node_numbers import count_pass, number_as_on_a_device
from gpumem_magic.virtual.engine.tensors import VirtualTensor


def install_engine_hooks(patches: Patches, engine: Engine) -> None:
    for step in (_backward, _fake_tensors, _foreach, _transforms):
        patches.attempt(step, engine)


def _backward(patches: Patches, engine: Engine) -> None:
    """C++ makes tensors in a backward pass that come to no virtual tensor's notice: the mode sees them.

    `_engine_run_backward` is the one way into the engine from Python; `torch.autograd` imports the name.
    """
    original = torch.autograd.graph._engine_run_backward

    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_traced(t_outputs) or _stays_on_host(t_outputs):
            return original(t_outputs, *args, **kwargs)
        first = next((output for output in map(_unwrapped, t_outputs) if isinstance(output, VirtualTensor)), None)
        if first is not None:
            STATE.last_device = first.fake_device.index
        if not STATE.backward:
            number_as_on_a_device(t_outputs)
        numbered = _get_sequence_nr()
        STATE.backward += 1
        try:
            # Hooks, functions and compilers that run in it call PyTorch as the program does elsewhere.
            with pushed(engine.mode), torch._C._EnableTorchFunction():
                found = original(t_outputs, *args, **kwargs)
        finally:
            STATE.backward -= 1
        if not STATE.backward:
            count_pass(numbered, with_graph=args[2])
        return found

    patches.set(torch.autograd.graph, "_engine_run_backward", run)
    patches.set(torch.autograd, "_engine_run_backward", run)


def _is_traced(outputs: Any) -> bool:
    """Whether a compiler traces this backward pass: nothing is computed."""
    first = next(iter(outputs), None)
    return isinstance(first, FunctionalTensor) or (
        isinstance(first, FakeTensor) and not isinstance(first, VirtualTensor)
    )


# The nodes at which a graph may come to the host from a device; a function of the program's own may, too.
_CROSSINGS = ("ToCopyBackward", "CopyBackward", "CopySlices")


def _stays_on_host(outputs: Any) -> bool:
    """Whether a backward pass from these tensors meets host tensors only: it need not be watched, and watching is slow."""
    nodes = []
    for output in outputs:
        if isinstance(_unwrapped(output), VirtualTensor) or type(output) not in (torch.Tensor, torch.nn.Parameter):
            return False
        nodes.append(output.grad_fn)
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith(_CROSSINGS) or isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        nodes += [following for following, _ in node.next_functions]
    return True


def _fake_tensors(patches: Patches, engine: Engine) -> None:
    """FakeTensor makes a tensor on the real device to warm its context up: there is no real device."""
    patches.set(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
    patches.insert(torch._subclasses.fake_tensor.log, "filters", quiet)


# Where `torch.func` runs a function: every vmap, what `grad` is made of, and what `jacrev`, `jacfwd` and `hessian` are.
_TRANSFORMS = {
    "torch._functorch.vmap": ("_flat_vmap",),
    "torch._functorch.eager_transforms": ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"),
}


def _transforms(patches: Patches, engine: Engine) -> None:
    """Inside a transform of `torch.func` a tensor is wrapped, and what C++ makes would come to no virtual tensor's notice."""
    for place, names in _TRANSFORMS.items():
        module = importlib.import_module(place)
        for name in names:
            patches.set(module, name, _with_our_mode(getattr(module, name), engine))


def _with_our_mode(original: Any, engine: Engine) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(_unwrapped(leaf), VirtualTensor) for leaf in tree_leaves((args, kwargs))):
            return original(*args, **kwargs)
        with pushed(engine.mode), _IndexedByTensors():
            return original(*args, **kwargs)

    # What Dynamo takes in its place: it reads into PyTorch's own.
    run._torchdynamo_inline = original  # type: ignore[attr-defined]
    return run


class _IndexedByTensors(TorchFunctionMode):
    """What is wrapped tells nobody that a list is its index, of which C++ makes a tensor on the device: here without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            inside = _unwrapped(args[0])
            if inside is not args[0] and isinstance(inside, VirtualTensor):
                args = args[0], with_tensors(args[1], inside.device), *args[2:]
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            __tracebackhide__, args, kwargs = True, (), {}
            raise cut(error)  # noqa: B904


def _unwrapped(arg: Any) -> Any:
    """What is inside the wrappers of `torch.func`."""
    while isinstance(arg, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(arg):
        arg = torch._C._functorch.get_unwrapped(arg)
    return arg


# Since when optimizers begin with the last of the types that their parameters have. (Builds of 2.2 to 2.4 were asked.)
_LAST_GROUP_FIRST_FROM = (2, 4)


def _foreach(patches: Patches, engine: Engine) -> None:
    """Optimizers take their grouped (foreach) path only for tensor types that they know, and group by the device that C++
    sees."""
    # `torch.optim` hides its submodule's name.
    for module in (importlib.import_module("torch.optim.optimizer"), torch.utils._foreach_utils):
        patches.insert(module, "_foreach_supported_types", VirtualTensor)

    original = torch._C._group_tensors_by_device_and_dtype

    def group(tensors: Any, with_indices: bool = False) -> Any:
        groups = original(tensors, with_indices)
        seen = {(_as_python_sees(device, lists), dtype): (lists, indices)
                for (device, dtype), (lists, indices) in groups.items()}  # fmt: skip
        device = next((device for device, _ in seen if device.type == "cuda"), None)
        if len(seen) == 1 or device is None or engine.memory.torch_version(device.index) >= _LAST_GROUP_FIRST_FROM:
            return seen
        order = list(dict.fromkeys((one.device, one.dtype) for one in tensors[0]))
        return dict(sorted(seen.items(), key=lambda group: order.index(group[0]) if group[0] in order else len(order)))

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", group)


def _as_python_sees(device: torch.device, lists: Any) -> torch.device:
    """C++ calls a virtual device meta, and that of what wraps its tensors."""
    if device.type != "meta":
        return device
    return next((tensor.device for tensors in lists for tensor in tensors if tensor is not None), device)
