"""Recompute in backward the activations tagged `recompute`.

Needs:    every activation has a tag (tag_memory).
Promises: same bits: each repeated call has its original inputs. Backward reads no activation tagged
          `recompute`, so each such activation is freed after its last use in forward.
Refuses:  nothing: calls that must not run twice are never tagged.

1. Find the backward call that first needs each activation.
2. Just before that call, repeat the calls that compute the activation, in forward's order and once for all readers.
3. Let backward read the new values.

For example, a block's recomputation starts with the block's backward, and continues as values are needed. A repeated
call keeps the origin of the forward call; its metadata and its name mark it as recomputed.
"""

from __future__ import annotations

from torch.fx import GraphModule

from bitproof.harness.graph.analysis.halves import set_half
from bitproof.harness.graph.analysis.saved_activations import (
    STANDS_FOR_KEY,
    TAG_KEY,
    first_needs,
    is_backward,
    is_recomputed,
)
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import RECOMPUTED_KEY
from bitproof.harness.torch_compat import rename


def rematerialize(module: GraphModule, context: PassContext) -> GraphModule:
    graph = module.graph
    # 1. The backward call that first needs each activation.
    needs = first_needs(graph, is_recomputed)
    repeated = [node for node in graph.nodes if node in needs and is_recomputed(node)]
    # Listed before copies are inserted: a copy reads stand-ins from the start.
    readers = list(filter(is_backward, graph.nodes))
    by_name = {node.name: node for node in graph.nodes}
    # Offloaded activations have a copy in backward already. A repeated call must read that copy, or the original would
    # stay alive until the repeated call.
    stand_ins = {by_name[n.meta[STANDS_FOR_KEY]]: n for n in graph.nodes if STANDS_FOR_KEY in n.meta}
    # 2. Copies, in forward's order: a copy reads the copies before it.
    for node in repeated:
        with graph.inserting_before(needs[node]):
            copy = graph.node_copy(node, lambda x: stand_ins.get(x, x))
        rename(copy, f"{node.name}_recomputed")
        copy.meta = {key: value for key, value in node.meta.items() if key != TAG_KEY} | {RECOMPUTED_KEY: True}
        set_half(copy, "backward")
        stand_ins[node] = copy
    # 3. Backward reads the copies.
    for reader in readers:
        for node in reader.all_input_nodes:
            if node in stand_ins:
                reader.replace_input_with(node, stand_ins[node])
    context.facts["recomputed_nodes"] = len(repeated)
    module.recompile()
    return module
