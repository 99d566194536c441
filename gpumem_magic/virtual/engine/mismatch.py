"""Operators with tensors of different devices or types, or of wrong shapes: PyTorch's own errors for them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads

# Operators which take tensors of several devices: copies, and index tensors that may stay on the host.
_MIXING = {
    *overloads("copy_ _to_copy index.Tensor index_put index_put_ _index_put_impl_ _foreach_copy_ is_same_size"),
    *overloads("set_.source_Tensor set_.source_Storage set_.source_Storage_storage_offset"),
    *overloads("_has_compatible_shallow_copy_type _has_same_storage_numel"),
}

# Arguments that kernels take from the host.
_ON_HOST = {
    "_pack_padded_sequence": {"lengths"},
    "_ctc_loss": {"input_lengths", "target_lengths"},
    "_cudnn_ctc_loss": {"input_lengths", "target_lengths"},
    "tensor_split": {"tensor_indices_or_sections"},
}

# (argument, wrapper) as CUDA's own kernels name them, where the outer operator only forwards the call.
_FORWARDED = {"embedding": ("index", "_index_select"), "_stack": ("tensors", "cat"), "stack": ("tensors", "cat")}

# Kernels that are generated as structured ones: an overload's name comes behind theirs, and before all others.
_STRUCTURED = {
    "mm", "addmm", "bmm", "baddbmm", "addmv", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add",
    "index_add_", "linalg_cross", "nll_loss_forward", "cat", "clamp", "clamp_",
}  # fmt: skip
# What TensorIterator checks although PyTorch does not tag it as element-wise, and what is tagged so and checked by its wrapper
# (``device_check`` in native_functions.yaml; seen on an H100 with 2.11).
_BY_ELEMENTS = set(overloads("mse_loss smooth_l1_loss huber_loss binary_cross_entropy"))
_BY_WRAPPER = set(overloads("clamp.Tensor clamp_.Tensor"))
# Where a host tensor without dimensions is no number either (``allow_cpu_scalars`` of ``TensorIterator``; seen there, too).
_WITHOUT_NUMBERS = {*_BY_WRAPPER, *overloads("addcdiv addcdiv_ addcmul addcmul_")}
_INDEX_PUTS = set(overloads("index_put index_put_ _index_put_impl_"))
_FILLS = set(overloads("masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor"))

# What choices are made by.
_FLAGS = (torch.bool, torch.uint8)

_OF_FILLS = "masked_fill only supports boolean masks, but got dtype {}"
# What is said of a mask that is not of flags (``cuda/Indexing.cu``).
_MASKED = {
    **dict.fromkeys(_FILLS, _OF_FILLS),
    **dict.fromkeys(
        overloads("masked_scatter masked_scatter_"),
        "masked_scatter_ only supports boolean masks, but got mask with dtype {}",
    ),
}


def refuse_mixed_devices(func: Any, args: Any, kwargs: Any, *, sure: bool = False) -> None:
    """Raises PyTorch's RuntimeError if the tensors are not all on one device.

    A host tensor without dimensions counts as a number. `sure`: the fake mode has already found a mismatch.
    """
    if func in _MIXING and not sure:
        return
    if func in _CONVOLUTIONS and args[0].device != args[1].device:
        if args[0].device.type == "cpu" and args[0].dim() == 4 and args[0].dtype == torch.float32 and not args[6]:
            _refuse_host_images(*args[:9])
        _refuse_weight(*args[:2])
    if func in _INDEX_PUTS and sure:
        # (Its own check comes before TensorIterator's, and says no more.)
        _refuse_two([("self", args[0]), ("values", args[2])])
    host_names = _ON_HOST.get(func._schema.name.removeprefix("aten::"), ())
    named = [(name, tensor) for name, tensor in _named_tensors(func, args, kwargs) if name not in host_names]
    if func in _FILLS and named[0][1].device.type == "cpu" and sure is False:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    if any(tensor.device.type == "cuda" for _, tensor in named):
        # (Of these the first says which device it should be.)
        counting = [
            (name, tensor.device)
            for name, tensor in named
            if tensor.dim() or tensor.device.type != "cpu" or func in _WITHOUT_NUMBERS
        ]
        for name, device in counting:
            if device != counting[0][1]:
                _refuse(func, name, device, counting[0][1])
    if sure:
        _refuse_two(named)


def _refuse_two(named: Any) -> NoReturn:
    """In TensorIterator's words."""
    devices = list(dict.fromkeys(str(tensor.device) for _, tensor in named))
    devices.sort(key=lambda device: not device.startswith("cuda"))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices[:2])}!"
    )


def is_device_mismatch(error: Exception) -> bool:
    """Whether the fake mode found tensors of several devices: an error of its own class since 2.12, a text before."""
    return type(error).__name__ == "FakeTensorDeviceMismatchError" or (
        type(error) is RuntimeError and _MISMATCH.match(str(error)) is not None
    )


# (The second is that of assignments by index.)
_MISMATCH = re.compile("Unhandled FakeTensor Device Propagation|Mismatching .* device between self ")


# Matrix products: the positions of the two matrices among the arguments.
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1}
_BATCHED = {_aten.bmm.default, _aten.baddbmm.default}
# What rows of a table are found by. (PyTorch's shape rule looks at that after 2.9.)
_ROW_NUMBERS = {torch.int64, torch.int32}
# What looks up a class for each row, or each pixel (``cuda/Loss.cu``, ``cuda/NLLLoss2d.cu``).
_CLASSES = set(overloads("nll_loss_forward nll_loss2d_forward"))
# What PyTorch has for the host alone, of what programs call.
_NOT_ON_CUDA = {
    *overloads("histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges _histogramdd_from_bin_cts"),
    *overloads("_histogramdd_from_bin_tensors to_mkldnn _spdiags _sparse_mm_reduce_impl"),
}
_CONVOLUTIONS = {_aten.convolution.default, _aten._convolution.default}


# What CUDA's kernels are called that take neither half precision nor integers, where a shape rule takes any: by operator, a
# function of its arguments.
IN_FULL_PRECISION: dict[Any, Callable[..., str]] = dict.fromkeys(overloads("_cdist_forward"), lambda *_: "cdist_cuda")
_HALVES = {torch.float16, torch.bfloat16, torch.complex32}


def in_full_precision(*functions: Any) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Registers how the kernel is called that these operators run."""

    def register(name: Callable[..., str]) -> Callable[..., str]:
        IN_FULL_PRECISION.update(dict.fromkeys(functions, name))
        return name

    return register


def refuse_half_precision(func: Any, args: Any, kwargs: Any) -> None:
    """Raises CUDA's error where an operator's kernel is for float32 and wider types alone. (Without elements none is run.)"""
    name = IN_FULL_PRECISION.get(func)
    if name is not None and args[0].dtype in _HALVES and args[0].numel():
        raise NotImplementedError(f"\"{name(*args, **kwargs)}\" not implemented for '{scalar_name(args[0].dtype)}'")


# Element by element in C++, though not tagged so.
_BY_ELEMENT = set(overloads("floor_divide_.Tensor floor_divide.out"))


@functools.cache
def _writes_each_element(func: Any) -> bool:
    """Whether it writes to a tensor element by element: it is tagged so, or what makes a new tensor is (comparisons)."""
    name = func._schema.name
    if func in _BY_ELEMENT or (torch.Tag.pointwise in func.tags and func._schema.is_mutable):
        return not name.endswith("__")
    if func.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return False
    plain: Any = getattr(
        getattr(_aten, name.removeprefix("aten::")[:-1]), func._schema.overload_name or "default", None
    )
    # (Some have no such operator.)
    return type(plain) is type(func) and torch.Tag.pointwise in plain.tags


def written_arguments(schema: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What an operator of this schema writes to: tensors, and lists of them."""
    for number, argument in enumerate(schema.arguments):
        if argument.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def refuse_to_grow(func: Any, args: Any, kwargs: Any) -> None:
    """Raises CUDA's error where what is written in place, or named (``out=``) and read as well, would have to be larger
    (`compute_shape` in ``TensorIterator.cpp``): some of PyTorch's rules in Python give it another size."""
    if not args or not _writes_each_element(func):
        return
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    read = [one for one in written_arguments(func._schema, args, kwargs) if any(one is other for other in tensors)]
    if not read:
        return
    try:
        wanted = torch.broadcast_shapes(*(one.shape for one in tensors))
    except RuntimeError:
        # (The operator says so itself.)
        return
    for one in read:
        if wanted != one.shape:
            raise RuntimeError(f"output with shape {list(one.shape)} doesn't match the broadcast shape {list(wanted)}")


def refuse_without_kernel(func: Any) -> None:
    """Raises CUDA's error for an operator that it lacks."""
    # (Those of quantised networks are for the CPU; the few that cuDNN has, for quantised tensors of its own:
    # ``native/quantized/cudnn``.)
    if func in _NOT_ON_CUDA or func.namespace == "quantized":
        raise NotImplementedError(
            f"Could not run '{func.name().removesuffix('.default')}' with arguments from the 'CUDA' backend. This could be "
            "because the operator doesn't exist for this backend."
        )


def refuse_mixed_types(func: Any, args: Any) -> None:
    """Raises CUDA's error for matrices, or input and weight, of different types: shape rules do not look at that."""
    if func is _aten.embedding.default and args[1].dtype not in _ROW_NUMBERS:
        # (`embedding_symint` in ``Embedding.cpp``.)
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
            f"{_type_name(args[1])} instead (while checking arguments for embedding)"
        )
    if func is _aten.native_layer_norm.default:
        # (`layer_norm_cuda` in ``layer_norm_kernel.cu`` asks for the weights as numbers of the input's type.)
        for weight in args[2:4]:
            if weight is not None and weight.dtype != args[0].dtype:
                names = scalar_name(args[0].dtype), scalar_name(weight.dtype)
                raise RuntimeError(f"expected scalar type {names[0]} but found {names[1]}")
    if func is _aten.native_group_norm.default:
        # (``group_norm.cpp``, and then the kernel asks as above.)
        for weight in args[1:3]:
            if weight is not None and weight.dtype != args[0].dtype:
                names = scalar_name(args[0].dtype), scalar_name(weight.dtype)
                if weight.dtype != torch.float32:
                    raise RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")
                raise RuntimeError(f"expected scalar type {names[0]} but found {names[1]}")
    # (Shapes are checked first, by `nll_loss_forward` of ``LossNLL.cpp``.)
    if (
        func in _CLASSES
        and args[1].dtype not in (torch.int64, torch.uint8)
        and (func is _aten.nll_loss2d_forward.default or args[1].dim() < 2)
    ):
        name = scalar_name(args[1].dtype)
        if func is _aten.nll_loss2d_forward.default:
            raise RuntimeError(f"expected scalar type Long but found {name}")
        raise NotImplementedError(f"\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for '{name}'")
    if func is _aten.index_select.default:
        # (`index_select_out_cuda_impl` in ``cuda/Indexing.cu``.)
        if args[2].dim() > 1:
            raise RuntimeError("Index is supposed to be an empty tensor or a vector")
        if args[2].dtype not in _ROW_NUMBERS:
            raise NotImplementedError(
                f"\"index_select_out_cuda_impl\" not implemented for '{scalar_name(args[2].dtype)}'"
            )
    if func in _MASKED and args[1].dtype != torch.bool:
        raise RuntimeError(_MASKED[func].format(scalar_name(args[1].dtype)))
    if func is _aten.where.self and args[0].dtype not in _FLAGS:
        # (`where_self_out` in ``TensorCompare.cpp``.)
        name = scalar_name(args[0].dtype)
        raise RuntimeError(f"where expected condition to be a boolean tensor, but got a tensor with dtype {name}")
    first = _PRODUCTS.get(func)
    if first is not None:
        left, right = args[first], args[first + 1]
        if left.dtype != right.dtype:
            names = scalar_name(left.dtype), scalar_name(right.dtype)
            if func in _BATCHED:
                raise RuntimeError(f"expected scalar type {names[0]} but found {names[1]}")
            if func is _aten.mm.default:
                # (The check of the kernel itself, in ``cuda/Blas.cpp``; `addmm` has one for all devices.)
                raise RuntimeError(
                    f"expected mat1 and mat2 to have the same dtype, but got: {type_of_c(left.dtype)} != "
                    f"{type_of_c(right.dtype)}"
                )
            raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {names[0]} and {names[1]}")
    elif func in _CONVOLUTIONS and args[0].dtype != args[1].dtype:
        _refuse_weight(*args[:2])
    if func in _CONVOLUTIONS and not (args[0].is_floating_point() or args[0].is_complex()) and args[0].numel():
        # (``cudnn/Types.cpp`` has names for three types of integers, and the library no engine for these.)
        if args[0].dtype in (torch.uint8, torch.int8, torch.int32):
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {scalar_name(args[0].dtype)}")


def refuse_mask_of_numbers(mask: Any) -> None:
    """Of a mask whose places are filled with one number: an assignment to them is `masked_fill_` (`canDispatchToMaskedFill` in
    ``IndexingUtils.h``)."""
    if mask.dtype != torch.bool:
        raise RuntimeError(_OF_FILLS.format(scalar_name(mask.dtype)))


def refuse_other_types(first: Any, *others: Any) -> None:
    """Where ``TensorIterator`` does not promote."""
    for one in others:
        if one.dtype != first.dtype:
            raise RuntimeError(f"Found dtype {scalar_name(one.dtype)} but expected {scalar_name(first.dtype)}")


def together(*shapes: torch.Size) -> torch.Size:
    """The shape of what is made of tensors with these shapes; where they do not go together, the error is that of C++
    (`infer_size_impl` in ``ExpandUtils.cpp``), and not that of PyTorch's Python."""
    try:
        return torch.Size(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        dims = max(map(len, shapes))
        first, *others = [[1] * (dims - len(shape)) + list(shape) for shape in shapes]
        for other in others:
            for dim in reversed(range(dims)):
                if 1 not in (first[dim], other[dim]) and first[dim] != other[dim]:
                    raise RuntimeError(
                        f"The size of tensor a ({first[dim]}) must match the size of tensor b ({other[dim]}) at non-singleton "
                        f"dimension {dim}"
                    ) from None
            first = [max(pair) if 0 not in pair else 0 for pair in zip(first, other, strict=True)]
        raise


def check_generator(generator: Any, kind: str) -> None:
    """Refuses a generator of another kind of device (`check_generator` in ATen/core/Generator.h). The host's own may be that of
    a device that computes."""
    if generator is not None and generator.device.type != kind and generator is not torch.default_generator:
        raise RuntimeError(f"Expected a '{kind}' device type for generator but found '{generator.device.type}'")


def _refuse_weight(input: Any, weight: Any, otherwise: str = "") -> NoReturn:
    types = f"Input type ({_type_name(input)}) and weight type ({_type_name(weight)})"
    raise RuntimeError(f"{types} should be the same{otherwise}")


def _refuse_host_images(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, more: Any,
    groups: int,
) -> NoReturn:  # fmt: skip
    """Images on the host and weights on a device: the way that the host would take with the images has the word (`use_mkldnn` in
    ``Convolution.cpp``). One image, if it is small, has no library's way, but a kernel of PyTorch's, which the weights decide."""
    batch, (high, wide) = input.shape[0], weight.shape[-2:]
    plain = batch < 16 and high == wide == 1 and {*stride, *dilation} == {1} and torch.get_num_threads() == 1
    large = groups > 1 or (high > 3 and wide > 3) or batch > 1 or input.numel() > 20_480
    if large and not plain:
        _refuse_weight(input, weight, " or input should be a MKLDNN tensor and weight is a dense tensor")
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got weight is on {weight.device}, different from other tensors on "
        f"{input.device} (when checking argument in method wrapper_CUDA___slow_conv2d_forward)"
    )


def _type_name(tensor: Any) -> str:
    name = scalar_name(tensor.dtype)
    return f"torch.{'cuda.' if tensor.device.type == 'cuda' else ''}{name}Tensor"


# Larger arguments than this are not tried on the host: a refusal comes at once, but what is not refused would be computed.
_MOST_ELEMENTS = 1 << 24
_MOST_WRITTEN = 1 << 20


def in_cudas_words(error: Exception, func: Any, args: Any, kwargs: Any) -> Exception:
    """The error that a device raises where a shape rule refused an operator: the rules' own words are often others.

    Most checks are in code that CUDA shares with the host, so the host is asked, with arguments of the same shapes (of one
    element each in memory, where nothing is written to them; of none and with the same strides, for a view).
    """
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return error
    try:
        most: float = _MOST_WRITTEN if func._schema.is_mutable else _MOST_ELEMENTS
        if _cannot_multiply(func, args):
            most = math.inf
        if func.is_view:
            args = [_without_memory(arg) for arg in args]
        host_args = [_on_host(arg, most, func._schema.is_mutable) for arg in args]
        host_kwargs = {name: _on_host(arg, most, func._schema.is_mutable) for name, arg in kwargs.items()}
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            func(*host_args, **host_kwargs)
    except Exception as hosts:
        if type(hosts) in (RuntimeError, IndexError, ValueError) and not re.search(
            "cpu|not implemented|strides", str(hosts), re.I
        ):
            hosts.args = (_HOST_TYPE.sub("torch.cuda.", str(hosts)),)
            return hosts.with_traceback(None)
    return error


# (``torch.FloatTensor``: the host's arguments stand for a device's.)
_HOST_TYPE = re.compile(r"\btorch\.(?=[A-Z][A-Za-z0-9]*Tensor\b)")


def _cannot_multiply(func: Any, args: Any) -> bool:
    """Whether it is a product that is refused for its matrices' shapes, before anything is computed."""
    first = _PRODUCTS.get(func)
    if first is None or func in _BATCHED:
        return False
    left, right = args[first], args[first + 1]
    return bool(left.dim() == 2 and right.dim() == 2 and left.shape[1] != right.shape[0])


def _without_memory(arg: Any) -> Any:
    if not isinstance(arg, torch.Tensor) or arg.layout is not torch.strided:
        return arg
    with torch._C._DisableTorchDispatch():
        return _aten.empty_strided.default(arg.size(), arg.stride(), dtype=arg.dtype, device=torch.device("meta"))


def _on_host(arg: Any, most: float, written: bool) -> Any:
    if type(arg) is torch.Tensor and arg.is_meta:
        return arg
    if isinstance(arg, torch.Tensor):
        if arg.numel() > most:
            raise NotImplementedError
        with torch._C._DisableTorchDispatch():
            one = _aten.zeros.default([] if not written else arg.shape, dtype=arg.dtype)
            return one if written else one.expand(arg.shape)
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    if isinstance(arg, (list, tuple)):
        return [_on_host(item, most, written) for item in arg]
    return arg


# As C++ calls the types (`TypeMeta`), where that is another name.
_NAMES_OF_C = {
    torch.float32: "float", torch.float64: "double", torch.int64: "long", torch.int32: "int", torch.int16: "short",
    torch.int8: "signed char", torch.uint8: "unsigned char", torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>", torch.complex32: "c10::complex<c10::Half>",
}  # fmt: skip


def type_of_c(dtype: torch.dtype) -> str:
    return _NAMES_OF_C.get(dtype) or f"c10::{scalar_name(dtype)}"


_SCALAR_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def scalar_name(dtype: torch.dtype) -> str:
    return _SCALAR_NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def _is_of_lists(func: Any) -> bool:
    """Whether it goes through lists one tensor after the other, where they do not all lie on one device (``ForeachUtils.h``)."""
    return bool(func._schema.name.startswith("aten::_foreach_"))


def _refuse(func: Any, name: str, odd: torch.device, common: torch.device) -> NoReturn:
    # Element-wise kernels are checked by TensorIterator, all others by the wrapper that PyTorch's build generates.
    if func in _FILLS:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {odd} and self on {common}"
        )
    if (
        func in _BY_ELEMENTS
        or _is_of_lists(func)
        or (torch.Tag.pointwise in getattr(func, "tags", ()) and func not in _BY_WRAPPER)
    ):
        # (Which names a card first.)
        first, second = (odd, common) if common.type == "cpu" else (common, odd)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
        )
    operator, overload = func._schema.name.split("::")[-1], func._schema.overload_name
    wrapper = f"{overload}_{operator}"
    if operator in _STRUCTURED:
        wrapper = f"{operator}_{overload}" if overload else operator
    if operator in _FORWARDED:
        name, wrapper = _FORWARDED[operator]
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {name} is on {odd}, different from other tensors on {common} "
        f"(when checking argument in method wrapper_CUDA_{wrapper})"
    )


def _named_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
    for position, arg in enumerate(args):
        name = names[position] if position < len(names) else f"argument {position + 1}"
        for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(tensor, torch.Tensor):
                yield ("tensors" if isinstance(arg, (list, tuple)) else name), tensor
    for name, arg in (kwargs or {}).items():
        if isinstance(arg, torch.Tensor):
            yield name, arg
