"""The register of what is private: every name of other packages that is used here although they promise nothing about it.

`RUN` has the versions on which the names were seen and tests ran (docs/no_gpu.md says which tests). `tests/test_private.py` walks
the register on the installed versions, and finds what the source uses and no row has. A step that replaces things of PyTorch's is
left out where a name of its rows is missing (`Patches.attempt`): the rest of the device works, and a line says what does not.
What is said elsewhere of CUDA's kernels was read in the sources of PyTorch 2.9 to 2.13.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Package -> the versions on which it was run, oldest first.
RUN = {
    "torch": "2.9.1 2.11.0 2.13.0 2.15.0",
    "IPython": "7.34.0 9.18.1",
    "ipykernel": "7.3 7.4.0",
    "pynvml": "13.615.71 (nvidia-ml-py)",
    "triton": "3.9",
    "bitsandbytes": "0.50.2 (its kernels were read)",
    "flash_attn": "2.5 to 2.8 (read, not run)",
    "xformers": "0.0.20 to 0.0.35 (read, not run)",
    "safetensors": "0.8.0 (0.4 was read)",
    "transformers": "5.23.0",
    "anywidget": "0.11.0",
}


class Missing(RuntimeError):
    """A private name is not there. The text is one line: what this version lacks, and what is lost by it."""


@dataclass(frozen=True)
class Dependence:
    """Names that are used for one thing. where: the modules, or functions of one (``module:function``).

    names: (dotted name, its mark). A question mark: some version or build lacks the name, and the code that uses it asks. An
    asterisk: it is only there on live objects, such as a shell.
    """

    where: tuple[str, ...]
    use: str
    lost: str
    names: tuple[tuple[str, str], ...]

    def is_for(self, place: str) -> bool:
        """Whether it is about a module, or a function of one."""
        module = place.partition(":")[0]
        return any(one in (place, module) or f"{module}.".startswith(f"{one}.") for one in self.where)


# Where, what for, what is lost, and the names by their homes, of which one may be made to look at (``torch.nn.Module()``).
_TABLE = """
virtual.gpu virtual.machine virtual.engine virtual.operators.factories virtual.torch_face.storages virtual.torch_face.captured
  for tensors without data, and every operator on them before C++ runs it
  lost: there is no virtual GPU
  torch._subclasses.fake_tensor: FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException
    UnsupportedOperatorException
  torch._subclasses.fake_tensor.FakeTensorMode: dispatch in_kernel_invocation*
  torch._C: DisableTorchFunction DisableTorchFunctionSubclass _DisableTorchDispatch Generator StorageBase.device
    _VariableFunctions _disabled_torch_dispatch_impl _disabled_torch_function_impl _TorchDispatchModeKey.FAKE
    _get_dispatch_mode _get_dispatch_stack_at _len_torch_dispatch_stack _push_on_torch_dispatch_stack
    _pop_torch_dispatch_stack _get_function_stack_at _len_torch_function_stack
  torch.utils._python_dispatch: TorchDispatchMode
  torch.utils._device: DeviceContext _device_constructors
  torch.utils._pytree: tree_leaves
  torch._ops: OpOverload OpOverloadPacket
  torch.ops.aten.add: Tensor._schema Tensor._can_decompose _qualified_op_name
  torch.UntypedStorage: _cdata

virtual.operators virtual.torch_face virtual.libraries
  for the same tensors, where their operators, PyTorch's face and libraries meet them
  lost: there is no virtual GPU
  torch._subclasses.fake_tensor: FakeTensor
  torch._C: DisableTorchFunctionSubclass _DisableTorchDispatch Generator _VariableFunctions _disabled_torch_function_impl
  torch.utils._pytree: tree_leaves
  torch.ops.aten.add: Tensor._schema
  torch.UntypedStorage: _cdata

patching
  for kernels of operators that are given back
  lost: there is no virtual GPU
  torch.library.Library: _destroy

virtual.engine.tensors owners.traversal virtual.torch_face.parameters virtual.torch_face.wrappers
  for what PyTorch itself keeps in a fake tensor's dictionary
  lost: a tensor's own attributes are taken for PyTorch's
  FakeTensor: _fake_device* fake_device* fake_mode* constant* pytype* dispatch_keys* real_tensor* _is_param* _debug_trace*
    _memo* _memo_vc* _memo_epoch* _item_memo* _item_memo_vc* _item_memo_epoch* _nonzero_memo* _nonzero_memo_vc*
    _nonzero_memo_epoch* _unique_memo* _unique_memo_vc* _unique_memo_epoch* _unique_consecutive_memo*
    _unique_consecutive_memo_vc* _unique_consecutive_memo_epoch* _nested_int_memo* _nested_int_memo_vc*
    _nested_int_memo_epoch*

virtual.engine.kernel_rules
  for operators that a program made with torch.library.custom_op
  lost: `register_kernel` does not know them
  torch._library.custom_ops: CustomOpDef CustomOpDef._qualname*

virtual.operators virtual.engine virtual.torch_face.captured virtual.libraries.efficient
  for operators whose CUDA kernels take memory of their own, or have no shape rule
  lost: such an operator counts its results only, or has none
  torch.ops.aten: _addmm_activation _assert_async _coalesce _coalesced_ _convolution _ctc_loss _ctc_loss_backward _dimI _dimV
    _dirichlet_grad _efficient_attention_forward _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_tensor_affine_backward _cudnn_ctc_loss _index_select?
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _foreach_copy_ _foreach_norm _fused_adagrad_ _fused_adam_
    _fused_adamw_ _fused_rms_norm? _fused_rms_norm_backward? _fused_sgd_ _grouped_mm _has_compatible_shallow_copy_type
    _index_put_impl_ _indices _int_mm _is_all_true _is_any_true _local_scalar_dense _log_softmax _log_softmax_backward_data
    _masked_softmax _masked_softmax_backward _native_multi_head_attention _nested_tensor_from_mask_left_aligned _nnz
    _pack_padded_sequence _pad_packed_sequence _sample_dirichlet _scaled_dot_product_attention_math _softmax
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _softmax_backward_data
    _scaled_dot_product_flash_attention _scaled_mm _sparse_addmm _sparse_coo_tensor_with_dims_and_tensors _sparse_log_softmax
    _sparse_mask_projection _sparse_mm _sparse_softmax _sparse_sparse_matmul _sparse_sum _standard_gamma _standard_gamma_grad
    _to_copy _to_dense _to_sparse _transformer_encoder_layer_fwd _unique _unique2 _values _weight_norm_interface_backward
  torch.ops.c10d: _allgather_base_ _reduce_scatter_base_
  torch.ops: _c10d_functional

virtual.operators.sparse virtual.operators.shapes virtual.operators.data_dependent recording.identity
  for the parts of a sparse tensor
  lost: sparse tensors are not measured
  torch.Tensor: _coalesced_ _indices _values

virtual.operators.checks virtual.operators.autocast
  for whether a tensor was written to, or is a view
  lost: checks of values and casts of weights are taken for new ones
  torch.Tensor: _version _is_view

virtual.operators.collectives
  for what a collective returns that sends nothing
  lost: collectives of torch.distributed do not run
  torch._C: _distributed_c10d.FakeWork?

virtual.operators.written_gradients
  for the node that a backward pass is in
  lost: gradients that are written into zeros count twice
  torch._C: _current_autograd_node?

virtual.operators.autocast
  for kernels in place of autocast's own, which ask C++ for the device
  lost: `torch.autocast` casts nothing
  torch._C: DispatchKey.AutocastCUDA DispatchKeySet _ExcludeDispatchKeyGuard

virtual.operators.composites
  for kernels of CUDA's own where the host puts smaller operators together
  lost: dropout, softmax and norms take the memory that they take on the host
  torch._C: _AutoDispatchBelowAutograd _are_functorch_transforms_active

virtual.operators.attention
  for the order in which attention's kernels are tried
  lost: an order of the program's own is not followed
  torch._C: _get_sdp_priority_order?

virtual.torch_face.parameters virtual.torch_face.saving attribution.sites
  for moving parameters that keep their identity
  lost: `model.to("cuda")` does not work
  torch._C: _swap_tensor_impl
  torch.nn.Module: _apply
  torch.Tensor: _backward_hooks _post_accumulate_grad_hooks?
  torch.nn.Module(): _parameters _buffers

virtual.torch_face.wrappers
  for tensor classes of the program's own that wrap tensors
  lost: classes that wrap tensors, such as quantised weights, can't be on the virtual GPU
  torch.Tensor: _make_subclass _make_wrapper_subclass

virtual.torch_face.saving
  for where a storage was, and the two steps of safetensors
  lost: a file may be overwritten by zeros
  torch.serialization: location_tag
  safetensors.torch: serialize_file _flatten? _flatten_as_ptr?

virtual.torch_face.surroundings:_device_numbers
  for devices that are given as numbers
  lost: `model.to(0)` does not work
  torch._C._nn: _parse_to

virtual.torch_face.surroundings:_profiler
  for NVTX and CUDA's runtime
  lost: ranges of NVTX and `torch.cuda.cudart` look for a driver
  torch.cuda.nvtx: _nvtx
  torch.cuda: _cudart

virtual.torch_face.surroundings:_convolution_formats
  for a convolution's memory format, for which fake tensors ask C++
  lost: channels_last is not followed by convolutions
  torch._C: _conv_determine_backend_memory_format?

virtual.torch_face.legacy
  for a default device that is taken back
  lost: `set_default_tensor_type` leaves a default device behind
  torch: _GLOBAL_DEVICE_CONTEXT?

virtual.torch_face.torch_cuda virtual.torch_face.graphs virtual.machine virtual.torch_face.cuda_memory
  for functions below torch.cuda that libraries and PyTorch's own Python call; builds for the host lack most
  lost: what calls them looks for a driver
  torch._C: _get_accelerator? _host_emptyCache? _cuda_getCurrentRawStream? _cuda_clearCublasWorkspaces?
  torch.cuda: _DeviceGuard?
  torch.cuda.memory: _cuda_beginAllocateCurrentThreadToPool? _cuda_endAllocateToPool? _cuda_releasePool?
    _record_memory_history? _dump_snapshot? _snapshot?

virtual.torch_face.communication:install
  for copies between devices; builds for the host lack them
  lost: `torch.nn.DataParallel` does not run
  torch._C: _broadcast? _broadcast_coalesced? _scatter? _gather?
  torch._utils: _flatten_dense_tensors _unflatten_dense_tensors _take_tensors _reorder_tensors_as

virtual.torch_face.communication:_distributed
  for the buckets of DistributedDataParallel
  lost: `DistributedDataParallel` does not run
  torch.nn.parallel.distributed.DistributedDataParallel: _pre_forward _post_forward register_comm_hook
  torch.nn.parallel.distributed: _verify_param_shape_across_processes? _sync_module_states?
  torch.distributed: _register_comm_hook

virtual.torch_face.hooks:_backward recording.torch_seams:watch_backward causes.why recording.failing_place attribution.sites
  for the one way into the autograd engine from Python
  lost: what a backward pass makes is not seen
  torch.autograd: _engine_run_backward
  torch.autograd.graph: _engine_run_backward

virtual.torch_face.hooks:_fake_tensors
  for fake tensors warm a real device up, and log what a program did wrong
  lost: a real device would be looked for
  torch._subclasses.fake_tensor: init_gpu_context log.filters

virtual.torch_face.hooks:_foreach
  for the tensor types for which optimizers work on lists, and how they group them
  lost: optimizers take the path of one tensor at a time, and less memory than on a device
  torch.utils._foreach_utils: _foreach_supported_types
  torch.optim.optimizer: _foreach_supported_types
  torch._C: _group_tensors_by_device_and_dtype

virtual.torch_face.hooks:_run_eagerly
  for what `torch.compiler.set_stance` sets, and asks before each call
  lost: what `torch.compile` made does not run
  torch._dynamo.eval_frame: _stance _callback_from_stance?

virtual.torch_face.hooks:_vmap
  for where every vmap runs its function
  lost: `torch.vmap` loses its tensors' memory from sight
  torch._functorch.vmap: _flat_vmap
  torch._C._functorch: is_functorch_wrapped_tensor get_unwrapped

virtual.torch_face.hooks:_scripts
  for how TorchScript knows PyTorch's functions
  lost: TorchScript does not know `torch.zeros` while the device is on
  torch.jit._builtins: _find_builtin
  torch.jit._recursive: _find_builtin

virtual.libraries
  for distributed tensors, export, flex attention and Triton's launches, where the program uses them
  lost: a warning says so when the library is imported
  torch.distributed.tensor._api: DTensor DTensor._local_tensor*
  torch.export._trace: _export?
  torch._higher_order_ops.flex_attention: math_attention
  torch.nn.attention.flex_attention: flex_attention_hop
  triton.runtime.jit: JITFunction.run
  triton.runtime.autotuner: Autotuner.run
  bitsandbytes.functional: get_paged prefetch_tensor fill
  bitsandbytes.backends.cuda.ops: _gpu_dispatch_props? _gemm_4bit_use_custom_cuda?
  flash_attn.flash_attn_interface: flash_attn_func
  xformers.ops.fmha: memory_efficient_attention

virtual.card.nvml
  for the two functions by which pynvml reaches the C library, and what it counts and keeps
  lost: pynvml does not answer for the virtual GPU
  pynvml: _LoadNvmlLibrary _nvmlGetFunctionPointer _nvmlLib_refcount NVMLError._errcode_to_string

devices.torch_memory devices.history
  for the history of the real caching allocator, its counters and the context; builds for the host lack the binding
  lost: rows of a real GPU show totals without their owners
  torch._C: _cuda_getDeviceCount? _cuda_hasPrimaryContext? _cuda_isHistoryEnabled? _cuda_record_memory_history?
    _cuda_record_memory_history_legacy? _cuda_resetAccumulatedMemoryStats?
  torch.cuda.memory: _record_memory_history _snapshot
  torch.cuda: _queued_calls

looks.tensors owners.naming
  for reading tensors, modules and optimizers without the program's own overrides and modes
  lost: who holds the memory is not known
  torch._C: TensorBase DisableTorchFunction _DisableTorchDispatch _dispatch_keys DispatchKey.Python DispatchKey.SparseCPU
    DispatchKey.SparseCUDA DispatchKey.SparseMeta DispatchKeySet
  torch._subclasses: fake_tensor
  torch.ops.aten: _indices _values
  torch.nn.Module(): _parameters _buffers _modules
  FakeTensor: _is_param*

owners.traversal
  for telling fake tensors from others
  lost: who holds the memory of a virtual GPU is not known
  torch._subclasses.fake_tensor: FakeTensor

owners.autograd
  for what a node keeps for its backward pass, without running hooks
  lost: activations have no owner
  torch.ones(1, requires_grad=True).exp().grad_fn: _raw_saved_result
  torch._C._autograd.SavedTensor: data?

recording.torch_seams:watch_recomputation
  for what activation checkpointing computes again
  lost: recomputation is seen in modules only
  torch.utils.checkpoint: _recomputation_hook CheckpointFunction.backward

recording.torch_seams:be_quiet_about_hooks
  for PyTorch's warning about global hooks
  lost: compiled modules warn of hooks
  torch.nn.modules.module: _has_any_global_hook? _global_forward_hooks? _global_forward_hooks_with_kwargs?
    _global_forward_hooks_always_called?

attribution.sites recording.failing_place recording.hidden recording.modules
  for the frames by which a module's call, its move and its loading are known
  lost: what was made in a module has no module
  torch.nn.Module: _call_impl _wrapped_call_impl _apply _load_from_state_dict _compiled_call_impl
  transformers.modeling_utils: _load_parameter_into_model? _load_state_dict_into_meta_model?
  torch: _ops _library _decomp _refs _prims

notebook recording owners.free owners.roots causes.why
  for cells that await, completions, tracebacks, and the results that IPython keeps
  lost: a cell runs as it would without a magic, and results are not found
  IPython.core.async_helpers: _asyncio_runner
  IPython.core.interactiveshell.InteractiveShell: should_run_async transform_cell transform_ast loop_runner autoawait
    showtraceback strdispatchers* displayhook* user_ns_hidden*

widgets.widget
  for answers to a widget's buttons while a cell runs
  lost: buttons are answered after the cell
  ipykernel.comm.comm.Comm: _reply_subshell_for*
"""


def _rows() -> Iterator[Dependence]:
    for block in _TABLE.strip().split("\n\n"):
        where, use, lost, *homes = block.replace("\n    ", " ").splitlines()
        names = [
            (f"{home.strip()}.{word.rstrip('?*')}", word[len(word.rstrip("?*")) :])
            for home, _, words in (line.rpartition(": ") for line in homes)
            for word in words.split()
        ]
        yield Dependence(tuple(where.split()), use.strip(), lost.removeprefix("  lost: "), tuple(names))


REGISTER = tuple(_rows())


def resolve(name: str) -> Any:
    """What a dotted name stands for. Raises AttributeError where it is not there."""
    parts = name.split(".")
    if "(" in name:
        # An object is made to look at; the register's own text, and nobody else's.
        head, _, last = name.rpartition(".")
        return getattr(eval(head, {parts[0]: importlib.import_module(parts[0])}), last)
    homes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    loaded = [home for home in homes if home in sys.modules][:1]
    # What is loaded first; then by import, because a module may hide behind a function of its name.
    for home in loaded + homes:
        with suppress(AttributeError, ImportError):
            return functools.reduce(getattr, parts[home.count(".") + 1 :], importlib.import_module(home))
    raise AttributeError(name)


def lacking(place: str) -> str:
    """One line on what is missing for a module or a function of one, and what is lost by it; "" where nothing is."""
    for row in REGISTER:
        if row.is_for(place):
            # Operators cost their own rules only (`aten`).
            kept = "torch.ops." if ":" in place else "("
            names = [name for name, mark in row.names if not mark and name.startswith("torch.")]
            gone = [name for name in names if not name.startswith(kept) and not _there(name)]
            if gone:
                return f"{_version(gone[0])} has no {', '.join(gone)} ({_experience(gone[0])}): {row.lost}."
    return ""


def require(place: str) -> None:
    """Raises Missing where something is lacking for a module or a function of one."""
    line = lacking(place)
    if line:
        raise Missing(line)


def place_of(function: Callable[..., Any]) -> str:
    """What `lacking` knows a function or method of this package by."""
    return f"{function.__module__.partition('.')[2]}:{function.__qualname__}"


def _there(name: str) -> bool:
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def _version(name: str) -> str:
    package = name.partition(".")[0]
    return f"{package} {getattr(sys.modules.get(package), '__version__', 'of unknown version')}"


def _experience(name: str) -> str:
    return f"run on {', '.join(RUN[name.partition('.')[0]].split())}"


class _NoOperator:
    """Stands for an operator that this PyTorch lacks, and its overloads: it is never met, and says so where it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> _NoOperator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Missing(f"{_version('torch')} has no operator aten::{self._name} ({_experience('torch')})")


class _Operators:
    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch.ops.aten, name, None) or _NoOperator(name)
        setattr(self, name, found)
        return found


# `torch.ops.aten`, in which an operator that this PyTorch lacks costs its own rule and not the module that has it.
aten: Any = _Operators()
