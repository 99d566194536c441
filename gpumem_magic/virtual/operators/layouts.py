"""How the results of some operators lie: where the host code of CUDA's kernel says it otherwise than PyTorch's shape rule.

Found by running PyTorch's own samples, turned in several ways, on its CUDA build of 2.13 and here.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import strides
from gpumem_magic.virtual.engine.layouts import (
    LAYOUTS,
    Lies,
    as_a_view,
    as_an_image,
    as_another,
    in_one_piece,
    number_by_number,
    with_strides,
)
from gpumem_magic.virtual.operators.convolution_layouts import (
    gradient_of_input_lies,
    gradient_of_weight_lies,
    result_lies,
)


def _of_a_batch_norm(args: Any, result: torch.Tensor) -> torch.Tensor:
    """As the input does in training, and in one piece in evaluation (``Normalization.cu`` and ``Normalization.cuh``)."""
    training = args[7]
    return (as_an_image(1) if training else in_one_piece)(args, result)


def _turned_by_quarters(args: Any, result: torch.Tensor) -> torch.Tensor:
    """A flipped tensor, whose dimensions change places for an odd number; a plain copy where nothing turns
    (``TensorTransformations.cpp``)."""
    source, quarters, dims = args[0], args[1] if len(args) > 1 else 1, args[2] if len(args) > 2 else (0, 1)
    if quarters % 4 == 0:
        return in_one_piece(args, result)
    its = strides.of_one_like(source.shape, source.stride())
    if quarters % 2:
        places = list(range(source.dim()))
        places[dims[0]], places[dims[1]] = places[dims[1]], places[dims[0]]
        its = tuple(its[place] for place in places)
    return with_strides(its, result)


_TABLE: tuple[tuple[str, tuple[Lies | None, ...]], ...] = (
    ("view _unsafe_view", (as_a_view,)),
    ("convolution", (result_lies,)),
    ("convolution_backward", (gradient_of_input_lies, gradient_of_weight_lies)),
    # `empty_like` (``TensorFactories.cpp``, ``TensorConversions.cpp``, ``TensorTransformations.cpp``, ``UnaryOps.cpp``,
    # ``Activation.cpp``, ``Dropout.cu``, ``Sorting.cpp``).
    ("clone _to_copy empty_like zeros_like ones_like full_like rand_like randn_like randint_like", (as_another(0),)),
    ("flip nan_to_num hardtanh _prelu_kernel _conj_physical deg2rad rad2deg", (as_another(0),)),
    ("rot90", (_turned_by_quarters,)),
    ("frexp.Tensor native_dropout sort sort.stable", (as_another(0), as_another(0))),
    # A clone with MemoryFormat::Contiguous (``TensorAdvancedIndexing.cpp``), `set_output` without strides (``TriangularOps.cpp``,
    # ``SoftMax.cpp``, ``Pow.cpp``, ``Normalization.cpp``, ``LinearAlgebra.cpp``), an `empty` (``Distributions.cpp`` and
    # ``DistributionTemplates.h``).
    ("masked_fill.Scalar masked_fill.Tensor tril triu _softmax _log_softmax pow.Scalar", (in_one_piece,)),
    ("renorm linalg_vector_norm", (in_one_piece,)),
    ("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor", (in_one_piece,)),
    # The second operand comes first (``Activation.cpp``, ``BinaryOps.cpp``).
    ("threshold_backward leaky_relu_backward rsub.Tensor", (number_by_number(1, 0),)),
    # `empty_like` of the input once it lies plainly (``layer_norm_kernel.cu``).
    ("native_layer_norm", (in_one_piece,)),
    # On CUDA of MemoryFormat::Contiguous, whatever strides dimensions of one have (``group_norm.cpp``).
    ("native_group_norm native_group_norm_backward", (in_one_piece,)),
    ("native_layer_norm_backward", (in_one_piece, in_one_piece, in_one_piece)),
    ("_fused_rms_norm_backward", (in_one_piece, in_one_piece)),
    ("native_batch_norm_backward", (_of_a_batch_norm,)),
    # `set_output` without strides (``SoftMax.cpp``).
    ("_log_softmax_backward_data _softmax_backward_data", (in_one_piece,)),
    # `zeros_like` or `empty_like` with LEGACY_CONTIGUOUS_MEMORY_FORMAT (``Loss.cpp``, ``RreluWithNoise.cu``).
    ("mse_loss_backward smooth_l1_loss_backward huber_loss_backward rrelu_with_noise", (in_one_piece,)),
    # The output's options have the input's memory format; PyTorch's rule has so from 16 channels on only (``UpSample.h``,
    # ``UpSampleTrilinear3d.cpp``).
    ("upsample_bilinear2d upsample_trilinear3d", (as_an_image(0),)),
    # `empty_like` in the format that the gradient suggests (``Dropout.cu``).
    ("native_dropout_backward", (as_an_image(0),)),
    ("hardswish_backward hardtanh_backward logit_backward", (number_by_number(0, 1),)),
    # `build_borrowing_binary_op` of the gradient and what it goes with (``Activation.cpp``), where PyTorch has a formula.
    ("softplus_backward hardsigmoid_backward", (number_by_number(0, 1),)),
    ("elu_backward", (number_by_number(0, 5),)),
    # (``BinaryOps.cpp``, ``Activation.cpp``)
    ("floor_divide softshrink_backward", (number_by_number(0, 1),)),
)
for _names, _lies in _TABLE:
    # (2.9 has no `_fused_rms_norm_backward`.)
    _here = " ".join(name for name in _names.split() if hasattr(_aten, name.partition(".")[0]))
    LAYOUTS.update(dict.fromkeys(overloads(_here), _lies))
