"""Faults in layers that tensor-parallel ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import ASYNC_TENSOR, EXPERTS, Need, Site, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor

SPLIT = Need(lambda case: case.parallelism.tp > 1, "tensor parallelism")
PAIRS = Need(lambda case: case.parallelism.tp > 1 and case.parallelism.tp % 2 == 0, "an even number of tensor ranks")
WHOLE = Need(lambda case: not case.parallelism.sequence, "tensor ranks that each hold the whole sequence")
SEQUENCE = Need(lambda case: case.parallelism.sequence, "tensor ranks that divide the sequence")
LATENTS = Need(lambda case: case.model.family == "deepseek_v3", "latent attention")


def _not_summed(g: GraphEditor, at: str, direction: str) -> list[Site]:
    node = g.find("all_reduce", at, direction=direction, where=lambda node: node.args[-1] == "tp")
    wait = g.wait_of(node)
    sites = [*g.sites(node), *g.sites(wait), *g.readers(wait)]
    g.bypass(wait, node.args[0])
    # The launch had no reader but its wait.
    g.graph.erase_node(node)
    return sites


@row("TTrace's kind: a missing all-reduce", needs=(SPLIT, WHOLE))
def tensor_parts_not_summed(g: GraphEditor) -> list[Site]:
    """each tensor-parallel rank keeps its own partial output of a split layer, without the sum over ranks."""
    return _not_summed(g, r".*attention", "forward")


@row("TTrace's kind: a missing all-reduce in backward", needs=(SPLIT, WHOLE), kinds=("grad",))
def tensor_gradient_not_summed(g: GraphEditor) -> list[Site]:
    """each tensor-parallel rank keeps its own partial gradient of a split layer's input, without the sum over ranks."""
    return _not_summed(g, r".*attention", "backward")


def _scattered_not_summed(g: GraphEditor, at: str, direction: str) -> list[Site]:
    node = g.find("reduce_scatter_tensor", at, direction=direction, where=lambda node: node.args[-1] == "tp")
    wait = g.wait_of(node)
    sites = [*g.sites(node), *g.sites(wait), *g.sites(node, "slice", "clone"), *g.readers(wait)]
    # args[2:4] are the size and the group of the reduce-scatter.
    g.instead(wait, g.kernel("own_rows"), node.args[0], *node.args[2:4])
    g.graph.erase_node(node)
    return sites


@row("TTrace's kind: a split in place of a reduce-scatter", needs=(SPLIT, SEQUENCE))
def scattered_parts_not_summed(g: GraphEditor) -> list[Site]:
    """each tensor-parallel rank keeps its positions of its own partial output, without the sum over ranks."""
    return _scattered_not_summed(g, r".*attention", "forward")


@row("TTrace's kind: a split in place of a reduce-scatter, in backward", needs=(SPLIT, SEQUENCE), kinds=("grad",))
def scattered_gradient_not_summed(g: GraphEditor) -> list[Site]:
    """each tensor-parallel rank keeps its positions of its own partial gradient, without the sum over ranks."""
    return _scattered_not_summed(g, r".*attention", "backward")


@row("Megatron-LM's kind: a parameter that the sum over tensor ranks forgets", needs=(SPLIT, LATENTS), kinds=("grad",))
def whole_parameters_gradient_not_summed(g: GraphEditor) -> list[Site]:
    """the gradient of a replicated parameter includes only the attention heads of a single rank."""
    return _not_summed(g, r".*attention\.(wkv_a|kv_norm)", "backward")


@row("ours: a share by the wrong coordinate", needs=(PAIRS, EXPERTS))
def neighbours_share_of_the_tokens(g: GraphEditor) -> list[Site]:
    """a tensor-parallel rank sends its neighbour's share of the tokens to the experts, in place of its own."""
    node = g.find("index_select", r".*moe", where=g.is_floating)
    # Exchanges the coordinates 0 and 1, 2 and 3, and so on.
    g.before(node, node.args[2], "aten.bitwise_xor.Scalar", 1)
    return [*g.sites(node, "bitwise_xor"), *g.readers(node)]


@row("ours: a share by the wrong coordinate", needs=(PAIRS, EXPERTS))
def share_in_the_neighbours_place(g: GraphEditor) -> list[Site]:
    """the experts' results for a share of the tokens are added to the neighbour's tokens."""
    node = g.find("index_copy", r".*moe")
    g.before(node, node.args[2], "aten.bitwise_xor.Scalar", 1)
    return [*g.sites(node, "bitwise_xor"), *g.readers(node)]


@row("compile-on-one-rank's kind: a coordinate that tracing took for a constant", needs=(SPLIT, EXPERTS))
def baked_coordinate(g: GraphEditor) -> list[Site]:
    """the code of all ranks has rank 0's tensor-parallel coordinate as a constant."""
    # For every reader, in forward and backward, as if tracing had baked the constant.
    coordinate, own = g.find("index_select", r".*moe").args[2], g.rank % g.case.parallelism.tp
    # Listed before the edits, which add readers of the coordinate.
    readers = [node for node in coordinate.users if node.op == "call_function"]
    for node in readers:
        g.before(node, coordinate, "aten.full_like.default", own)
    return [site for node in readers for site in (*g.sites(node, "full_like"), *g.readers(node))]


@row("ours: a buffer for what is in flight, used for both chunks at a time", needs=(ASYNC_TENSOR,))
def tensor_collective_of_the_other_chunk(g: GraphEditor) -> list[Site]:
    """chunk 1 reads the values that chunk 0 gathered or summed over tensor-parallel ranks."""
    name = "all_gather_into_tensor" if g.case.parallelism.sequence else "all_reduce"
    wait = g.wait_of(g.find(name, chunk=1, where=lambda node: node.args[-1] == "tp"))
    sites = [*g.sites(wait), *g.sites(wait.all_input_nodes[0]), *g.readers(wait)]
    sites += [site for reader in wait.users for site in g.readers(reader)]
    g.bypass(wait, g.twin(wait))
    return sites
