"""What the host computes in place of operators that only CUDA has, or that hold something else there (``values=real``).

Each function takes an operator's arguments as host tensors and returns its results; what nobody reads (seeds of CUDA's random
numbers, reserves of cuDNN's) is left empty. Random numbers are drawn as the host's own operators would draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.host_calls import equivalent, of_sparse, refuse_to_compute, with_gradients

# ---- dropout


@equivalent(_aten.native_dropout.default)
def _dropout(input: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return input.clone(), torch.ones(input.shape, dtype=torch.bool)
    noise = torch.empty_like(input).bernoulli_(1 - p)
    mask = noise.bool()
    return input * (noise.div_(1 - p) if p < 1 else noise), mask


@equivalent(_aten.native_dropout_backward.default)
def _dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    noise = mask.to(gradient.dtype)
    return gradient * (noise.div_(1 / scale) if scale else 0)


@equivalent(_aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(gradient: Any, input: Any, buffer: Any) -> Any:
    """CUDA keeps no buffer for it."""
    return _aten.log_sigmoid_backward.default(gradient, input, _aten.log_sigmoid_forward.default(input)[1])


@of_sparse(_aten.add.Tensor)
def _sum_of_lists(left: Any, right: Any, *, alpha: Any = 1, into: torch.dtype | None = None) -> Any:
    """One behind the other, where the host merges them (`add_out_sparse_cuda`; when they are summed up says `sparse._summed`)."""
    common = torch.promote_types(left.dtype, right.dtype)
    if not right._nnz() or not left._nnz():
        return (left if left._nnz() else right * alpha).to(into or common)
    theirs = right._values().to(common)
    made = torch.sparse_coo_tensor(
        torch.cat([left._indices(), right._indices()], 1),
        torch.cat([left._values().to(common), theirs if alpha == 1 else theirs * alpha]),
        left.shape,
        check_invariants=False,
    )
    if into not in (None, common):
        return made.coalesce().to(into)
    return made.coalesce() if made._nnz() > left.numel() else made


@of_sparse(_aten.sub.Tensor)
def _difference_of_lists(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return _sum_of_lists(left, right, alpha=-alpha)


@of_sparse(_aten.add_.Tensor)
def _added_list(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return _sum_of_lists(left, right, alpha=alpha, into=left.dtype)


@of_sparse(_aten.sub_.Tensor)
def _subtracted_list(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return _added_list(left, right, alpha=-alpha)


@equivalent(_aten.nansum.default)
def _nansum(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """CUDA's takes complex numbers, too."""
    if not input.is_complex():
        return _aten.nansum.default(input, dim, keepdim, dtype=dtype)
    return input.masked_fill(input.isnan(), 0).sum(dim, keepdim, dtype=dtype)


@equivalent(_aten._linalg_svd.default)
def _singular_values(matrices: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> Any:
    """The host has one driver."""
    return _aten._linalg_svd.default(matrices, full_matrices, compute_uv)


# ---- cuDNN's, by their own names


@equivalent(_aten.cudnn_convolution.default)
def _convolution(
    input: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *settings: bool, **named: bool
) -> Any:
    return _aten.convolution.default(input, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


@equivalent(_aten.cudnn_convolution_transpose.default)
def _transposed_convolution(
    input: Any,
    weight: Any,
    padding: Any,
    more: Any,
    stride: Any,
    dilation: Any,
    groups: int,
    *settings: bool,
    **named: bool,
) -> Any:
    return _aten.convolution.default(input, weight, None, stride, padding, dilation, True, more, groups)


@equivalent(_aten.cudnn_grid_sampler.default)
def _grid_sampler(input: Any, grid: Any) -> Any:
    return _aten.grid_sampler_2d.default(input, grid, 0, 0, True)


@equivalent(_aten.cudnn_affine_grid_generator.default)
def _affine_grid(theta: Any, batch: int, channels: int, height: int, width: int) -> Any:
    return _aten.affine_grid_generator.default(theta, [batch, channels, height, width], True)


# ---- softmax, which CUDA gives as float32 for half precision (autocast asks for that)


def _softmax_of(func: Any) -> Any:
    return lambda input, dim, to_float: func(input.float() if to_float else input, dim, False)


def _softmax_gradient_of(func: Any) -> Any:
    return lambda gradient, output, dim, dtype: func(gradient, output, dim, gradient.dtype).to(dtype)


for _forward, _backward in (
    (_aten._softmax.default, _aten._softmax_backward_data.default),
    (_aten._log_softmax.default, _aten._log_softmax_backward_data.default),
):
    equivalent(_forward)(_softmax_of(_forward))
    equivalent(_backward)(_softmax_gradient_of(_backward))

# ---- attention: the kernels of CUDA's, by the host's own kernel or by the matrices one after the other


class _AttentionCall:
    """One call of a kernel. Shapes are [batch, heads, tokens, size]; noise is what dropout multiplies the weights with."""

    def __init__(
        self, query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None, noise: Any
    ) -> None:
        self.query, self.key, self.value, self.bias = query, key, value, bias
        self.is_causal, self.scale, self.noise = is_causal, scale, noise
        self.groups = query.shape[1] // key.shape[1]
        if self.groups > 1:
            self.key, self.value = (tensor.repeat_interleave(self.groups, 1) for tensor in (key, value))
        self.by_kernel = noise is None and query.shape[-1] == key.shape[-1] == value.shape[-1] and query.numel() > 0
        self.dtype = query.dtype
        if not self.by_kernel and query.dtype in HALF:
            # The host's matrices are multiplied in float32 for half precision.
            self.query, self.key, self.value = self.query.float(), self.key.float(), self.value.float()

    def forward(self) -> tuple[Any, Any]:
        """The result, and the logarithm of each row's sum."""
        if self.by_kernel:
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
            return kernel(  # type: ignore[no-any-return]
                self.query, self.key, self.value, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale
            )
        scores = self._scores()
        weights = torch.softmax(scores, -1)
        return (self._dropped(weights) @ self.value).to(self.dtype), torch.logsumexp(scores.float(), -1)

    def backward(self, gradient: Any, out: Any, sums: Any, of_bias: bool) -> list[Any]:
        """Gradients of query, key, value and bias."""
        if self.by_kernel and not of_bias:
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            given = (gradient, self.query, self.key, self.value, out, sums[..., : self.query.shape[-2]].contiguous())
            found = [*kernel(*given, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale), None]
        else:
            weights = torch.softmax(self._scores(), -1)
            gradient = gradient.to(weights.dtype)
            of_weights = self._dropped(gradient @ self.value.mT)
            of_scores = _aten._softmax_backward_data.default(of_weights, weights, -1, weights.dtype)
            scale = self._scale()
            found = [
                of_scores @ self.key * scale,
                of_scores.mT @ self.query * scale,
                self._dropped(weights).mT @ gradient,
                of_scores if of_bias else None,
            ]
        if self.groups > 1:
            found[1:3] = [tensor.unflatten(1, (-1, self.groups)).sum(2) for tensor in found[1:3]]
        return [None if tensor is None else tensor.to(self.dtype) for tensor in found]

    def _scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def _scores(self) -> Any:
        root = self._scale() ** 0.5
        scores = (self.query * root) @ (self.key * root).mT
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(seen.logical_not(), float("-inf"))
        return scores if self.bias is None else scores + self.bias

    def _dropped(self, weights: Any) -> Any:
        return weights if self.noise is None else weights * self.noise


def _noise(query: Any, key: Any, p: float) -> Any:
    """As the host's dropout of the attention weights draws it."""
    if not p:
        return None
    noise = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=query.dtype).bernoulli_(1 - p)
    return noise.div_(1 - p) if p < 1 else noise


@equivalent(_aten._scaled_dot_product_flash_attention.default, gives=6)
def _flash(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> Any:  # fmt: skip
    noise = _noise(query, key, dropout_p)
    out, sums = _AttentionCall(query, key, value, None, is_causal, scale, noise).forward()
    return (out, sums, *[None] * 7), noise


@equivalent(_aten._scaled_dot_product_flash_attention_backward.default, takes=12)
def _flash_backward(
    noise: Any, gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, seq_q: Any, seq_k: Any, max_q: Any,
    max_k: Any, dropout_p: float, is_causal: bool, *seeds: Any, scale: float | None = None,
) -> Any:  # fmt: skip
    return _AttentionCall(query, key, value, None, is_causal, scale, noise).backward(gradient, out, sums, False)[:3]


@equivalent(_aten._scaled_dot_product_efficient_attention.default, gives=1)
def _efficient(
    query: Any, key: Any, value: Any, bias: Any, wanted: bool, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None,
) -> Any:  # fmt: skip
    noise = _noise(query, key, dropout_p)
    out, sums = _AttentionCall(query, key, value, bias, is_causal, scale, noise).forward()
    return (out, F.pad(sums, (0, -sums.shape[-1] % 32)) if wanted else None, None, None), noise


@equivalent(_aten._scaled_dot_product_efficient_attention_backward.default, takes=6)
def _efficient_backward(
    noise: Any, gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
    dropout_p: float, wanted: Any, is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _AttentionCall(query, key, value, bias, is_causal, scale, noise).backward(gradient, out, sums, wanted[3])


# ---- the same for sequences one after the other, as nested tensors have them: [tokens, heads, size], with where each ends


def _apart(tensor: Any, ends: Any) -> list[Any]:
    places = ends.tolist()
    return [tensor[first:last].transpose(0, 1).unsqueeze(0) for first, last in pairwise(places)]


def _together(parts: Sequence[Any]) -> Any:
    return torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])


def _each(
    query: Any, key: Any, value: Any, ends: tuple[Any, Any], noises: Sequence[Any], is_causal: bool, scale: float | None,
    window: tuple[int, int] = (-1, -1),
) -> list[_AttentionCall]:  # fmt: skip
    """A call for each sequence. ends: of queries, and of keys. window: how many keys before and after its own place a query
    sees (-1: all), where the last query stands at the last key."""
    parts = zip(_apart(query, ends[0]), _apart(key, ends[1]), _apart(value, ends[1]), noises, strict=True)
    return [_AttentionCall(q, k, v, _outside(q, k, *window), is_causal, scale, noise) for q, k, v, noise in parts]


def _outside(query: Any, key: Any, before: int, after: int) -> Any:
    """What is added to the scores so that a query sees its window alone (`mask.h` of FlashAttention); None where it sees all."""
    if before < 0 and after < 0:
        return None
    rows, columns = query.shape[-2], key.shape[-2]
    place = torch.arange(columns)[None] - torch.arange(columns - rows, columns)[:, None]
    unseen = (place < -before) if before >= 0 else torch.zeros_like(place, dtype=torch.bool)
    if after >= 0:
        unseen |= place > after
    return torch.zeros(rows, columns, dtype=query.dtype).masked_fill_(unseen, float("-inf"))


def _noises(query: Any, key: Any, ends: tuple[Any, Any], p: float) -> list[Any]:
    return [_noise(q, k, p) for q, k in zip(_apart(query, ends[0]), _apart(key, ends[1]), strict=True)]


@equivalent(_aten._flash_attention_forward.default, gives=2)
def _flash_of_sequences(
    query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
    *_: Any, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None, **__: Any,
) -> Any:  # fmt: skip
    if ends_q is None or any(one is not None for one in (seqused_k, alibi_slopes, block_table)):
        refuse_to_compute(_aten._flash_attention_forward.default, "the host has no kernel for it")
    ends = ends_q, ends_k
    noises = _noises(query, key, ends, dropout_p)
    is_causal, window = _window(is_causal, window_size_left, window_size_right, ends)
    found = [one.forward() for one in _each(query, key, value, ends, noises, is_causal, scale, window)]
    sums = torch.cat([sums[0, :, : out.shape[2]] for out, sums in found], -1)
    return (_together([out for out, _ in found]), sums, *[None] * 3), noises


@equivalent(_aten._flash_attention_backward.default, takes=12)
def _flash_of_sequences_backward(
    noises: Any, gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, ends_q: Any, ends_k: Any, max_q: Any,
    max_k: Any, dropout_p: float, is_causal: bool, *seeds: Any, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    ends = ends_q, ends_k
    if noises is None and not dropout_p:
        # Who drops nothing hands on numbers of its own in place of the forward's seed (`torch.nn.attention.varlen`).
        noises = _noises(query, key, ends, 0.0)
    rows = [sums[None, :, first:last] for first, last in pairwise(ends_q.tolist())]
    is_causal, window = _window(is_causal, window_size_left, window_size_right, ends)
    return _backward_of_sequences(noises, gradient, query, key, value, out, rows, ends, is_causal, scale, window)


def _window(
    is_causal: bool, left: int | None, right: int | None, ends: tuple[Any, Any]
) -> tuple[bool, tuple[int, int]]:
    """Whether a kernel may go by the simple causal mask, which begins at the first key, and else the window that it means."""
    before, after = -1 if left is None else left, 0 if is_causal else -1 if right is None else right
    if is_causal and before < 0 and torch.equal(*ends):
        return True, (-1, -1)
    return False, (before, after)


def _backward_of_sequences(
    noises: Any, gradient: Any, query: Any, key: Any, value: Any, out: Any, rows: Sequence[Any], ends: tuple[Any, Any],
    is_causal: bool, scale: float | None, window: tuple[int, int] = (-1, -1),
) -> list[Any]:  # fmt: skip
    calls = _each(query, key, value, ends, noises, is_causal, scale, window)
    parts = zip(calls, _apart(gradient, ends[0]), _apart(out, ends[0]), rows, strict=True)
    found = [call.backward(of_out, its, sums, False)[:3] for call, of_out, its, sums in parts]
    return [_together(several) for several in zip(*found, strict=True)]


@equivalent(_aten._efficient_attention_forward.default, gives=1)
def _efficient_of_sequences(
    query: Any, key: Any, value: Any, bias: Any, ends_q: Any, ends_k: Any, max_q: Any, max_k: Any, dropout_p: float,
    mask_kind: int, wanted: bool = False, *, scale: float | None = None, seqlen_k: Any = None, window_size: int | None = None,
) -> Any:  # fmt: skip
    if ends_q is None or mask_kind > 1 or any(one is not None for one in (bias, seqlen_k, window_size)):
        refuse_to_compute(_aten._efficient_attention_forward.default, "the host has no kernel for it")
    ends = ends_q, ends_k
    query, key, value = query[0], key[0], value[0]
    noises = _noises(query, key, ends, dropout_p)
    found = [one.forward() for one in _each(query, key, value, ends, noises, mask_kind == 1, scale)]
    width = -(-max_q // 32) * 32
    sums = torch.cat([F.pad(sums[..., : out.shape[2]], (0, width - out.shape[2])) for out, sums in found])
    return (_together([out for out, _ in found])[None], sums if wanted else None, *[None] * 4), noises


@equivalent(_aten._efficient_attention_backward.default, takes=10)
def _efficient_of_sequences_backward(
    noises: Any, gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, ends_q: Any, ends_k: Any, max_q: Any,
    max_k: Any, sums: Any, dropout_p: float, seed: Any, offset: Any, mask_kind: int, *rest: Any,
    scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    places = ends_q.tolist()
    rows = [sums[number : number + 1, :, : last - first] for number, (first, last) in enumerate(pairwise(places))]
    gradient, query, key, value, out = (one[0] for one in (gradient, query, key, value, out))
    ends = ends_q, ends_k
    found = _backward_of_sequences(noises, gradient, query, key, value, out, rows, ends, mask_kind == 1, scale)
    return [*(one[None] for one in found), None]


@equivalent(_aten._scaled_dot_product_cudnn_attention.default, gives=6)
def _cudnn(
    query: Any, key: Any, value: Any, bias: Any, wanted: bool, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    noise = _noise(query, key, dropout_p)
    out, sums = _AttentionCall(query, key, value, bias, is_causal, scale, noise).forward()
    return (out, *[None] * 8), (noise, sums)


@equivalent(_aten._scaled_dot_product_cudnn_attention_backward.default, takes=6)
def _cudnn_backward(
    kept: Any, gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, seed: Any, offset: Any, bias: Any,
    seq_q: Any, seq_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _AttentionCall(query, key, value, bias, is_causal, scale, kept[0]).backward(gradient, out, kept[1], False)[
        :3
    ]


# ---- layers


@equivalent(_aten._fused_rms_norm.default)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    wide = input.float() if input.dtype in HALF else input
    dims = list(range(-len(normalized_shape), 0))
    rows = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True).add_(torch.finfo(wide.dtype).eps if eps is None else eps))
    out = wide * rows
    return (out if weight is None else out * weight).to(input.dtype), rows


@equivalent(_aten._fused_rms_norm_backward.default)
def _rms_norm_backward(gradient: Any, input: Any, normalized_shape: Any, rows: Any, weight: Any, wanted: Any) -> Any:
    dims = list(range(-len(normalized_shape), 0))
    wide = gradient.to(rows.dtype)
    normal = input.to(rows.dtype) * rows
    inner = wide if weight is None else wide * weight
    of_input = (inner - normal * (inner * normal).mean(dims, keepdim=True)) * rows
    of_weight = (wide * normal).sum_to_size(weight.shape).to(weight.dtype) if wanted[1] and weight is not None else None
    return of_input.to(input.dtype) if wanted[0] else None, of_weight


# Cells, in the order in which the host rounds: it has no fused ones (`LSTMCell` and `GRUCell` in ``RNN.cpp``, and what autograd
# makes of them).


def _biased(of_input: Any, of_hidden: Any, input_bias: Any, hidden_bias: Any) -> tuple[Any, Any]:
    return (
        of_input if input_bias is None else of_input + input_bias,
        of_hidden if hidden_bias is None else of_hidden + hidden_bias,
    )


@equivalent(_aten._thnn_fused_lstm_cell.default)
def _lstm_cell(of_input: Any, of_hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    of_input, of_hidden = _biased(of_input, of_hidden, input_bias, hidden_bias)
    i, f, g, o = (of_hidden + of_input).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


@equivalent(_aten._thnn_fused_lstm_cell_backward_impl.default)
def _lstm_cell_backward(of_hidden: Any, of_cell: Any, before: Any, after: Any, workspace: Any, has_bias: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    bent = after.tanh()
    of_hidden = torch.zeros_like(after) if of_hidden is None else of_hidden
    inner = _aten.tanh_backward(of_hidden * o, bent)
    inner = inner if of_cell is None else inner + of_cell
    gates = torch.cat(
        (
            _aten.sigmoid_backward(inner * g, i),
            _aten.sigmoid_backward(inner * before, f),
            _aten.tanh_backward(inner * i, g),
            _aten.sigmoid_backward(of_hidden * bent, o),
        ),
        1,
    )
    return gates, inner * f, gates.sum(0) if has_bias else None


@equivalent(_aten._thnn_fused_gru_cell.default)
def _gru_cell(of_input: Any, of_hidden: Any, hidden: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    of_input, of_hidden = _biased(of_input, of_hidden, input_bias, hidden_bias)
    inew, hnew = (one.chunk(3, 1)[2] for one in (of_input, of_hidden))
    # (Of parts of rows, as there: what is left over behind the vectors of a row is rounded otherwise.)
    r, z, _ = (one.sigmoid() for one in (of_hidden + of_input).chunk(3, 1))
    new = (inew + r * hnew).tanh()
    return (hidden - new) * z + new, torch.cat((r, z, new, hidden, hnew), 1)


@equivalent(_aten._thnn_fused_gru_cell_backward.default)
def _gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
    r, z, new, hidden, hnew = workspace.chunk(5, 1)
    of_hidden = gradient * z
    of_new = _aten.tanh_backward(gradient - of_hidden, new)
    of_r = _aten.sigmoid_backward(of_new * hnew, r)
    of_z = _aten.sigmoid_backward(gradient * (hidden - new), z)
    of_input, of_gates = torch.cat((of_r, of_z, of_new), 1), torch.cat((of_r, of_z, of_new * r), 1)
    biases = (of_input.sum(0), of_gates.sum(0)) if has_bias else (None, None)
    return of_input, of_gates, of_hidden, *biases


# ---- recurrent layers: the host's own, with the graph of their gradients kept


@equivalent(_aten._cudnn_rnn.default, gives=3)
def _recurrent(
    input: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projected: int, layers: int,
    batch_first: bool, dropout: float, train: bool, two: bool, batches: Any, dropout_state: Any,
) -> Any:  # fmt: skip
    run = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)[mode]
    given = [input, hx, cx, *weights]
    has_biases = stride >= 4

    def compute(input: Any, hx: Any, cx: Any, *weights: Any) -> Any:
        states: Any = hx if cx is None else (hx, cx)
        rest = (has_biases, layers, dropout, train, two)
        if batches:
            return run(input, torch.tensor(batches), states, weights, *rest)
        return run(input, states, weights, *rest, batch_first)

    if not train:
        out, *last = compute(*given)
        return (out, *last, *[None] * (4 - len(last))), None
    with with_gradients():
        leaves = [None if one is None else one.detach().requires_grad_() for one in given]
        out, *last = results = compute(*leaves)
    return (out.detach(), *(one.detach() for one in last), *[None] * (4 - len(last))), (leaves, results)


@equivalent(_aten._cudnn_rnn_backward.default, takes=20)
def _recurrent_backward(kept: Any, input: Any, weights: Any, *args: Any) -> Any:
    of_results, wanted = args[5:8], args[-1]
    if kept is None:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    leaves, results = kept
    asked = [(one, of) for one, of in zip(results, of_results, strict=False) if of is not None]
    inputs = [one for one in leaves if one is not None]
    with with_gradients():
        found = iter(
            torch.autograd.grad(
                [one for one, _ in asked], inputs, [of for _, of in asked], retain_graph=True, allow_unused=True
            )
        )
    input_, hx, cx, *of_weights = (None if one is None else next(found) for one in leaves)
    return input_, hx, cx, of_weights if wanted[3] else [None] * len(weights)


@equivalent(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: Any, indices: Any, offsets: Any, by_frequency: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, include_last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """With the lists that CUDA's kernel always makes, and the host's only where its own gradient needs them."""
    taken, by = indices, weights
    if not offsets.numel() - include_last:
        # Where there is no bag, the host's kernels end the process over what would be in it: of the largest, in float64, and with
        # a padding index (seen with 2.13).
        taken, by = indices[:0], None if weights is None else weights[:0]
    out, bags, sizes, highest = _aten._embedding_bag.default(
        weight, taken, offsets, by_frequency, mode, sparse, by, include_last, padding
    )
    if not bags.numel() and indices.numel():
        starts = offsets[:-1] if include_last else offsets
        bags = torch.searchsorted(starts, torch.arange(indices.numel(), dtype=starts.dtype), right=True) - 1
    # (On a device the last offset, which begins no bag, has a size, too, which nobody reads.)
    sizes = F.pad(sizes, (0, offsets.numel() - sizes.numel()))
    return out, bags.to(torch.promote_types(indices.dtype, offsets.dtype)), sizes, highest


# ---- SyncBatchNorm: statistics of each channel


def _by_channel(tensor: Any, like: Any) -> Any:
    return None if tensor is None else tensor.view(1, -1, *[1] * (like.dim() - 2))


def _others(input: Any) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


@equivalent(_aten.batch_norm_stats.default)
def _stats(input: Any, eps: float) -> Any:
    wide = input.float() if input.dtype in HALF else input
    variance, mean = torch.var_mean(wide, _others(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


@equivalent(_aten.batch_norm_elemt.default)
def _normalised(input: Any, weight: Any, bias: Any, mean: Any, inverse: Any, eps: float) -> Any:
    out = (input - _by_channel(mean, input)) * _by_channel(inverse, input)
    out = out if weight is None else out * _by_channel(weight, input)
    return (out if bias is None else out + _by_channel(bias, input)).to(input.dtype)


@equivalent(_aten.batch_norm_gather_stats_with_counts.default)
def _gathered(
    input: Any, means: Any, inverses: Any, running_mean: Any, running_variance: Any, momentum: float, eps: float, counts: Any
) -> Any:  # fmt: skip
    counts = counts.to(means.dtype).view(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variances = inverses.pow(-2) - eps
    variance = ((variances + (means - mean).pow(2)) * counts).sum(0) / total
    for running, now in ((running_mean, mean), (running_variance, variance * total / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(now * momentum)
    return mean, torch.rsqrt(variance + eps)


@equivalent(_aten.batch_norm_gather_stats.default)
def _gathered_equally(
    input: Any, means: Any, inverses: Any, running_mean: Any, running_variance: Any, momentum: float, eps: float, count: int
) -> Any:  # fmt: skip
    counts = torch.full((means.shape[0],), count, dtype=means.dtype)
    return _gathered(input, means, inverses, running_mean, running_variance, momentum, eps, counts)


@equivalent(_aten.batch_norm_backward_reduce.default)
def _reduced(
    gradient: Any, input: Any, mean: Any, inverse: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    dims = _others(input)
    sums = gradient.to(mean.dtype).sum(dims)
    products = (gradient * (input - _by_channel(mean, input))).to(mean.dtype).sum(dims)
    return (
        sums if input_g else None,
        products if input_g else None,
        products * inverse if weight_g else None,
        sums if bias_g else None,
    )


@equivalent(_aten.batch_norm_backward_elemt.default)
def _of_input(
    gradient: Any, input: Any, mean: Any, inverse: Any, weight: Any, sums: Any, products: Any, count: Any
) -> Any:
    total = count.sum()
    inner = gradient - _by_channel(sums / total, input)
    inner = inner - (input - _by_channel(mean, input)) * _by_channel(inverse.pow(2) * products / total, input)
    scale = inverse if weight is None else inverse * weight
    return (inner * _by_channel(scale, input)).to(input.dtype)


# ---- older ways of dropout


@equivalent(_aten._fused_dropout.default)
def _fused_dropout(input: Any, p: float, generator: Any = None) -> Any:
    """p: how much is kept."""
    mask = torch.empty_like(input).bernoulli_(p, generator=generator)
    return input * mask / p, mask


@equivalent(_aten._masked_scale.default)
def _masked_scale(input: Any, mask: Any, scale: float) -> Any:
    return input * mask * scale
