"""The operators that a graph from elsewhere may call: what a training step computes with, and nothing else.

A name is here because a step calls it, on the CPU or on CUDA, or because a pass writes it. None of them opens a file,
loads code, calls back into Python or reads memory by an address. What is not here is refused by its name, before it is
looked up; a step that needs it can still be traced where it runs.
"""

from __future__ import annotations

_COMPUTE = """
cumsum.default div.Scalar div.Tensor mean.dim mm.default bmm.default addmm.default baddbmm.default _grouped_mm.default
mul.Scalar mul.Tensor neg.default pow.Tensor_Scalar reciprocal.default remainder.Scalar rsqrt.default sqrt.default
sub.Tensor sub.Scalar rsub.Scalar sum.dim_IntList sum.default add.Tensor add.Scalar add_.Tensor abs.default
exp.default exp2.default log.default log2.default log1p.default expm1.default sin.default cos.default tanh.default
clamp.default clamp_min.default clamp_max.default maximum.default minimum.default where.self amax.default amin.default
sigmoid.default sigmoid_backward.default silu.default silu_backward.default relu.default threshold_backward.default
gelu.default gelu_backward.default _softmax.default _softmax_backward_data.default _log_softmax.default
_log_softmax_backward_data.default embedding.default embedding_dense_backward.default nll_loss_forward.default
nll_loss_backward.default bitwise_and.Tensor bitwise_or.Tensor bitwise_not.default bitwise_xor.Scalar
logical_and.default logical_or.default logical_not.default eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor
le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor sort.default sort.stable topk.default argmax.default
searchsorted.Tensor bincount.default any.default all.default any.dim all.dim floor_divide.default floor_divide.Scalar
div.Tensor_mode native_layer_norm.default native_layer_norm_backward.default _fused_rms_norm.default
_safe_softmax.default _fused_rms_norm_backward.default view_as_complex.default view_as_real.default _conj.default
"""

_MOVE = """
_local_scalar_dense.default _to_copy.default _unsafe_view.default alias.default arange.default arange.start
arange.start_step cat.default clone.default constant_pad_nd.default copy.default copy_.default detach.default
expand.default fill.Scalar full.default full_like.default flip.default gather.default index.Tensor index_add.default
index_copy.default index_put.default index_select.default lift_fresh_copy.default masked_fill.Scalar
masked_fill.Tensor new_full.default new_ones.default new_zeros.default ones.default ones_like.default permute.default
repeat.default repeat_interleave.Tensor repeat_interleave.self_int reshape.default roll.default scalar_tensor.default
scatter.src scatter.value scatter_add.default select.int select_backward.default select_scatter.default slice.Tensor
slice_backward.default slice_scatter.default split.Tensor split_with_sizes.default split_with_sizes_copy.default
squeeze.default squeeze.dim squeeze.dims stack.default sym_numel.default sym_size.int t.default transpose.int
tril.default triu.default unbind.int unfold.default unsqueeze.default view.default zeros.default zeros_like.default
zero_.default mul_.Tensor
"""

_ATTEND = """
_scaled_dot_product_cudnn_attention.default _scaled_dot_product_cudnn_attention_backward.default
_scaled_dot_product_efficient_attention.default _scaled_dot_product_efficient_attention_backward.default
_scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_backward.default
_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default
"""

_ASSERT = """
_assert_async.msg _assert_async.default _assert_scalar.default _functional_assert_async.msg
_functional_assert_scalar.default sym_constrain_range.default sym_constrain_range_for_size.default
"""

ALLOWED: frozenset[str] = frozenset(
    {f"aten.{name}" for text in (_COMPUTE, _MOVE, _ATTEND, _ASSERT) for name in text.split()}
    | {
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.wait_tensor.default",
        "bitproof.offload.default",
        "bitproof.reload.default",
        "bitproof.wait_offload.default",
        "bitproof.wait_reload.default",
        "higher_order.flex_attention",
        "higher_order.flex_attention_backward",
    }
)
"""Operators by the names that `plain` writes. Python's functions on sizes are `plain`'s own."""
