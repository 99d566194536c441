"""Which libraries there are rules for, by the module that is changed."""

from __future__ import annotations

from gpumem_magic.virtual.libraries import (
    bits,
    deep_speed,
    dtensor,
    efficient,
    exporting,
    flash,
    flex,
    hugging_face,
    pipelines,
    repeated_draws,
    sharded_states,
    symmetric_memory,
    triton_kernels,
)
from gpumem_magic.virtual.libraries import vision as vision  # (whose rule is registered with its import)
from gpumem_magic.virtual.libraries.loading import Around, Libraries, Prepare

_PREPARE: dict[str, Prepare] = {
    "bitsandbytes.functional": bits.prepare,
    "bitsandbytes.backends.cuda.ops": bits.prepare_cuda,
    "deepspeed.runtime.zero.utils": deep_speed.prepare,
    "flash_attn.flash_attn_interface": flash.prepare,
    "xformers.ops.fmha": efficient.prepare,
    "torch.distributed._functional_collectives": dtensor.prepare_collectives,
    "torch.distributed.optim.zero_redundancy_optimizer": sharded_states.prepare,
    "torch.distributed._symmetric_memory": symmetric_memory.prepare,
    "torch.distributed.pipelining.stage": pipelines.prepare,
    "torch.distributed.tensor._api": dtensor.prepare,
    "torch._inductor.compile_fx": exporting.prepare_ahead,
    "torch.export._draft_export": exporting.prepare_draft,
    "torch.export.pt2_archive._package": exporting.prepare_archive,
    "torch.onnx._internal.torchscript_exporter.utils": exporting.prepare_onnx,
    "torch.nn.attention.flex_attention": flex.prepare,
    "torch._prims.rng_prims": repeated_draws.prepare,
    "transformers.utils.import_utils": hugging_face.prepare,
    "torch._higher_order_ops.triton_kernel_wrap": triton_kernels.prepare_operators,
    "triton.runtime.driver": triton_kernels.prepare_driver,
    "triton.runtime.jit": triton_kernels.quiet("JITFunction"),
    "triton.runtime.autotuner": triton_kernels.quiet("Autotuner"),
}

_AROUND: dict[str, Around] = {"bitsandbytes.cextension": bits.without_its_kernels}


def libraries(more: dict[str, Prepare]) -> Libraries:
    """To be installed with a virtual machine, and removed with it. more: what is prepared by the machine's own parts."""
    prepare = {name: [one[name] for one in (_PREPARE, more) if name in one] for name in {**_PREPARE, **more}}
    return Libraries(prepare, _AROUND)
