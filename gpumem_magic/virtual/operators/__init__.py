"""Operators whose result or memory on CUDA is more than a shape: what their kernels return, take and give back.

A rule is a function under `special` (`engine.engine`) in the module that fits:

* results: `shapes` (PyTorch has no rule), `layouts` (its rule has them lie otherwise), `data_dependent` (values, and sizes
  that depend on values), `checks` (comparisons);
* memory beside the results: `copies` (into another layout), `matrices_as_they_lie`, `scans`, `searches`, `distances`,
  `draws`, `many_at_once`, `sorting`, `scattering` and `positions` (masks) with `cub`,
  `reductions`, `convolutions` with `cudnn`, `ctc`, `norms`, `attention_gradients`, `cudnn_attention`, `made_of_others`,
  `fourier`, `linear_algebra` with `cusolver`, `matrix_exponential`, `sparse`, `sparse_products`, `sparse_softmax`,
  `compressed` and `compressing` with `cusparse`, `fake_quantisation`, `temporaries` (the rest); what is added in place:
  `gradients_that_meet`;
* operators that C++ puts together differently for CUDA: `composites`, `cells`, `attention`, `encoder_layers`,
  `written_gradients`, `own_formulas` with `reflections`;
  what older versions keep: `kept_inputs`;
* what the host does otherwise where it computes: `equivalents`, `integer_division`;
* tensors of several lengths: `nested_tensors`, `nested_operators` with `nested_kernels` and `nested_attention`, `jagged`;
* tensors and processes: `factories`, `semi_structured`, `known_zeros`, `autocast`, `collectives`.

`workspaces` is cuBLAS's memory, which is kept after the operator.
"""
