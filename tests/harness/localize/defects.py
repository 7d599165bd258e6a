"""Twelve ways in which a chunked graph, or the trainer around it, can be wrong, and where each is to be found.

Each is a small edit of a right step, of the kind that a pass gets wrong: nothing is marked, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.origin import origin_of

aten = torch.ops.aten
BAD_RANK = 1


class Defect(NamedTuple):
    """An edit of the graph, or, where that is None, of the trainer, and the call that must be named."""

    name: str
    edit: Callable[[GraphModule], None] | None
    module: str | None
    direction: str
    operators: tuple[str, ...]


def find(
    module: GraphModule, name: str, at: str, direction: str = "forward", chunk: int | None = None, turn: int = 0
) -> Node:
    """The turn-th node that calls an operator at a place."""
    found = [
        node
        for node in module.graph.nodes
        if operator_name(node) == name
        and (origin_of(node).module, origin_of(node).direction, node.meta.get("chunk")) == (at, direction, chunk)
    ]
    return found[turn]


def insert(after: Node, target: Any, *others: Any, **options: Any) -> None:
    """Let the readers of a node read what `target` makes of it."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, (after, *others), options)
    node.meta |= after.meta
    after.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


def bypass(node: Node, source: Node) -> None:
    """Leave a node out: its readers read `source`."""
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in the precision of bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def reversed_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    """The rows in reverse order, on the bad rank alone."""
    return x.flip(0) if dist.get_rank() == BAD_RANK else x


def other_activation(module: GraphModule) -> None:
    find(module, "silu", "layers.1.moe.experts", chunk=0).target = aten.relu.default


def other_epsilon(module: GraphModule) -> None:
    node = find(module, "add", "layers.0.ffn_norm", chunk=0)
    node.args = (node.args[0], 1e-4)


def chunks_joined_in_reverse(module: GraphModule) -> None:
    node = next(n for n in module.graph.nodes if n.target is aten.cat.default and _joins_chunks(n))
    node.args = (list(reversed(node.args[0])), *node.args[1:])  # type: ignore[arg-type]


def _joins_chunks(node: Node) -> bool:
    parts = [part.meta.get("chunk") for part in node.args[0]]  # type: ignore[union-attr]
    return parts == [0, 1] and origin_of(node).direction == "forward"


def second_half_is_the_first(module: GraphModule) -> None:
    node = next(
        n for n in module.graph.nodes if n.target is aten.slice.Tensor and n.meta.get("chunk") == 1 and _is_hidden(n)
    )
    node.args = (node.args[0], node.args[1], 0, node.args[2])


def _is_hidden(node: Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def chunk_1_counts_no_tokens(module: GraphModule) -> None:
    node = find(module, "add_", "layers.1.moe", chunk=1)
    bypass(node, node.all_input_nodes[0])


def rows_arrive_in_reverse_on_one_rank(module: GraphModule) -> None:
    launch = find(module, "all_to_all_single", "layers.1.moe.experts", chunk=0, turn=1)
    insert(next(iter(launch.users)), reversed_on_one_rank)


def reduced_gradient_rounded(module: GraphModule) -> None:
    insert(find(module, "wait_tensor", "layers.1.attention.wo", "backward", chunk=0), rounded)


def weights_of_experts_rounded(module: GraphModule) -> None:
    insert(find(module, "gather", "layers.1.moe.router", chunk=1), rounded)


def backward_reads_the_other_chunk(module: GraphModule) -> None:
    node = find(module, "silu_backward", "layers.0.feed_forward", "backward", chunk=1)
    node.args = (node.args[0], find(module, "silu_backward", "layers.0.feed_forward", "backward", chunk=0).args[1])


def gradient_of_chunk_1_forgotten(module: GraphModule) -> None:
    gradient = module.graph.output_node().args[0][1:][_TOTAL]  # type: ignore[index]
    assert gradient.target is aten.add.Tensor
    bypass(gradient, gradient.args[0])


_TOTAL = 5  # a parameter of the first layer


def up_projection_reads_the_gate(module: GraphModule) -> None:
    gate, up = (find(module, "_grouped_mm", "layers.1.moe.experts", chunk=0, turn=turn) for turn in (0, 1))
    up.args = (up.args[0], gate.args[1], *up.args[2:])


EXPERTS, FORWARD, BACKWARD = "layers.1.moe.experts", "forward", "backward"

DEFECTS = [
    Defect("other_activation", other_activation, EXPERTS, FORWARD, ("relu",)),
    Defect("other_epsilon", other_epsilon, "layers.0.ffn_norm", FORWARD, ("add",)),
    Defect("chunks_joined_in_reverse", chunks_joined_in_reverse, "layers.1", FORWARD, ("cat",)),
    Defect("second_half_is_the_first", second_half_is_the_first, "layers.0", FORWARD, ("slice",)),
    Defect("chunk_1_counts_no_tokens", chunk_1_counts_no_tokens, "layers.1.moe", FORWARD, ("add_",)),
    Defect("rows_arrive_in_reverse_on_one_rank", rows_arrive_in_reverse_on_one_rank, EXPERTS, FORWARD, ("flip",)),
    Defect("reduced_gradient_rounded", reduced_gradient_rounded, "layers.1.attention.wo", BACKWARD, ("_to_copy",)),
    Defect("weights_of_experts_rounded", weights_of_experts_rounded, "layers.1.moe.router", FORWARD, ("_to_copy",)),
    Defect(
        "backward_reads_the_other_chunk",
        backward_reads_the_other_chunk,
        "layers.0.feed_forward",
        BACKWARD,
        ("silu_backward",),
    ),
    Defect("gradient_of_chunk_1_forgotten", gradient_of_chunk_1_forgotten, None, BACKWARD, ("add",)),
    Defect("up_projection_reads_the_gate", up_projection_reads_the_gate, EXPERTS, FORWARD, ("_grouped_mm",)),
    Defect("other_weight_decay", None, None, "update", ("_fused_adamw_",)),
]
"""`module` None is one that no module owns, or whose owner is not told apart."""
