"""What a card refuses is refused on a virtual one: users' mistakes, in the words of an H100 (PyTorch 2.11, 27 November 2026)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumem_magic.virtual import gpu

# What is run, and what a card raised: the class, and how its message begins.
REFUSED = [
    (
        "torch.addcdiv(x, torch.tensor(1.0), x)",
        RuntimeError,
        "Expected all tensors to be on the same device, but found at",
    ),
    ("x.clamp(min=torch.tensor(0.0))", RuntimeError, "Expected all tensors to be on the same device, but got min i"),
    (
        "x.index_put_((i,), torch.ones(3, 4, device=d, dtype=torch.float64))",
        RuntimeError,
        "Index put requires the source and destination dtypes match,",
    ),
    ("x.index_add(0, i, x[:3].half())", RuntimeError, "index_add_(): self (Float) and source (Half) must have the s"),
    (
        "F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=torch.ones(4, 4, dtype=torch.half, device=d))",
        RuntimeError,
        "Expected attn_mask dtype to be bool or float or to match que",
    ),
    (
        "F.scaled_dot_product_attention(x[None, None], x[None, None].half(), x[None, None])",
        RuntimeError,
        "Expected query, key, and value to have the same dtype, but g",
    ),
    (
        "F.cross_entropy(x, torch.tensor([0, 1, 2, 3], device=d, dtype=torch.int32))",
        NotImplementedError,
        '"nll_loss_forward_reduce_cuda_kernel_2d_index" not implement',
    ),
    ("y = F.mse_loss(w, x.double())\ny.backward()", RuntimeError, "Found dtype Double but expected Float"),
    (
        "F.binary_cross_entropy(x.sigmoid(), torch.ones(4, 4, device=d, dtype=torch.long))",
        RuntimeError,
        "Found dtype Long but expected Float",
    ),
    (
        "F.grid_sample(img, torch.zeros(2, 4, 4, 2, device=d, dtype=torch.half))",
        RuntimeError,
        "expected scalar type Float but found Half",
    ),
    (
        "torch.add(x, x, out=torch.zeros(4, 1, device=d).expand(4, 4))",
        RuntimeError,
        "unsupported operation: more than one element of the written-",
    ),
    (
        "torch.zeros(4, 1, device=d).expand(4, 4).add_(1)",
        RuntimeError,
        "unsupported operation: more than one element of the written-",
    ),
    (
        "y = torch.zeros(5, device=d)\ny[1:].add_(y[:4])",
        RuntimeError,
        "unsupported operation: some elements of the input tensor and",
    ),
    (
        "y = torch.arange(5.0, device=d)\ny[1:] = y[:4]",
        RuntimeError,
        "unsupported operation: some elements of the input tensor and",
    ),
    (
        "F.conv2d(img.long(), torch.ones(4, 3, 3, 3, device=d, dtype=torch.long))",
        RuntimeError,
        "getCudnnDataTypeFromScalarType() not supported for Long",
    ),
    (
        "nn.ConvTranspose2d(3, 4, 3, output_padding=2).to(d)(img)",
        RuntimeError,
        "output padding must be smaller than either stride or dilatio",
    ),
    (
        "nn.BatchNorm2d(3).to(d).half()(img)",
        RuntimeError,
        "Expected tensor for argument #1 'input' to have the same typ",
    ),
    ("nn.LayerNorm(4).to(d)(x.half())", RuntimeError, "expected scalar type Half but found Float"),
    ("x.softmax(2)", IndexError, "Dimension out of range (expected to be in range of [-2, 1],"),
    ("n.std()", RuntimeError, "std and var only support floating point and complex dtypes"),
    ("torch.zeros(0, device=d).max()", RuntimeError, "max(): Expected reduction dim to be specified for input.nume"),
    ("(x > 0).argmax()", RuntimeError, "argmax(): does not support bool input"),
    ("F.one_hot(n.int(), 10)", RuntimeError, "one_hot is only applicable to index tensor of type LongTenso"),
    (
        "x[i] = torch.zeros(2, 4, device=d)",
        RuntimeError,
        "shape mismatch: value tensor of shape [2, 4] cannot be broad",
    ),
    ("x & x", NotImplementedError, "\"bitwise_and_cuda\" not implemented for 'Float'"),
    ("1 - (x > 0)", RuntimeError, "Subtraction, the `-` operator, with a bool tensor is not sup"),
    ("y = x > 0\ny *= 2", RuntimeError, "result type Long can't be cast to the desired output type Bo"),
    ("n ** -1", RuntimeError, "Integers to negative integer powers are not allowed."),
    ("n.pow_(-1)", RuntimeError, "Integers to negative integer powers are not allowed."),
    ("torch.complex(x, x) % 2", NotImplementedError, "\"remainder_cuda\" not implemented for 'ComplexFloat'"),
    (
        "torch.linalg.lstsq(x, x, driver='gelsd')",
        RuntimeError,
        "torch.linalg.lstsq: `driver` other than `gels` is not suppor",
    ),
    ("torch.linalg.lstsq(x[0], x)", RuntimeError, "torch.linalg.lstsq: input must have at least 2 dimensions."),
    ("torch.linalg.lstsq(x, x[:3])", RuntimeError, "torch.linalg.lstsq: input.size(-2) should match other.size(-"),
    (
        "m = nn.LSTM(4, 4).to(d).eval()\nm(w[None])[0].sum().backward()",
        RuntimeError,
        "cudnn RNN backward can only be called in training mode",
    ),
    (
        "nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([1, 3, 2, 4]))",
        RuntimeError,
        "`lengths` array must be sorted in decreasing order when `enf",
    ),
    (
        "nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([4, 3, 2, 0]))",
        RuntimeError,
        "Length of all samples has to be greater than 0, but found an",
    ),
    (
        "nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([4, 3, 2]))",
        RuntimeError,
        "Expected `len(lengths)` to be equal to batch_size, but got 3",
    ),
    (
        "x.index_select(0, torch.zeros(2, 2, dtype=torch.long, device=d))",
        RuntimeError,
        "Index is supposed to be an empty tensor or a vector",
    ),
    ("x.index_select(0, x[0])", NotImplementedError, "\"index_select_out_cuda_impl\" not implemented for 'Float'"),
    ("x.put_(i, i)", RuntimeError, "put_(): self and source expected to have the same dtype, but"),
    (
        "nn.LSTMCell(4, 3).to(d)(x, (x[:3, :3], x[:3, :3]))",
        RuntimeError,
        "Input batch size 4 doesn't match hidden0 batch size 3",
    ),
    ("nn.GRUCell(4, 3).to(d)(x, x)", RuntimeError, "hidden0 has inconsistent hidden_size: got 4, expected 3"),
    ("nn.GRUCell(5, 3).to(d)(x)", RuntimeError, "input has inconsistent input_size: got 4 expected 5"),
    ("big = torch.zeros(1 << 20, device=d) > 0\nbig *= 2", RuntimeError, "result type Long can't be cast"),
    ("torch.zeros(1 << 20, device=d) & 1", NotImplementedError, "\"bitwise_and_cuda\" not implemented for 'Float'"),
    ("nn.GroupNorm(3, 3).to(d)(img.half())", RuntimeError, "expected scalar type Half but found Float"),
    ("F.conv2d(img.byte(), torch.ones(4, 3, 3, 3, device=d).byte())", RuntimeError, "GET was unable to find an engine"),
    ("F.nll_loss(img, torch.zeros(2, 8, 8, device=d))", RuntimeError, "expected scalar type Long but found Float"),
    ("x[i] = x[1:]", RuntimeError, "unsupported operation: some elements of the input tensor and"),
    ("x.copy_(x.t())", RuntimeError, "unsupported operation: some elements of the input tensor and"),
    ("(x > 0) << (x > 0)", NotImplementedError, "\"lshift_cuda\" not implemented for 'Bool'"),
    ("x >> 1", NotImplementedError, "\"rshift_cuda\" not implemented for 'Float'"),
    ("b = x > 0\nb <<= 1", RuntimeError, "result type Long can't be cast to the desired output type Bool"),
    (
        "F.nll_loss(img, torch.zeros(2, 8, 8, device=d).byte())",
        RuntimeError,
        "expected scalar type Long but found Byte",
    ),
    (
        "F.interpolate(img.long(), scale_factor=2)",
        NotImplementedError,
        '"upsample_nearest2d_out_frame" not implemented',
    ),
    ("F.interpolate(img.byte(), size=4, mode='bilinear')", NotImplementedError, '"upsample_bilinear2d_out_frame" not'),
    ("F.interpolate(img[0].int(), size=4)", NotImplementedError, '"upsample_nearest1d_out_frame" not implemented'),
    ("F.adaptive_avg_pool2d(img.long(), 2)", NotImplementedError, '"adaptive_avg_pool2d_cuda" not implemented'),
    ("F.adaptive_max_pool2d(img.int(), 2)", NotImplementedError, '"adaptive_max_pool2d_cuda" not implemented'),
    ("F.adaptive_avg_pool3d(img[None].long(), 2)", NotImplementedError, '"adaptive_avg_pool3d_cuda" not implemented'),
    ("F.max_pool3d(img[None].long(), 2)", NotImplementedError, '"max_pool3d_with_indices_out_frame" not implemented'),
    ("F.avg_pool3d(img[None].long(), 2)", NotImplementedError, '"avg_pool3d_out_cuda" not implemented'),
    ("torch.complex(x, x).floor()", NotImplementedError, "floor is not supported for complex inputs"),
    ("torch.complex(x, x).max()", NotImplementedError, "\"max_all\" not implemented for 'ComplexFloat'"),
    ("torch.complex(x, x).amin(1)", NotImplementedError, "\"min_values_cuda\" not implemented for 'ComplexFloat'"),
    ("torch.complex(x, x).aminmax()", NotImplementedError, "\"aminmax_all_cuda\" not implemented for 'ComplexFloat'"),
    ("torch.complex(x, x).aminmax(dim=0)", NotImplementedError, "\"aminmax_cuda\" not implemented for 'ComplexFloat'"),
    ("torch.maximum(torch.complex(x, x), x)", RuntimeError, "maximum not implemented for complex tensors."),
    ("torch.complex(x, x).argsort()", RuntimeError, "Sort currently does not support complex dtypes on CUDA."),
    ("torch.complex(x, x).topk(1)", NotImplementedError, "\"topk_out_cuda\" not implemented for 'ComplexFloat'"),
    ("(x > 0).topk(1)", NotImplementedError, "\"topk_out_cuda\" not implemented for 'Bool'"),
    ("torch.bincount(x[0].abs())", NotImplementedError, "\"bincount_cuda\" not implemented for 'Float'"),
    ("torch.bincount(n.view(2, 2))", RuntimeError, "bincount only supports 1-d non-negative integral inputs."),
    ("torch.histc(x.bfloat16())", NotImplementedError, "\"histc\" not implemented for 'BFloat16'"),
    ("torch.histc(x.half())", RuntimeError, "HalfTensor is not supported"),
    ("torch.linalg.lstsq(x.half(), x.half())", RuntimeError, "This function doesn't handle types other than float and"),
    ("torch.linalg.svd(x, driver='gesdd')", RuntimeError, "torch.linalg.svd: unknown svd driver gesdd in svd_cusolver"),
    ("x.to_sparse() + x", RuntimeError, "add(sparse, dense) is not supported. Use add(dense, sparse) instead."),
    ("F.glu(n)", NotImplementedError, "\"glu_cuda\" not implemented for 'Long'"),
    ("F.unfold(img.byte(), 2)", NotImplementedError, "\"im2col_out_cuda\" not implemented for 'Byte'"),
    *(
        (
            f"torch.zeros(4, 1, device=d).expand(4, 4).{call}",
            RuntimeError,
            "unsupported operation: more than one element",
        )
        for call in ("normal_()", "uniform_()", "bernoulli_()", "copy_(x)", "addmm_(x, x)", "scatter_(0, i[None], x)")
    ),
    (
        "y = img[0, :2, :2, :2]\ntorch.zeros(2, 1, 2, device=d).expand(2, 2, 2).baddbmm_(y, y)",
        RuntimeError,
        "unsupported operation: more than one element of the written-to",
    ),
    *(
        (
            f"y = img[0, :2, :2, :2]\n{call})",
            RuntimeError,
            "unsupported operation: more than one element of the written-to",
        )
        for call in (
            "torch.mm(x, x, out=x[:1].expand(4, 4)",
            "torch.addmm(x, x, x, out=x[:1].clone().expand(4, 4)",
            "torch.bmm(y, y, out=torch.zeros(2, 1, 2, device=d).expand(2, 2, 2)",
            "torch.cat([x, x], out=torch.zeros(1, 4, device=d).expand(8, 4)",
            "torch.index_select(x, 0, n % 4, out=torch.zeros(1, 4, device=d).expand(len(n), 4)",
        )
    ),
    *(
        (f"y = torch.zeros(8, device=d)\n{call}, out=y[2:6])", RuntimeError, "unsupported operation: some elements of")
        for call in (
            "torch.add(y[:4], y[4:]",
            "torch.exp(y[:4]",
            "torch.cat([y[:2], y[2:4]]",
            "torch.index_select(y[:4], 0, n % 4",
        )
    ),
    (
        "x.as_strided((5, 4), (4, 1))",
        RuntimeError,
        "setStorage: sizes [5, 4], strides [4, 1], storage offset 0, and item",
    ),
    (
        "x[1:].as_strided((4, 4), (4, 1))",
        RuntimeError,
        "setStorage: sizes [4, 4], strides [4, 1], storage offset 4, and",
    ),
    (
        "F.scaled_dot_product_attention(*[x[None, None]] * 2, x[None, None, :3])",
        RuntimeError,
        "Expected key.size(1) == value.size(1) to be true",
    ),
    (
        "F.scaled_dot_product_attention(x[None, None], x[None, None, :, :2], x[None, None])",
        RuntimeError,
        "Expected size for first two dimensions of batch2 tensor to be: [1, 4] but got: [1, 2].",
    ),
]
# What a card allows, although it looks like the above.
ALLOWED = [
    "F.smooth_l1_loss(w, x.double()).backward()",
    "(x > 0).abs()",
    "x[0], x[1] = x[1], x[0]",
    "x.view(4, 4).copy_(x)",
    "x.mul_(x)",
    "x.view(-1).add_(x.view(-1))",
    "x[:2] = x[2:]",
    "x[:, 0].add_(x[:, 1])",
    "torch.zeros(4, 1, device=d).expand(4, 4).fill_(1)",
    "torch.lerp(x, x, torch.tensor(0.5))",
    "torch.where(x > 0, x, torch.tensor(0.0))",
    "torch.histc(n)",
    "nn.BatchNorm2d(3).to(d)(img.half())",
    "F.softmax(torch.zeros(0, 4, device=d), 1)",
    "nn.LSTM(4, 4).to(d)(w[None])[0].sum().backward()",
    "F.interpolate(img.byte(), scale_factor=2)",
    "F.interpolate(img.bfloat16(), scale_factor=2, mode='bilinear')",
    "F.max_pool2d(img.half(), 2)",
    "F.adaptive_avg_pool2d(torch.zeros(0, 3, 8, 8, device=d, dtype=torch.long), 2)",
    "(x > 0).sort(), (x > 0).amax(), (x > 0).max(), n.amin(), n.byte().topk(1), n.bool().cummax(0), n.kthvalue(1)",
    "torch.histc(n.byte()), torch.bincount(n, x[0]), n.median(), torch.searchsorted(n, n)",
    "torch.complex(x, x).sum(), torch.complex(x, x).mean(), torch.complex(x, x).abs().max(), torch.complex(x, x).sgn()",
    "s = x.to_sparse()\ns + s, s - s, torch.eye(9, device=d).to_sparse() * 2 + torch.eye(9, device=d).to_sparse()",
    "torch.linalg.svd(x, driver='gesvd'), torch.linalg.svdvals(x)",
    "x + x.to_sparse(), x.to_sparse() * x",
    "torch.add(x, x, out=x), torch.exp(x[:2], out=x[2:]), torch.mul(x, x.clone().t(), out=x)",
    "torch.add(x, 1, out=x.view(4, 4))",
    "x.expand(1, 4, 4).normal_(), x[:, :1].expand(4, 1).uniform_(), x[:0].expand(0, 4).copy_(x[:0])",
    "x[1:].as_strided((3, 4), (4, 1)), x.as_strided((0, 9), (9, 9)), x.as_strided((2,), (1,), 14)",
    "x[0].expand(3, 4).as_strided((3, 4), (0, 1))",
    "y = img[0, :2, :2, :2]\ntorch.zeros(1, 2, 2, device=d).expand(2, 2, 2).baddbmm_(y, y)",
    "y = img[0, :2, :2, :2]\ntorch.bmm(y, y, out=torch.zeros(1, 2, 2, device=d).expand(2, 2, 2)), torch.mm(x, x, out=x)",
    "y = x[0].expand(3, 4)\ny.copy_(y), y.copy_(x[0].expand(3, 4))",
    "c = torch.complex(x, x)[0, 0]\nc.kthvalue(1), c.cummax(0), c.mode(), torch.zeros(3, 1, device=d).bool().mode(1)",
    "(x[0, 0] > 0).kthvalue(1)",
    "y = w.as_strided((2, 2), (4, 1)).clone()\ny[0].mul_(2)\ny.sum().backward()",
    "F.scaled_dot_product_attention(x[None, None, :2], x[None, None], x[None, None])",
    "F.scaled_dot_product_attention(w[None, None], w[None, None], torch.randn(1, 1, 4, 8, device=d)).sum().backward()",
    "assert ((x > 0) << 1).dtype == (n >> (n > 0)).dtype == torch.long",
    "F.cross_entropy(w, torch.tensor([0, 1, 2, 3], device=d, dtype=torch.uint8)).backward()",
    "F.nll_loss(x[0], torch.tensor(2, device=d, dtype=torch.uint8), weight=x[0])",
    "torch.cov(x, fweights=n, aweights=torch.rand(4, device=d))",
    "torch.rand(3, 4, device=d).cov(aweights=torch.rand(4, device=d))",
    "torch.lobpcg(x @ x.t() + 4 * torch.eye(4, device=d), k=1)",
    "m = torch.masked.masked_tensor(x, x > 0)\ntorch.where(x > 0, m, m)",
    "m = torch.masked.masked_tensor(w, x > 0)\ntorch.where(x > 0, m, m).sum()",
]


@pytest.fixture(params=["H100,torch=2.11", "H100,torch=2.11,values=real"])
def device(request: Any) -> Any:
    yield gpu.turn_on(request.param)
    gpu.turn_off()


def run(code: str) -> None:
    d = torch.device("cuda")
    x = torch.randn(4, 4, device=d)
    names = {
        "d": d,
        "x": x,
        "w": x.clone().requires_grad_(),
        "i": torch.tensor([0, 1, 2], device=d),
        "torch": torch,
        "nn": nn,
    }
    names |= {"F": F, "n": torch.randint(1, 9, (4,), device=d), "img": torch.randn(2, 3, 8, 8, device=d)}
    exec(code, names)


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize(("code", "kind", "words"), REFUSED, ids=[code for code, *_ in REFUSED])
def test_what_a_card_refuses(device: Any, code: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as refused:
        run(code)
    assert type(refused.value) is kind
    # (With values=real the host's kernel has refused it.)
    assert str(refused.value).replace("_cpu", "_cuda").startswith(words)


@pytest.mark.parametrize("code", ALLOWED)
def test_what_a_card_allows(device: Any, code: str) -> None:
    run(code)


@pytest.mark.parametrize("device", ["H100,torch=2.11"], indirect=True)
@pytest.mark.parametrize("call", ["clamp(0, 1)", "relu()"])
def test_complex_numbers_have_no_bounds(device: Any, call: str) -> None:
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types"):
        run(f"torch.complex(x, x).{call}")


@pytest.mark.parametrize("device", ["H100,torch=2.11"], indirect=True)
def test_the_largest_none_are_of_any_type(device: Any) -> None:
    run("(x > 0).topk(0), torch.complex(x, x)[0, 0].sort()")


def test_a_generator_of_the_host_draws_nothing_for_a_default_device(device: Any) -> None:
    with torch.device("cuda"), pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randperm(3, generator=torch.Generator())


def test_nothing_is_loaded_to_a_device_that_is_not_there(device: Any) -> None:
    file = io.BytesIO()
    torch.save(torch.zeros(2, device="cuda"), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on CUDA device 7 but"):
        torch.load(file, map_location="cuda:7")


def test_the_host_is_asked_without_drawing_numbers(device: Any) -> None:
    before = torch.get_rng_state()
    torch.zeros(3, device="cuda").add_(1).softmax(0).sum()
    assert torch.equal(torch.get_rng_state(), before)
