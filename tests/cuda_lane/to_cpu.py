"""A graph that was traced for CUDA, made to run on the CPU: every rewrite has happened by then, in CUDA's operators.

1. Device constants, torch.device("cuda") and the text "cuda" of a reload, become the CPU's.
2. CUDA's attention becomes the CPU's: the kernel that eager chooses there.

Nothing else is touched. What is left of CUDA is refused, so that no case runs half mapped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

aten = torch.ops.aten


def host_waits(module: GraphModule) -> Counter[str]:
    """How often the host waits for a device, by operator: to copy from it into pageable memory, or to read a number."""
    waits: Counter[str] = Counter()
    for node in module.graph.nodes:
        if node.target in (aten._to_copy.default, aten._local_scalar_dense.default):
            read, given = node.args[0].meta["val"], node.meta["val"]
            is_on_host = not isinstance(given, Tensor) or given.device.type == "cpu"
            waits[str(node.target)] += read.device.type == "cuda" and is_on_host
    return +waits


def map_to_cpu(module: GraphModule) -> Counter[str]:
    """Rewrite the graph in place, nested graphs included; returns how often what was mapped. Raises ValueError."""
    mapped: Counter[str] = Counter()

    def replace(argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == "cuda":
            mapped["device"] += 1
            return torch.device("cpu")
        if isinstance(argument, str) and argument == "cuda":
            mapped["device"] += 1
            return "cpu"
        return argument

    for nested in module.modules():
        if not isinstance(nested, GraphModule):
            continue
        for node in nested.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, replace), map_aggregate(node.kwargs, replace)
            if node.target in ATTENTION:
                mapped[str(node.target)] += 1
                node.target = ATTENTION[node.target]
        nested.recompile()
        if "'cuda" in nested.code:
            [line, *_] = (line for line in nested.code.splitlines() if "'cuda" in line)
            raise ValueError(f"the graph still names CUDA: {line.strip()}")
    return mapped


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """What CUDA's flash attention returns, of which a step reads output, logsumexp and hands the rest to backward."""
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=None, scale=scale
    )
    state = torch.zeros(2, dtype=torch.uint64)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], state, state[0].clone(), query.new_empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Of the rest only dropout and causality matter here."""
    _, _, _, _, dropout_p, is_causal, *_ = rest
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, query, key, value, output, logsumexp, dropout_p, is_causal, attn_mask=None, scale=scale
    )


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Efficient attention without a bias: the CPU's flash kernel where there is one head dim, else plain operators."""
    if attn_bias is not None:
        raise ValueError("efficient attention with a bias is not mapped to the CPU")
    state = torch.zeros((), dtype=torch.int64)
    if _has_two_head_dims(query, value):
        output = _rows_outermost(plain(query, key, value, dropout_p, is_causal, scale))
        logsumexp = query.new_zeros(query.shape[:-1], dtype=torch.float32)  # the backward below reads none
    else:
        output, logsumexp, *_ = flash(query, key, value, dropout_p, is_causal, scale=scale)
    return output, logsumexp, state, state.clone()


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and bias."""
    if _has_two_head_dims(query, value):
        return (*map(_rows_outermost, plain_backward(grad, query, key, value, is_causal, scale)), None)
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, logsumexp, dropout_p, is_causal, attn_mask=None, scale=scale
    )
    return (*gradients, None)


def plain(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Attention as eager has it on the CPU where queries and values have head dims of their own."""
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, None, dropout_p, is_causal, scale=scale
    )[0]


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `plain` without dropout, by the calls that autograd makes; no rank of the lane can ask it.

    Half precision is computed in float32, as there.
    """
    dtype, dim, rows = query.dtype, query.shape[-1], query.shape[-2]
    root = (dim**-0.5 if scale is None else scale) ** 0.5
    grad, query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (grad, query, key, value))
    query, key = query * root, key.transpose(-2, -1) * root
    scores = query @ key
    if is_causal:
        scores = scores + scores.new_full((rows, scores.shape[-1]), -torch.inf).triu(1)
    weights = aten._safe_softmax(scores, -1)
    of_value, of_weights = weights.transpose(-2, -1) @ grad, grad @ value.transpose(-2, -1)
    of_scores = aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
    of_key, of_query = query.transpose(-2, -1) @ of_scores, of_scores @ key.transpose(-2, -1)
    found = of_query * root, (of_key * root).transpose(-2, -1), of_value
    return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)


def _rows_outermost(heads: Tensor) -> Tensor:
    """The same values laid out as CUDA's kernel leaves them, which later views rely on: [batch, row, head, dim]."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _has_two_head_dims(query: Tensor, value: Tensor) -> bool:
    return query.shape[-1] != value.shape[-1]


ATTENTION = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
