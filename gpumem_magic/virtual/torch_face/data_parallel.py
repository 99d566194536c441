"""`torch.nn.parallel.DistributedDataParallel` on a virtual GPU: what its reducer, which is C++, would ask of other processes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.tensors import VirtualTensor


def install(patches: Patches, engine: Engine) -> None:
    """The reducer makes its buckets in C++, and would compare the parameters' values with other processes'."""
    distributed: Any = importlib.import_module("torch.distributed")
    home = importlib.import_module("torch.nn.parallel.distributed")
    kind = home.DistributedDataParallel
    original_init = kind.__init__
    original_hook = kind.register_comm_hook

    # (The arguments' names are PyTorch's: Lightning gives the model by its name.)
    @functools.wraps(original_init)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not any(isinstance(p, VirtualTensor) for p in module.parameters()):
            original_init(self, module, *args, **kwargs)
            return
        with pushed(engine.mode):
            original_init(self, module, *args, **kwargs)
        self._gpumem_exchange = _Exchange(functools.partial(_averaged, self.process_group))
        self.logger = _LoggerWithoutTimes(self.logger)
        if not self._comm_hooks:
            distributed._register_comm_hook(self.reducer, None, self._gpumem_exchange)

    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        ours = getattr(self, "_gpumem_exchange", None)
        if ours is None:
            original_hook(self, state, hook)
            return
        self._check_comm_hook(hook)
        ours.use(state, hook)

    def skip_for_ours(original: Any, place: str) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            found = kwargs.get(place, args[1] if len(args) > 1 else ())
            tensors = list(found.parameters() if isinstance(found, torch.nn.Module) else found)
            if any(isinstance(tensor, VirtualTensor) for tensor in tensors):
                with pushed(engine.mode), torch.no_grad():
                    if isinstance(found, torch.nn.Module):
                        _send_in_buckets([*tensors, *found.buffers()], kwargs["broadcast_bucket_size"])
                    else:
                        _compare_shapes(args[0], tensors)
                if isinstance(found, torch.nn.Module) and engine.computes:
                    _send_from_first(found)
                return None
            return original(*args, **kwargs)

        return instead

    def within_our_mode(original: Any) -> Any:
        def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "_gpumem_exchange", None) is None:
                return original(self, *args, **kwargs)
            with pushed(engine.mode), values.every_integer():
                return original(self, *args, **kwargs)

        return instead

    for name in ("_pre_forward", "_post_forward"):
        # Buckets are made again there, after the first backward pass; which parameter goes where is sent round as integers.
        patches.set(kind, name, within_our_mode(getattr(kind, name)))
    patches.set(kind, "__init__", init)
    patches.set(kind, "register_comm_hook", register_comm_hook)
    for name, place in (("_verify_param_shape_across_processes", "tensors"), ("_sync_module_states", "module")):
        if hasattr(home, name):
            patches.set(home, name, skip_for_ours(getattr(home, name), place))


def _compare_shapes(group: Any, tensors: list[torch.Tensor]) -> None:
    """The memory of `verify_params_across_processes` (``reducer.cpp``): how many parameters each process has, gathered, and all
    their sizes and strides, from the first."""
    device = tensors[0].device
    mine = torch.tensor([len(tensors)], device="cpu").to(device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([theirs], [mine]).wait()
    shapes = torch.zeros(2 * sum(tensor.dim() for tensor in tensors), dtype=torch.long, device="cpu").to(device)
    group.broadcast(shapes, 0).wait()
    # They go in this order.
    del shapes, theirs, mine


def _send_in_buckets(tensors: list[torch.Tensor], most: int) -> None:
    """The memory of a broadcast: tensors lie together in pieces of up to `most` bytes or little more, two at a time."""
    on_device = [tensor.detach() for tensor in tensors if isinstance(tensor, VirtualTensor)]
    under_way: list[torch.Tensor] = []
    distributed: Any = torch.distributed
    for numbers in distributed._compute_bucket_assignment_by_size(on_device, [most])[0]:
        del under_way[:-1]
        under_way.append(torch._utils._flatten_dense_tensors([on_device[number] for number in numbers]))
    # The first was the first to be sent.
    del under_way[0]


def _send_from_first(module: torch.nn.Module) -> None:
    """Every process begins with the first one's parameters and buffers."""
    if torch.distributed.get_world_size() > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)


def _averaged(group: Any, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What the reducer does itself: the mean of all processes' gradients, in the bucket, sent by a call that nobody waits for."""
    buffer = bucket.buffer()
    if group.size() > 1:
        buffer.div_(group.size())
    group.allreduce([buffer])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class _Exchange:
    """What a reducer calls for each bucket: the program's hook, where it has one; a reducer takes one hook, and keeps it."""

    def __init__(self, plain: Callable[[object, Any], Any]) -> None:
        self._hook, self._state = plain, None

    def use(self, state: Any, hook: Callable[[object, Any], Any]) -> None:
        self._hook, self._state = hook, state

    def __call__(self, _: object, bucket: Any) -> Any:
        return self._hook(self._state, bucket)


class _LoggerWithoutTimes:
    """The reducer's log. Of a device that it does not know, `set_runtime_stats_and_log` (``logger.cpp``) only warns, on the
    program's screen, that it takes no times.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Takes no times."""
