"""What FSDP keeps beside a module's parameters: gradients of whole ones, which wait until they are shared out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attribute, is_a, is_sequence, members
from gpumem_magic.looks.tensors import Named


def waiting_gradients(module: torch.nn.Module) -> Iterator[Named]:
    """Of `fully_shard`'s whole parameters, by the parameters' names, where the program accumulates without sharing out."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    sharded = attribute(sys.modules.get("torch.distributed.fsdp"), "FSDPModule")
    # (Another module, whose hash may be the program's own, is not looked up.)
    if states is None or sharded is None or not is_a(module, sharded):
        return
    reference = states._module_state_mapping.get(module)
    state = None if reference is None else reference()
    groups = attribute(state, "_fsdp_param_groups")
    for group in members(groups) if is_sequence(groups) else [attribute(state, "_fsdp_param_group")]:
        parameters = attribute(group, "fsdp_params")
        for one in members(parameters) if is_sequence(parameters) else ():
            whole, name = attribute(one, "_unsharded_param"), attribute(one, "_param_fqn")
            of_whole: Any = tensors.grad(whole) if tensors.is_tensor(whole) else None
            for gradient in (of_whole, attribute(one, "unsharded_accumulated_grad")):
                if tensors.is_tensor(gradient):
                    yield name if isinstance(name, str) else "", gradient
