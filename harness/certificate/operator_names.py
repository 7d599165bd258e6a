"""The checker's own tables of operators by name; a test compares them with the prover's."""

from __future__ import annotations

from bitproof.harness.certificate.types import ARITY

CAST = "aten._to_copy.default"
EXACT = {CAST: "cast", "aten.where.self": "where", "aten.neg_.default": "neg"}
EXACT |= {f"aten.{name}.default": name for name, count in ARITY.items() if count == 1 and name != "cast"}
EXACT |= {f"aten.{name}.{end}": name for name, n in ARITY.items() if n == 2 for end in ("Tensor", "Scalar")}
EXACT |= {f"aten.{name}_.{end}": name for name in ("add", "sub", "mul") for end in ("Tensor", "Scalar")}
DIVISIONS = ("aten.div.Tensor", "aten.div.Scalar")
POWER = "aten.pow.Tensor_Scalar"
OPERANDS = (["self"], ["self", "other"], ["condition", "self", "other"])
FILLS: dict[str, str | int] = {f"aten.{name}.default": "fill_value" for name in ("full", "full_like", "new_full")}
FILLS |= {f"aten.{name}.default": 0 for name in ("zero_", "zeros", "zeros_like", "new_zeros")}
FILLS |= {f"aten.{name}.default": 1 for name in ("ones", "ones_like", "new_ones")}
FILLS |= {"aten.scalar_tensor.default": "s", "aten.fill.Scalar": "value", "aten.fill_.Scalar": "value"}
PAD = "aten.constant_pad_nd.default"
CARRIES = [
    f"aten.{name}.default" for name in ["embedding", "flip", "gather", "index_select", "repeat", "roll", "tril", "triu"]
]
CARRIES += ["aten.index.Tensor"]
UPDATES = ("aten._fused_adam.default", "aten._fused_adamw.default")
LAUNCHED = ("bitproof.offload.default", "bitproof.reload.default")
COPIES = (CAST, "aten.clone.default", "aten.contiguous.default", "aten.copy_.default", *LAUNCHED)
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
SPLIT = "aten.split_with_sizes_copy.default"
WAITS = ("_c10d_functional.wait_tensor.default", "bitproof.wait_offload.default", "bitproof.wait_reload.default")
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"
COLLECTIVES = (GATHER, REDUCE, EXCHANGE, "_c10d_functional.all_reduce.default")
SHOWING = ("view", SPLIT, *RESHAPES)
UNDERSTOOD = (*COLLECTIVES, *WAITS, "higher_order.flex_attention", "higher_order.flex_attention_backward")
REFUSED = ("aten.as_strided", "aten._reshape_alias", "aten.lift.", "_c10d_", "c10d.", "symm_mem.", "higher_order.")
EMPTY = "_make_dep_token empty empty_like empty_permuted empty_quantized empty_strided inductor_rand_eager_offset "
UNWRITTEN = {*f"{EMPTY}new_empty new_empty_strided _empty_affine_quantized _empty_per_channel_affine_quantized".split()}
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
