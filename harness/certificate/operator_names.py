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
CARRIES = [f"aten.{name}.default" for name in ("embedding", "flip", "gather", "index_select")]
CARRIES += [*(f"aten.{name}.default" for name in ("repeat", "roll", "tril", "triu")), "aten.index.Tensor"]
UPDATES = ("aten._fused_adam.default", "aten._fused_adamw.default")
COPIES = [f"aten.{name}.default" for name in ("_to_copy", "clone", "contiguous", "copy_")]
COPIES += ["bitproof.offload.default", "bitproof.reload.default"]
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
SPLIT = "aten.split_with_sizes_copy.default"
WAITS = ("_c10d_functional.wait_tensor.default", "bitproof.wait_offload.default", "bitproof.wait_reload.default")
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"
COLLECTIVES = (GATHER, REDUCE, EXCHANGE, "_c10d_functional.all_reduce.default")
SOURCES = {name: "self" for name in (*COPIES[:3], PAD, SPLIT)}
SOURCES |= {"aten.copy_.default": "src", "bitproof.offload.default": "x", "bitproof.reload.default": "host"}
SOURCES |= dict(zip(WAITS, ("tensor", "host", "x"), strict=True)) | {GATHER: "input", REDUCE: "input"}
"""Which argument an operator copies, waits for, pads, sends or splits: certificates list arguments in any order."""
SHOWING = ("view", SPLIT, *RESHAPES)
UNDERSTOOD = (*COLLECTIVES, *WAITS, "higher_order.flex_attention", "higher_order.flex_attention_backward")
REFUSED = ("aten.as_strided", "aten._reshape_alias", "aten.lift.", "_c10d_", "c10d.", "symm_mem.", "higher_order.")
UNWRITTEN = ("empty", "new_empty", "_empty", "_make_dep_token", "inductor_rand_eager_offset")
"""How operators begin that return uninitialized memory."""
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


def is_unwritten(op: str) -> bool:
    """Whether an operator, of any namespace and ending, returns uninitialized memory."""
    return op.split(".")[-2:][0].startswith(UNWRITTEN)
