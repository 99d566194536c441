"""Autograd's graph, read without running anything: no unpack hook, no recomputation."""

from __future__ import annotations

from typing import Any

import torch

_PREFIX = "_raw_saved_"
_names: dict[type, tuple[str, ...]] = {}


def is_node_type(kind: type) -> bool:
    """Whether objects of this type are nodes of autograd's graph."""
    return issubclass(kind, torch.autograd.graph.Node) or (
        isinstance(kind.__module__, str) and kind.__module__.startswith("torch") and "next_functions" in vars(kind)
    )


def next_nodes(node: Any) -> list[Any]:
    """The nodes that feed this one's inputs."""
    return [found for found, _ in node.next_functions if found is not None]


def saved_by(node: Any) -> list[tuple[str, Any]]:
    """(argument, value) of what a node keeps for backward: tensors, or what the user's pack hook made of them.

    `_raw_saved_*` and `SavedTensor.data` are private: tried on torch 2.13. Where a value can't be read it is left out, because
    the public ways (`_saved_*`, `unpack`) run the user's hooks.
    """
    kind = type(node)
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    found = []
    for name in _names[kind]:
        try:
            raw = getattr(node, name)
        except RuntimeError:
            # Freed by backward.
            continue
        several = raw if isinstance(raw, (tuple, list)) else (raw,)
        for saved in several:
            value = getattr(saved, "data", None)
            if value is not None:
                found.append((name.removeprefix(_PREFIX), value))
    return found


def operation_of(node: Any) -> str:
    """What a reader calls a node: ``gelu`` of ``GeluBackward0``."""
    name = type(node).__name__
    short = name.rstrip("0123456789").removesuffix("Backward")
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in short).lstrip("_")
    return words if short and short != name else name
