"""Kernels of libraries: flash-attn, xformers, Triton and bitsandbytes on the virtual GPU.

Where a library is not installed, small packages of the same names and signatures stand for it: their kernels cannot run here, as
the library's own cannot, and the rules have to be asked instead.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # looks for Triton when it is imported, and must not find the package that stands for it
from torch._subclasses.fake_tensor import FakeTensorMode

import gpumem_magic
from gpumem_magic.patching import Patches
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import kernel_rules as rules
from gpumem_magic.virtual.libraries.bits import prepare_cuda

MIB = 1 << 20
NAMES = ("flash_attn", "xformers", "triton")

FLASH = """
def _kernel(q):
    raise RuntimeError("flash_attn_2_cuda is not here")

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return _kernel(q)

def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    return _kernel(qkv)

def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    return _kernel(q)

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, deterministic=False, return_attn_probs=False):
    return _kernel(q)

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False,
                            return_softmax_lse=False):
    return _kernel(q)
"""

XFORMERS = """
def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    raise NotImplementedError("No operator found")

def memory_efficient_attention_forward(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    raise NotImplementedError("No operator found")
"""

TRITON_JIT = """
class JITFunction:
    def __init__(self, fn):
        self.fn = fn
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)
    def run(self, *args, grid, warmup, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
"""

TRITON_AUTOTUNER = """
class Autotuner:
    def __init__(self, fn):
        self.fn = fn
    def run(self, *args, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
"""

TRITON_DRIVER = """
class DriverConfig:
    _active = None
    @property
    def active(self):
        if self._active is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return self._active

driver = DriverConfig()
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages that can be imported, and are forgotten again."""
    write(
        tmp_path,
        {
            "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import *\n",
            "flash_attn/flash_attn_interface.py": FLASH,
            "xformers/__init__.py": "",
            "xformers/ops/__init__.py": "from xformers.ops.fmha import *\n",
            "xformers/ops/fmha/__init__.py": XFORMERS,
            "triton/__init__.py": "from triton.runtime.jit import JITFunction as jit\n",
            "triton/runtime/__init__.py": "",
            "triton/runtime/jit.py": TRITON_JIT,
            "triton/runtime/autotuner.py": TRITON_AUTOTUNER,
            "triton/runtime/driver.py": TRITON_DRIVER,
            "triton/backends/__init__.py": "",
            "triton/backends/compiler.py": "def GPUTarget(*parts): return parts\n",
        },
    )
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in NAMES}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    gpu.turn_off()


def cost(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """(bytes kept by the result, most bytes meanwhile, the result)."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result


def half(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.float16, requires_grad=grad)


# ---- flash-attn


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_flash_attention_keeps_its_result_and_the_sums(packages: None, loaded: str) -> None:
    if loaded == "before":
        importlib.import_module("flash_attn")
    gpu.turn_on("A100-40GB")
    flash = importlib.import_module("flash_attn")
    query, key, value = (half(2, 1024, 16, 64) for _ in range(3))
    kept, most, out = cost(lambda: flash.flash_attn_func(query, key, value, causal=True))
    # Result 4 MiB, sums 2 x 16 x 1024 x 4 bytes, two seeds in a block of 512 bytes.
    assert kept == most == 4 * MIB + 128 * 1024 + 512
    assert out.shape == query.shape
    grad = torch.zeros_like(out)
    _, most, _ = cost(lambda: out.backward(grad))
    # Three gradients, the sum in float32, the row sums.
    assert most == 3 * 4 * MIB + 8 * MIB + 128 * 1024
    assert query.grad is not None


def test_grouped_queries_and_deterministic_sums_take_more(packages: None) -> None:
    gpu.turn_on("A100-40GB")
    flash = importlib.import_module("flash_attn")
    query, key, value = half(1, 512, 16, 64), half(1, 512, 2, 64), half(1, 512, 2, 64)
    tops = []
    for deterministic in (False, True):
        out = flash.flash_attn_func(query, key, value, deterministic=deterministic)
        grad = torch.zeros_like(out)
        query.grad = key.grad = value.grad = None
        tops.append(cost(lambda out=out, grad=grad: out.backward(grad))[1])
        assert key.grad is not None
        assert key.grad.shape == key.shape
        del out, grad
    # 108 processors over 16 heads: 7 copies of 2 MiB in place of one; the rest is the same.
    assert tops[1] - tops[0] == 6 * 2 * MIB
    # Gradients 1 + 2/8, expanded 2, sums 2, row sums 1/32 MiB.
    assert tops[0] == int((1 + 0.25 + 2 + 2 + 1 / 32) * MIB)


def test_packed_sequences_and_head_sizes_between_steps(packages: None) -> None:
    gpu.turn_on("H100")
    flash = importlib.import_module("flash_attn")
    lengths = torch.tensor([0, 100, 700], dtype=torch.int32, device="cuda")
    tokens = half(700, 8, 60)
    out, sums, _ = flash.flash_attn_varlen_func(
        tokens, tokens, tokens, lengths, lengths, 600, 600, return_attn_probs=True
    )
    assert out.shape == tokens.shape
    assert sums.shape == (8, 700)
    out.sum().backward()
    assert tokens.grad is not None
    packed = half(2, 128, 3, 4, 64)
    flash.flash_attn_qkvpacked_func(packed).sum().backward()
    assert packed.grad is not None
    query, keys = half(2, 128, 4, 64), half(2, 128, 2, 4, 64)
    flash.flash_attn_kvpacked_func(query, keys).sum().backward()
    assert keys.grad is not None
    step = flash.flash_attn_with_kvcache(query[:, :1], keys[:, :, 0], keys[:, :, 1])
    assert step.shape == (2, 1, 4, 64)
    assert not step.requires_grad


def test_flash_attention_refuses_what_the_library_refuses(packages: None) -> None:
    flash = importlib.import_module("flash_attn")
    gpu.turn_on("T4")
    query = half(1, 16, 2, 64)
    with pytest.raises(RuntimeError, match="only supports Ampere GPUs or newer"):
        flash.flash_attn_func(query, query, query)
    gpu.turn_on("A100-40GB")
    single = torch.zeros(1, 16, 2, 64, device="cuda")
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        flash.flash_attn_func(single, single, single)
    with pytest.raises(RuntimeError, match="at most 256"):
        flash.flash_attn_func(*[half(1, 16, 2, 264)] * 3)


def test_names_that_others_have_for_a_function_are_replaced_and_put_back(packages: None) -> None:
    flash = importlib.import_module("flash_attn")
    original = flash.flash_attn_func
    finders = list(sys.meta_path)
    gpu.turn_on("A100-40GB")
    assert flash.flash_attn_func is not original
    assert flash.flash_attn_interface.flash_attn_func is flash.flash_attn_func
    with pytest.raises(RuntimeError, match="is not here"):
        flash.flash_attn_func(torch.zeros(1, 2, 2, 8), None, None)
    gpu.turn_off()
    assert flash.flash_attn_func is original
    assert flash.flash_attn_interface.flash_attn_func is original
    assert sys.meta_path == finders


def test_a_rule_of_the_users_own_goes_first(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_functions", {})
    gpu.turn_on("A100-40GB")
    gpumem_magic.register_kernel("flash_attn.flash_attn_func", lambda q, k, v: q.new_empty(7))
    flash = importlib.import_module("flash_attn")
    assert flash.flash_attn_func(half(1, 2, 2, 8), None, None).shape == (7,)


def test_a_version_that_is_not_known_is_a_warning(packages: None, tmp_path: Path) -> None:
    write(tmp_path, {"triton/runtime/autotuner.py": "class Other: ...\n"})
    gpu.turn_on("T4")
    with pytest.warns(UserWarning, match="no rules for this version of triton.runtime.autotuner"):
        importlib.import_module("triton.runtime.autotuner")


# ---- xformers


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_xformers_takes_flash_or_its_own_kernel(packages: None, loaded: str) -> None:
    if loaded == "before":
        importlib.import_module("xformers.ops")
    gpu.turn_on("A100-40GB")
    ops = importlib.import_module("xformers.ops")
    query = half(2, 1024, 16, 64)
    kept, _, out = cost(lambda: ops.memory_efficient_attention(query, query, query))
    assert kept == 4 * MIB + 128 * 1024 + 512
    assert out.shape == query.shape
    bias = torch.zeros(1, 1, 1024, 1024, device="cuda", dtype=torch.float16)
    out = ops.memory_efficient_attention(query, query, query, attn_bias=bias, p=0.1)
    out.sum().backward()
    assert query.grad is not None
    five = half(1, 64, 2, 3, 64)
    assert ops.memory_efficient_attention(five, five[:, :, :, :1].expand(five.shape), five).shape == five.shape
    gpu.turn_on("T4")
    single = torch.zeros(4, 300, 40, device="cuda", requires_grad=True)
    ops.memory_efficient_attention(single, single, single).sum().backward()
    assert single.grad is not None
    # Without gradients nothing but the result is kept.
    kept, _, out = cost(lambda: ops.memory_efficient_attention_forward(single, single, single))
    assert kept < 2 * out.numel() * 4


# ---- Triton


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_a_triton_kernel_is_not_run_and_allocates_nothing(packages: None, loaded: str) -> None:
    if loaded == "before":
        importlib.import_module("triton.runtime.autotuner")
        importlib.import_module("triton")
    machine = gpu.turn_on("T4")
    triton = importlib.import_module("triton")
    tuner = importlib.import_module("triton.runtime.autotuner")
    x = torch.zeros(1024, device="cuda")
    kept, most, _ = cost(lambda: triton.jit(None)[(8,)](x, x, 1024, BLOCK=128))
    assert kept == most == 0
    tuner.Autotuner(None).run(x, grid=(1,))
    assert any("Triton were not run (2 launches)" in note for note in machine.notes())
    with pytest.raises(RuntimeError, match="0 active drivers"):
        triton.jit(None)[(8,)](torch.zeros(4), 4)


def test_the_stream_that_kernels_are_launched_on() -> None:
    before = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    gpu.turn_on("T4")
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch._C._cuda_getCurrentRawStream(0) == stream.cuda_stream
    gpu.turn_off()
    assert getattr(torch._C, "_cuda_getCurrentRawStream", None) is before


def test_an_operator_that_the_program_wrote_takes_what_it_runs() -> None:
    """On a card its body runs; its shape rule is for the compiler, and for a body that only runs on a card."""
    library = importlib.import_module("torch.library")
    gpu.turn_on("T4")

    @library.custom_op("gpumem_magic_tests::widened", mutates_args=())  # type: ignore[untyped-decorator]
    def widened(x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "wrong":
            raise ValueError(how)
        if how == "on a card":
            raise RuntimeError("x must be a CUDA tensor")
        return torch.cat([x, x, x]).view(3, -1).sum(0)

    x = torch.zeros(1 << 20, device="cuda")
    kept, most, _ = cost(lambda: widened(x, "here"))
    assert (kept, most) == (x.nbytes, 4 * x.nbytes)
    with pytest.raises(ValueError, match="wrong"):
        widened(x, "wrong")
    widened.register_fake(lambda x, how: torch.empty_like(x))
    fast = torch.compile(lambda x: widened(x.sin(), "here").cos(), fullgraph=True)
    fast(x)
    # The sine, and what the body takes; the cosine takes the result's place.
    assert cost(lambda: fast(x))[1] == 5 * x.nbytes
    assert cost(lambda: widened(x, "on a card"))[:2] == (x.nbytes, x.nbytes)


def test_an_operator_whose_kernel_for_cuda_is_python_takes_what_that_runs() -> None:
    """As `fully_shard` has some. PyTorch makes the result by the kernel's own shape rule, where it cannot be run here."""
    gpu.turn_on("T4")
    library = importlib.import_module("torch.library").Library("gpumem_magic_tests", "FRAGMENT")
    library.define("tripled(Tensor x, *, Tensor(a!) out) -> ()")
    library.define("first_row(Tensor x) -> Tensor")

    def tripled(x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(torch.cat([x, x, x])[: len(x)])

    def on_a_card(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 2:
            raise RuntimeError("x must be a CUDA tensor")
        return torch.cat([x, x])[0].clone()

    for key in ("Meta", "CUDA"):
        library.impl("tripled", tripled, key)
    library.impl("first_row", lambda x: x.new_empty(x.shape[1:]), "Meta")
    library.impl("first_row", on_a_card, "CUDA")
    x = torch.zeros(4, 1 << 18, device="cuda")
    out = torch.empty_like(x)
    operators: Any = torch.ops.gpumem_magic_tests
    assert cost(lambda: operators.tripled(x, out=out))[:2] == (0, 3 * x.nbytes)
    assert cost(lambda: operators.first_row(x))[:2] == (x.nbytes // 4, 2 * x.nbytes + x.nbytes // 4)
    assert cost(lambda: operators.first_row(x[:2]))[:2] == (x.nbytes // 4, x.nbytes // 4)


def test_tritons_driver_answers_for_the_card(packages: None) -> None:
    gpu.turn_on("2xT4")
    driver = importlib.import_module("triton.runtime.driver").driver
    assert driver.active.get_current_target() == ("cuda", 75, 32)
    assert driver.active.get_active_torch_device() == torch.device("cuda:0")
    driver.active.set_current_device(1)
    assert driver.active.get_current_device() == 1
    found = driver.active.utils.get_device_properties(1)
    assert (found["max_shared_mem"], found["multiprocessor_count"]) == (64 << 10, 40)
    _, most, _ = cost(lambda: driver.active.clear_cache(driver.active.get_empty_cache_for_benchmark()))
    assert most == 256 << 20
    gpu.turn_off()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        driver.active  # noqa: B018


def test_tritons_own_kernels_where_it_is_installed() -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    language = importlib.import_module("triton.language")

    def add(x, out, count, SIZE):  # type: ignore[no-untyped-def]
        at = language.program_id(0) * SIZE + language.arange(0, SIZE)
        language.store(out + at, language.load(x + at, mask=at < count) + 1, mask=at < count)

    machine = gpu.turn_on("T4")
    x = torch.zeros(1000, device="cuda")
    tuned = triton.autotune(configs=[triton.Config({"SIZE": size}) for size in (128, 256)], key=["count"])
    tuned(triton.jit(add))[lambda meta: (triton.cdiv(1000, meta["SIZE"]),)](x, torch.empty_like(x), 1000)
    triton.jit(add)[(8,)](x, torch.empty_like(x), 1000, SIZE=128)
    assert machine.engine.kernels_not_run == 2
    library = importlib.import_module("torch.library")
    kernel = triton.jit(add)

    @library.triton_op("gpumem_magic_tests::plus_one", mutates_args={})  # type: ignore[untyped-decorator]
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        library.wrap_triton(kernel)[(8,)](x, out, x.numel(), SIZE=128)
        return out

    x = torch.zeros(1 << 20, device="cuda")
    assert cost(lambda: plus_one(x))[1] == x.nbytes
    fast = torch.compile(lambda x: plus_one(x.sin()).cos(), fullgraph=True)
    fast(x)
    # What goes into the kernel, and what it writes, in which the rest is done.
    assert cost(lambda: fast(x))[1] == 2 * x.nbytes


# ---- bitsandbytes


@pytest.fixture
def bits() -> Any:
    """bitsandbytes, imported while a virtual card is on, as its notebooks do."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    gpu.turn_on("T4")
    gc.collect()
    return importlib.import_module("bitsandbytes")


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("Adam8bit", 2), ("AdamW8bit", 2), ("Lion8bit", 1), ("PagedAdamW8bit", 0), ("AdamW", 8)]
)
def test_states_of_8_bit_optimizers(bits: Any, name: str, bytes_each: int) -> None:
    layer = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = getattr(bits.optim, name)(layer.parameters(), lr=1e-3)
    layer.weight.grad = torch.zeros_like(layer.weight)
    kept, _, _ = cost(optimizer.step)
    size = layer.weight.numel()
    # At most two scales for each block of 256, and two maps of 256 numbers. Paged states lie elsewhere, their scales do not.
    assert size * bytes_each <= kept <= size * bytes_each + 2 * 4 * size / 256 + 8192
    optimizer.step()


def test_layers_with_4_bit_weights(bits: Any) -> None:
    before = torch.cuda.memory_allocated()
    layer = bits.nn.Linear4bit(4096, 4096, bias=False, compute_dtype=torch.float16, compress_statistics=False).cuda()
    held = torch.cuda.memory_allocated() - before
    # Half a byte a weight, a scale of 4 bytes for each block of 64, the code's 16 numbers.
    assert 9 * MIB <= held <= 9 * MIB + 2048
    tops = []
    for rows in (4, 2048):
        x = half(rows, 4096, grad=False)
        layer(x)
        tops.append(cost(lambda x=x: layer(x))[1] - rows * 4096 * 2)
    assert tops[0] == 0
    # Many rows: the weight is unpacked to 32 MiB, and goes back.
    assert tops[1] == 32 * MIB
    trained = half(8, 4096)
    layer(trained).sum().backward()
    assert trained.grad is not None


def test_kernels_of_bitsandbytes_are_not_called_where_they_are_there() -> None:
    """As in a PyTorch that is built for a card: without a driver they end the process."""
    kernels = types.SimpleNamespace(cquantize=lambda *args: None)
    module = types.ModuleType("ops")
    module.lib = kernels  # type: ignore[attr-defined]
    with Patches() as patches:
        prepare_cuda(module, patches)
        with pytest.raises(RuntimeError, match="cquantize of bitsandbytes does not run on a virtual GPU"):
            module.lib.cquantize(1)
    assert module.lib is kernels


def test_layers_with_8_bit_weights(bits: Any) -> None:
    layer = bits.nn.Linear8bitLt(1024, 1024, has_fp16_weights=False, threshold=6.0).cuda()
    out = layer(half(64, 1024, grad=False))
    assert out.shape == (64, 1024)
    assert out.dtype == torch.float16
    x = half(64, 1024)
    layer(x).sum().backward()
    assert x.grad is not None


def test_a_model_loaded_in_4_bits_trains_with_lora(bits: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True), device_map={"": 0}
    )
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, bits.nn.Params4bit)
    assert (weight.is_cuda, weight.dtype, weight.numel()) == (True, torch.uint8, 512 * 256 // 2)
    model = peft.get_peft_model(
        peft.prepare_model_for_kbit_training(model), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    tokens = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)


def test_an_import_of_bitsandbytes_shows_no_traceback_for_want_of_its_kernels(tmp_path: Path) -> None:
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cextension.py").write_text(
        "import logging\n"
        "log = logging.getLogger(__name__)\n"
        "log.error('bitsandbytes library load error: libcublas.so.13: cannot open shared object file')\n"
        "log.error('something else')\n"
    )
    program = (
        "from gpumem_magic.virtual import gpu\n"
        "gpu.turn_on('T4')\n"
        "from bitsandbytes import cextension\n"
        "cextension.log.error('bitsandbytes library load error: asked for')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines() == ["something else", "bitsandbytes library load error: asked for"]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="the real operators are tested above")
def test_rules_for_bitsandbytes_operators_without_the_library() -> None:
    library = torch.library.Library("bitsandbytes", "FRAGMENT")
    library.define(
        "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
        "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor"
    )
    library.define(
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, ScalarType? dtype=None)"
        " -> Tensor"
    )
    library.define("int8_double_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)")
    try:
        gpu.turn_on("T4")
        ops = torch.ops.bitsandbytes
        packed = torch.zeros(4096 * 4096 // 2, 1, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(4096 * 4096 // 64, device="cuda")
        for rows, more in ((4, 0), (2048, 32 * MIB)):
            x = half(rows, 4096, grad=False)
            ops.gemm_4bit(x, packed, [4096, 4096], scales, 64, "nf4")
            out_bytes = rows * 4096 * 2
            kept, most, _ = cost(lambda x=x: ops.gemm_4bit(x, packed, [4096, 4096], scales, 64, "nf4"))
            assert (kept, most) == (out_bytes, out_bytes + more)
        x = half(512, 1024, grad=False)
        quantised = ops.int8_double_quant(x)
        assert [tensor.dtype for tensor in quantised[:2]] == [torch.int8, torch.int8]
        kept, most, out = cost(lambda: ops.int8_scaled_mm(quantised[0], quantised[1][:256], quantised[2], quantised[3]))
        assert out.shape == (512, 256)
        # The product is in int32 first.
        assert (kept, most) == (256 * 1024, 768 * 1024)
    finally:
        gpu.turn_off()
        library._destroy()


def test_transformers_takes_no_tensor_of_the_device_for_a_compilers_fake() -> None:
    utils = pytest.importorskip("transformers.utils.import_utils")
    if not hasattr(utils, "is_fake_tensor"):
        pytest.skip("of transformers 5 and newer")
    gpu.turn_on("T4")
    try:
        assert not utils.is_tracing(torch.zeros(2, device="cuda"))
        with FakeTensorMode():
            assert utils.is_tracing(torch.zeros(2))
    finally:
        gpu.turn_off()
