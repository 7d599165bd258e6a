"""Decide for each activation whether it is saved, recomputed, or offloaded to host memory.

Needs:    every node has an origin and a `val`.
Promises: every activation (see saved_activations.py) has a tag; same bits.
Refuses:  an operator in `context.memory.save` that no block calls in forward.

1. If backward reads the size of a forward value, move this read to forward, so that only the number stays alive.
2. Tag the values that backward needs, by the first rule that applies:

       values outside every block                 saved: their backward follows at once, or they are single tensors
       random draws, in-place writes, readers of  saved: a repeat would return different values
         written tensors, sizes that depend on
         data
       unknown higher-order operators             saved: their effects are unknown
       values that another block reads            saved: they enter that block
       parts of a tuple, waits                    like their tuple, or the collective's result
       views                                      recomputed: that is free
       batched products larger than both factors  recomputed: explicit attention scores take much memory and
         together                                 little work (Korthikanti et al. 2022, arXiv:2205.05198)
       compute-heavy operators, collectives       saved with `selective` and `offload`, recomputed with `full`
       all others                                 recomputed

   If the case lists operators to save, the list decides for views and for everything below them in this table. For
   example, with ("mm/2",) the first, third, ... `mm` of a block is saved. The others are recomputed, as is attention.

3. If a recomputed value is smaller than the saved value that it is computed from, and nothing else needs the larger
   one, save the smaller value instead.
4. With `offload`, move saved values to host memory up to the budget: the largest first, and among equally large values
   the earliest first. Outputs stay on the device, as another pipeline stage reads them. If the graph has the loss, the
   values of the first block in backward stay, too, as they would return at once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.halves import set_half
from bitproof.harness.graph.analysis.saved_activations import (
    TAG_KEY,
    block_of,
    block_starts,
    calls_to_save,
    first_needs,
    is_backward,
    is_forward_value,
)
from bitproof.harness.graph.analysis.tensor_bytes import MIB, TensorBytes
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import META_KEY, origin_of
from bitproof.harness.operators import named
from bitproof.harness.step.storages import Storages
from bitproof.harness.torch_compat import HigherOrderOperator

GIB = 2**30


def tag_memory(module: GraphModule, context: PassContext, *, blocks: str) -> GraphModule:
    """Decide how each activation is kept for backward. `blocks` is a pattern of modules, such as layers.*."""
    _read_sizes_in_forward(module)
    _Tagger(module, context, blocks, _listed(module, context, blocks)).tag()
    return module


def _listed(module: GraphModule, context: PassContext, blocks: str) -> set[Node] | None:
    if context.memory.save is None:
        return None
    chosen = calls_to_save(module.graph, context.memory.save, blocks)
    if missing := [entry for entry, calls in chosen.items() if not calls]:
        raise PassError(
            f"memory.save lists an operator that no block calls in forward: {missing[0]}",
            expected="operators without namespace and overload, such as " + ", ".join(_heavy_names(module, blocks)),
            found=f"save={context.memory.save!r}",
            fix="leave it out, or list an operator of the blocks",
        )
    context.facts["listed"] = {entry: len(calls) for entry, calls in chosen.items()}
    return {node for calls in chosen.values() for node in calls}


def _heavy_names(module: GraphModule, blocks: str) -> list[str]:
    nodes = (node for node in module.graph.nodes if block_of(node, blocks) is not None and not is_backward(node))
    return sorted({operators.operator_name(node) for node in nodes if _is_heavy(node)})


def _is_heavy(node: Node) -> bool:
    return operators.is_compute_heavy(node) or operators.is_collective(node)


def _read_sizes_in_forward(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        source = node.args[0] if node.target is torch.ops.aten.sym_size.int else None
        if isinstance(source, Node) and is_backward(node) and is_forward_value(source):
            # Right behind the value, which may then be freed.
            source.append(node)
            node.meta[META_KEY] = origin_of(node)._replace(direction="forward")
            set_half(node, "forward")


class _Tagger:
    def __init__(self, module: GraphModule, context: PassContext, blocks: str, listed: set[Node] | None) -> None:
        self.graph = module.graph
        self.context = context
        self.blocks = blocks
        self.listed = listed
        self.saves_heavy = context.memory.policy != "full"
        self.bytes = TensorBytes(self.graph, context.chunk_symbol)
        self.storages = Storages(self.graph.nodes)
        owners = self.owners = self.storages.owners
        # `aliases`: all nodes with the storage of an owner. `border`: values that another block reads. `smaller`: see
        # rule 3.
        self.aliases: dict[Node, list[Node]] = {}
        self.border: set[Node] = set()
        self.smaller: set[Node] = set()
        # A value at the border of a block counts as saved with its whole storage, since a view may be what enters.
        for node in self.graph.nodes:
            self.aliases.setdefault(owners[node], []).append(node)
            if node.op == "call_function" and not is_backward(node):
                # Both the value that another block reads and, if it is a view, its base are saved.
                entering = [x for x in node.all_input_nodes if self._block(x) != self._block(node)]
                self.border.update(entering, self.storages.of(entering))

    def tag(self) -> None:
        # Step 3 comes first: saving a smaller value changes which others are needed.
        self.smaller = self._smaller_than_their_source()
        needs = first_needs(self.graph, self._is_recomputed)
        for node in needs:
            node.meta[TAG_KEY] = "recompute" if self._is_recomputed(node) else "save"
        if self.context.memory.policy == "offload":
            self._offload(needs)
        tags = [node.meta[TAG_KEY] for node in needs]
        self.context.facts.update({tag: tags.count(tag) for tag in ("save", "recompute", "offload")})

    def _block(self, node: Node) -> str | None:
        return block_of(node, self.blocks)

    def _size(self, node: Node) -> int:
        value = node.meta["val"]
        return (self.bytes.of(value) or 0) if isinstance(value, torch.Tensor) else 0

    def _is_recomputed(self, node: Node) -> bool:
        # The table at the top; the first rule that applies counts.
        if self._block(node) is None or not self._can_run_twice(node) or node in self.border or node in self.smaller:
            return False
        if node.target is operator.getitem or operators.is_wait(node):
            return self._is_recomputed(node.all_input_nodes[0])
        if self.listed is not None:
            return node not in self.listed
        return self.storages.is_view(node) or not (_is_heavy(node) and self.saves_heavy) or self._is_scores(node)

    def _is_scores(self, node: Node) -> bool:
        factors = sum(map(self._size, node.all_input_nodes))
        return named(operators.operator_name(node)).is_batched and self._size(node) > factors

    def _can_run_twice(self, node: Node) -> bool:
        # Attention has no effects; those of other higher-order operators are unknown.
        if isinstance(node.target, HigherOrderOperator):
            return operators.attends(node)
        touched = self.storages.of((node, *node.all_input_nodes))
        is_written = not touched.isdisjoint(self.storages.writers)
        return not (is_written or operators.is_random(node) or operators.reads_data(node.target))

    def _smaller_than_their_source(self) -> set[Node]:
        """Return the values that step 3 at the top of this file saves instead of recomputing them.

        Each is smaller than the saved value from which it is computed, and nothing else needs the larger value.
        """
        needs = first_needs(self.graph, self._is_recomputed)
        found = set()
        for source in needs:
            if self._block(source) is None or self._is_recomputed(source) or source in self.border:
                continue
            aliases = self.aliases[self.owners[source]]
            # Views of the larger value count as the value itself: what matters is who reads any of them.
            readers = {user for x in aliases for user in x.users if user not in aliases}
            needed = [user for user in readers if user in needs or is_backward(user)]
            if len(needed) == 1 and needed[0] in needs and 0 < self._size(needed[0]) < self._size(source):
                found.add(needed[0])
        return found

    def _offload(self, needs: dict[Node, Node]) -> None:
        place = {node: index for index, node in enumerate(self.graph.nodes)}
        # Only with the loss in this graph does the first block's backward follow its own forward directly: its values
        # would leave and return at once, so only values that are needed later are candidates.
        outputs: Any = self.graph.output_node().args[0]
        starts = block_starts(self.graph, self.blocks, is_backward)
        # With the loss, backward of the last block follows its forward at once. A pipeline stage without the loss runs
        # other micro-batches in between.
        start = starts[1:2] if isinstance(outputs[0], Node) else starts[:1]
        candidates = [
            node
            for node, reader in needs.items()
            if start
            and place[reader] >= place[start[0]]
            and self._leaves_when_copied(node)
            and self.graph.output_node() not in node.users
        ]
        budget = self.context.memory.offload_gib * GIB
        moved = 0
        # A value that exceeds the rest of the budget is passed over, and a smaller one may still fit.
        for node in sorted(candidates, key=lambda node: (-self._size(node), place[node])):
            if moved + self._size(node) <= budget:
                moved += self._size(node)
                node.meta[TAG_KEY] = "offload"
        self.context.facts["offload_mib"] = round(moved / MIB, 3)

    def _leaves_when_copied(self, node: Node) -> bool:
        """Whether copying a saved value to host memory frees its storage.

        It does if the value covers the whole storage, and no other saved value keeps the storage alive.
        """
        owner = self.owners[node]
        is_part = node.target is operator.getitem and node.args[0] is owner
        is_whole = node is owner or is_part or operators.is_wait(node)
        saved = [x for x in self.aliases[owner] if x.meta.get(TAG_KEY) == "save"]
        # Other items of the same tuple have the same owner, but storages of their own.
        keepers = [x for x in saved if not (is_part and x.args[0] is owner and x.args[1] != node.args[1])]
        return is_whole and keepers == [node] and self._size(node) > 0
