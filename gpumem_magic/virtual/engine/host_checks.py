"""What PyTorch checks in code that the host and CUDA share, and its shape rules do not: the host is asked.

A shape rule gives the softmax over a third dimension of two, or the product in place of flags and a number. The host's operator
refuses both, with the words of a card's. It is asked for arguments that were not met before and look alike, of few elements:
those of an operator that works element by element, or sums up, are cut down, others must be small.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_magic.failures import swallows
from gpumem_magic.looks.tensors import no_dispatch

# Elements of all arguments and results of what is not cut down, and lengths of what is.
_MOST = 1 << 12
_FEW = 2

# What is asked besides what works by elements or sums up.
_ASKED = {
    "_softmax", "_log_softmax", "index_put", "index_put_", "index_add", "index_add_", "index_copy", "index_copy_", "put", "put_",
    "grid_sampler_2d", "grid_sampler_3d", "convolution",
}  # fmt: skip
# What sums up: PyTorch tags it so since 2.10.
REDUCTIONS = frozenset({
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg__powsum", "linalg_vector_norm",
    "logsumexp", "max", "mean", "min", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
})  # fmt: skip
_FLAGS = (torch.bool, torch.uint8)
# What warns of few elements, as a card does of the program's own, and gradients, which take what kernels have kept.
_PASSED_OVER = re.compile(r"std|var|nan|.*_backward")
# What only the host refuses, or refuses in its own way.
_HOSTS_OWN = re.compile(
    "cpu|not implemented for '|strides|mkl|dnn|determin|lapack|blas|alloc|division|memory format|could not run|"
    "arguments are located",
    re.I,
)
_KERNEL = re.compile(r"\"(?P<kernel>\w+)\" not implemented for '(?P<type>\w+)'")
_MORE_ON_CUDA = {"ComplexHalf"}
_ON_CUDA_ALONE = {("abs_cpu", "Bool")}
_REFUSALS = (RuntimeError, IndexError, ValueError)


def refused_by_host(func: Any, args: Any, kwargs: Any, out: Any) -> Exception | None:
    """The error that the host's operator raises for arguments that look so. out: what the shape rule gives."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    name = func._schema.name.removeprefix("aten::")
    leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if not leaves or any(one.layout is not torch.strided or one.is_conj() or one.is_neg() for one in leaves):
        return None
    by_element = torch.Tag.pointwise in func.tags
    cut = by_element or name in REDUCTIONS
    if _PASSED_OVER.match(name) and leaves[0].is_floating_point():
        return None
    if not cut:
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        sizes = [one.numel() for one in (*leaves, *made)]
        by_mask = name.startswith("index_put") and any(
            one.dtype in _FLAGS for one in tree_leaves(args[1]) if one is not None
        )
        if name not in _ASKED or by_mask or not all(sizes) or sum(sizes) > _MOST:
            return None

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            lengths = [min(length, _FEW) for length in leaf.shape] if cut else list(leaf.shape)
            # (Where all lie at one place, they do so there, too: that is refused where it is written to.)
            own = [
                1 if length and not stride else length for length, stride in zip(lengths, leaf.stride(), strict=True)
            ]
            return torch.full(own, by_element, dtype=leaf.dtype).expand(lengths)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    try:
        with no_dispatch(), torch.no_grad():
            func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    except NotImplementedError as error:
        if by_element and not _HOSTS_OWN.search(str(error)):
            return error.with_traceback(None)
        return _without_kernel(str(error)) if by_element else None
    except _REFUSALS as error:
        if type(error) in _REFUSALS and not _HOSTS_OWN.search(str(error)):
            return error.with_traceback(None)
    except Exception as error:
        # Of another kind than what refuses arguments.
        if not swallows(error):
            raise
    return None


def _without_kernel(words: str) -> Exception | None:
    """For these types CUDA has no more kernels than the host has; they are called alike."""
    found = _KERNEL.match(words)
    if found is None or found["type"] in _MORE_ON_CUDA or found.group("kernel", "type") in _ON_CUDA_ALONE:
        return None
    return NotImplementedError(f"\"{found['kernel'].replace('cpu', 'cuda')}\" not implemented for '{found['type']}'")
