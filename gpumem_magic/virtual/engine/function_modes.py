"""Function modes of the program's own: they see the functions that it calls, and nothing of what the virtual GPU does for them.

PyTorch's functions begin with a question: is a `TorchFunctionMode` on? Then that mode has the call, under the function's public
name, and the function runs when the mode calls it, without the mode. So does what stands here in the place of such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, GetSetDescriptorType, MethodDescriptorType
from typing import Any

import torch
import torch.fft
from torch.overrides import handle_torch_function, has_torch_function_unary

from gpumem_magic.looks.tensors import no_functions

# Whether a mode is on in this thread.
are_on: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

_OF_FFT = torch.fft.fftfreq.__self__


def ask(public: Any, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the modes that are on make of a call, by the function's public name; the function itself is asked last, by the last of
    them. own: what they are asked before."""
    # (Of None nothing else could be found. The question uses up that somebody has passed this call on, of which nobody is to be
    # asked: `torch.overrides.redispatch_function`.)
    if has_torch_function_unary(None):
        return handle_torch_function(public, (), *args, **kwargs)
    with no_functions():
        return own(*args, **kwargs)


def asked_first(original: Any) -> tuple[Callable[[], bool], Callable[..., Any]] | None:
    """For `patching.Patches`: function modes are asked of what was C++'s. (PyTorch's functions in Python ask by themselves.)"""
    if isinstance(original, (MethodDescriptorType, GetSetDescriptorType)):
        asks = issubclass(torch.Tensor, original.__objclass__)
    else:
        asks = isinstance(original, BuiltinFunctionType) and _is_overridable(original)
    return (are_on, ask) if asks else None


def _is_overridable(function: Any) -> bool:
    return function.__self__ is _OF_FFT or getattr(torch._C._VariableFunctions, function.__name__, None) is function
