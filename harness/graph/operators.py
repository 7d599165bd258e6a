"""What the passes need to know about operators, in one place."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.as_strided.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
}
"""Operators that rearrange dims and leave every element as it is."""

SIZED_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.as_strided.default,
}
"""Views whose result has the sizes they are told."""

ATTENTION = {
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "flex_attention",
}
"""Names of operators, without overload, that mix the positions of a sequence."""

_COLLECTIVES = "_c10d_functional"


def operator_name(node: Node) -> str:
    """A call's operator without its overload: mm of aten.mm.default, flex_attention of a higher-order one."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def is_collective(node: Node) -> bool:
    """Whether the node launches a functional collective (waits are not collectives)."""
    return getattr(node.target, "namespace", None) == _COLLECTIVES and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Whether the node waits for a functional collective."""
    return getattr(node.target, "namespace", None) == _COLLECTIVES and operator_name(node) == "wait_tensor"


def group_name(node: Node) -> str:
    """The process group a collective names: its last argument."""
    return str(node.args[-1])


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a call writes in place, told from its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [
        given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [argument for argument in written if isinstance(argument, Node)]


def has_effects(node: Node) -> bool:
    """Whether a call does more than compute its result, so that it must stay although nobody reads it.

    A collective whose result nobody waits for has no effect here: all ranks run one graph, so all drop it.
    """
    return bool(written_arguments(node))
