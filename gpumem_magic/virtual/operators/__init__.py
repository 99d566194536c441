"""Operators whose result or memory on CUDA is more than a shape: what their kernels return, take and give back.

A rule is a function under `special` (`engine.engine`) in the module that fits:

* results: `shapes` (PyTorch has no rule), `layouts` (its rule has them lie otherwise), `data_dependent` (values, and sizes that
  depend on values), `checks` (comparisons), `known_zeros`, `matrix_ranks`;
* what is copied first: `copies` (into another layout), `matrices_as_they_lie` (for cuBLAS), `products_of_types`,
  `convolution_layouts`, `index_lists`;
* what is put in order, picked or counted: `sorting`, `quantiles`, `scans`, `searches`, `scattering` and `positions`
  (masks), with `cub`;
* what is added up or drawn: `reductions`, `norms`, `losses`, `ctc`, `distances`, `draws`, `many_at_once`;
* linear algebra: `solving_by_lu`, `solving_by_cholesky`, `solving_by_reflections` and `eigenvalues`, with `linear_algebra` and
  `cusolver`; `matrix_exponential`;
* convolutions, recurrent layers, transforms: `convolutions` with `cudnn`, `cudnn_library` and `cudnn_answers`; `recurrent`;
  `fourier`;
* attention: `attention`, `attention_gradients`, `cudnn_attention`, `encoder_layers`;
* sparse tensors: `sparse`, `sparse_products`, `sparse_softmax`, `compressed` with `compressed_parts`, `compressing` with
  `cusparse`, `semi_structured`;
* tensors of several lengths: `nested_tensors`, `nested_operators` with `nested_kernels` and `nested_attention`, `jagged`;
* what C++ or Python puts together for CUDA: `composites`, `cells`, `made_of_others`, `own_formulas` with `reflections`;
* gradients: `written_gradients`, `gradients_that_meet` (added in place), `kept_inputs` (what older versions keep);
* what the host does otherwise where it computes: `equivalents`, `integer_division`;
* tensors, types and processes: `factories`, `autocast`, `fake_quantisation`, `growing`, `collectives`, `communicators`.

`temporaries` has the rest; `workspaces` is cuBLAS's memory, which is kept after the operator.
"""
