"""Run the forward and backward of chosen modules in two chunks.

Needs:    every node has an origin and a `val`; `context.chunk_symbol` is the chunked dim's symbol.
Promises: the bits of the eager chunked reference; no value's size has the symbol any more.
Refuses:  other collectives than those of experts, of a tensor group, and reductions of gradients; all collectives over
          ranks that divide the chunked dim; views with a baked constant; an output of a chosen module that is needed
          whole but cannot be joined; sequence chunks through attention; a module that mixes rows of different chunks,
          or that calls a higher-order operator such as `cond`, whose nested graphs are not split (see mixing.py);
          in-place writes to a value that is also split or joined; a parameter with two uses; a pattern that matches
          nothing; a chosen module that did not run, that has calls without chunks, or that runs within another.

For example, `y = moe(x)` becomes x0, x1 = split(x); y0 = moe(x0); y1 = moe(x1); y = cat(y0, y1).

The pass reads the graph like an interpreter, and writes a new graph. A value is either a node of the new graph or a
pair of nodes, for chunk 0 and chunk 1:

1. A node of a chosen module that reads a pair, or a size with the symbol, is written once per chunk: a pair. An input
   that is no pair is split at its first use if its shape has the symbol. Otherwise both chunks read it whole.
2. Every other node is written once. A pair that it reads is joined at its first use. The chunks of a parameter's
   gradient are added (chunk 0 + chunk 1); the chunks of any other value are concatenated along the chunked dim.
3. Autograd's own gradient additions belong to no module. They are written once per chunk if both operands are pairs.
   The sum over a parameter's two uses is refused, as chunks would change the order of its additions.
4. Sizes are no values: a size that depends on the symbol becomes a number at each use. The number is computed with the
   whole extent or half of it.
5. Chunk 0 of a module runs before chunk 1, which is written only when something needs it. So buffer writes and random
   draws happen in chunk order, as in eager.
6. A chosen module may write a tensor in place, so that the tensor changes during the step. Its readers in the module
   run once per chunk, and readers elsewhere run after both chunks.
7. The collectives of a module run once per chunk, in chunk order on every rank, like any other node that reads a pair.
   They are the experts' all-to-alls and a tensor group's sums, gathers and scatters.
8. In a pipeline stage, calls state their half (forward or backward). Chunk 1 of forward is then written before backward
   begins, and values for other stages are joined.

With early gradient accumulation, the nodes from a gradient to its output (cast, reduce-scatter, wait) belong to no
module. So rule 2 adds the chunks before them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.errors import ChunkError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.analysis.mixing import refuse_mixing
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import Origin, calls_of, origin_of
from bitproof.harness.graph.passes.chunk import refusals
from bitproof.harness.graph.passes.chunk.gradients import gradient_outputs, reduction_tail
from bitproof.harness.graph.passes.chunk.regions import regions_of
from bitproof.harness.graph.writer import GraphWriter
from bitproof.harness.step.storages import Storages

log = logging.getLogger(__name__)
aten = torch.ops.aten


@dataclass
class Pair:
    """A value of the chosen module `root`, with a node for each chunk. `second` is None until chunk 1 is written."""

    root: str
    first: Node
    second: Node | None = None


def chunk(module: GraphModule, context: PassContext) -> GraphModule:
    assert context.chunking is not None
    refusals.refuse_idle_modules(context.chunking, context.module_calls)
    chunker = _Chunker(module, context)
    written = chunker.run()
    context.facts["modules"] = list(dict.fromkeys(filter(None, chunker.roots.values())))
    context.facts["calls"] = {name: len(calls) for name, calls in chunker.calls.items()}
    return written


class _Chunker:
    def __init__(self, module: GraphModule, context: PassContext) -> None:
        assert context.chunking is not None
        self.chunking = context.chunking
        self.chunk_groups = context.chunk_groups
        self.symbol = context.chunk_symbol.symbol
        self.whole = context.chunk_symbol.hint
        self.half = self.whole // 2
        self.graph = module.graph
        self.writer = GraphWriter(module, self.symbol, self.whole)
        # `env` maps a node to its new node or pair. `joined` and `split` have the other form of values that are read in
        # both. `held_back` has the nodes whose chunk 1 is not written yet; all belong to the module `running`.
        self.env: dict[Node, Node | Pair] = {}
        self.joined: dict[Node, Node] = {}
        self.split: dict[Node, tuple[Node, Node]] = {}
        self.held_back: list[Node] = []
        self.running: str | None = None
        self.module_calls = {
            name: calls for name, calls in context.module_calls.items() if self.chunking.root_of(name) == name
        }
        """The traced step's number of calls of each chosen module."""
        self.calls: dict[str, set[int]] = {}
        """The calls of each chosen module that are written in chunks."""
        self.roots = {node: self._root_of_module(node) for node in self.graph.nodes}
        storages = Storages(self.graph.nodes)
        self.owners = storages.owners
        # The storages that chosen modules write in place, such as token counts.
        self.mutated = {
            owner for owner, writers in storages.writers.items() if any(self.roots[node] for node in writers)
        }
        self.readers = {
            owner: [node for node in self.graph.nodes if owner in storages.of(node.all_input_nodes)]
            for owner in self.mutated
        }
        # With early accumulation, `gradients` has the values that are added before their reduction.
        self.outputs = frozenset(gradient_outputs(self.graph.output_node()))
        self.gradients = set(self.outputs)
        self.reductions: set[Node] = set()
        self._find_reductions()

    def run(self) -> GraphModule:
        if not any(self.roots.values()):
            raise refusals.refuse_no_match(self.chunking, self.graph.nodes)
        if missing := set(self.chunking.only) - set(self.roots.values()):
            raise ChunkError(
                f"{', '.join(sorted(missing))} cannot be chunked, as no such module ran",
                expected=f"modules of the graph that {self.chunking.modules} matches",
                found=f"only={self.chunking.only}",
                fix="correct `only` in the case's Chunking",
            )
        for region in regions_of(self.roots) if log.isEnabledFor(logging.DEBUG) else ():
            log.debug("matched %s", region)
        self._refuse_before_writing()
        for node in self.graph.nodes:
            self._write(node)
        refusals.refuse_whole_calls(self.module_calls, self.calls)
        log.debug("chunked: %d values once a chunk, %d split, %d joined", *self._counts())
        return self.writer.module()

    def _refuse_before_writing(self) -> None:
        # Before anything is written: a call that mixes rows may not even run on half of them.
        for node in self.graph.nodes:
            if self.roots[node] and any(symbols.carries(x.meta.get("val"), self.symbol) for x in node.all_input_nodes):
                refusals.refuse_attention_over_sequence(node, self.chunking.dim)
        # Attention is refused first, since its message is more specific.
        refuse_mixing(self.graph.nodes, self.roots, self.symbol, self.chunking.dim)

    # -- what a node is -------------------------------------------------------------------------

    def _root_of_module(self, node: Node) -> str | None:
        module = origin_of(node).module
        return self.chunking.root_of(module) if module and node.op == "call_function" else None

    def _find_reductions(self) -> None:
        """Find the nodes that reduce gradients over ranks.

        With early gradient accumulation, these nodes no longer belong to their modules, so they run once for both
        chunks.
        """
        for gradient in self.gradients:
            tail = reduction_tail(gradient)
            self.reductions.update(tail)
            if self.chunking.early_grad_accumulation and tail:
                self.gradients = (self.gradients - {gradient}) | {tail[-1].all_input_nodes[0]}
                self.roots.update(dict.fromkeys(tail))

    def _root_of_chunks(self, node: Node) -> str | None:
        """Return the chosen module for which the new graph has this node once per chunk; None if it has it once."""
        root = self.roots[node]
        if root is None:
            return self._root_of_gradient_addition(node)
        inputs = node.all_input_nodes
        # A random draw has new values in each chunk, and a written tensor another state, even from whole inputs.
        differs = (
            operators.is_random(node)
            or self._touches_mutated(node)
            or any(isinstance(self.env.get(x), Pair) or symbols.carries(x.meta.get("val"), self.symbol) for x in inputs)
        )
        return root if differs else None

    def _touches_mutated(self, node: Node) -> bool:
        return bool(self.mutated) and any(self.owners[x] in self.mutated for x in (node, *node.all_input_nodes))

    def _root_of_gradient_addition(self, node: Node) -> str | None:
        """Return the chosen module in which autograd's addition of two gradients is written once per chunk.

        None if the addition is written once, or if the node is no such addition.

        - If the sum's shape has the chunk symbol, it is written once per chunk if both operands are pairs or already
          split.
        - Any other sum of pairs adds the gradients of two uses of a parameter. Raises ChunkError if the uses are in two
          modules, or if the sum is the parameter's whole gradient.
        """
        if node.target is not aten.add.Tensor or origin_of(node) != Origin(None, "backward"):
            return None
        operands = node.all_input_nodes
        roots = [pair.root for x in operands if isinstance(pair := self.env.get(x), Pair)]
        if symbols.carries(node.meta["val"], self.symbol):
            is_chunked = all(isinstance(self.env.get(x), Pair) or x in self.split for x in operands)
            return roots[0] if roots and is_chunked else None
        # For uses a and b of a parameter, eager computes ((b1 + a1) + b0) + a0 in one module and ((b1 + b0) + a1) + a0
        # in two. Adding chunk by chunk equals neither.
        if roots and (len(roots) < len(operands) or len(set(roots)) > 1 or node in self.outputs):
            raise refusals.refuse_second_use(node)
        return roots[0] if roots else None

    # -- writing --------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        if self.writer.half != (half := node.meta.get(HALF_KEY, self.writer.half)):
            self._end_half()
            self.writer.half = half
        if node.op == "placeholder":
            self.env[node] = self.writer.placeholder(node)
        elif node.op == "output":
            self._write_held_back()
            self.writer.output(node, map_arg(node.args, self._whole))
        elif symbols.is_scalar_of(node.meta.get("val"), self.symbol) or node.op == "get_attr":
            # It becomes a number, or the extent of its reader, at each use.
            pass
        elif (root := self._root_of_chunks(node)) is not None:
            self._write_once_a_chunk(node, root)
        else:
            # In eager, both chunks have run before this draw or this access to a written tensor.
            if operators.is_random(node) or self._touches_mutated(node):
                self._write_held_back()
            self._check_writes(node, None)
            args, kwargs = map_arg(node.args, self._whole), map_arg(node.kwargs, self._whole)
            self.env[node] = self.writer.call(node, args, kwargs)

    def _end_half(self) -> None:
        self._write_held_back()
        # Before backward begins: other pipeline stages get forward's outputs then.
        for node in self.graph.output_node().all_input_nodes:
            if isinstance(pair := self.env.get(node), Pair):
                self._join(node, pair)

    def _write_once_a_chunk(self, node: Node, root: str) -> None:
        refusals.refuse_divided_dim(node, root, self.symbol, self.whole)
        refusals.refuse_foreign_collective(node, self.reductions, self.chunk_groups)
        refusals.refuse_baked_view(node, self.symbol)
        self._check_writes(node, root)
        self._note_call(node, root)
        # Another module begins: chunk 1 of the previous module comes before it, as in eager.
        if self.running != root:
            self._write_held_back()
            self.running = root
        self.env[node] = Pair(root, self._write_chunk(node, root, 0))
        self.held_back.append(node)

    def _note_call(self, node: Node, root: str) -> None:
        chosen = [call for call in calls_of(node) if call.module in self.module_calls]
        if len(chosen) > 1:
            raise refusals.refuse_nested_calls(node, chosen)
        self.calls.setdefault(root, set()).update(call.earlier for call in chosen)

    def _check_writes(self, node: Node, root: str | None) -> None:
        """Raise ChunkError if a node writes a value in place that is also split or joined, or that is in chunks of
        another module than `root`, or that chunk 1 of the same call has read already."""
        for written in operators.written_arguments(node):
            owner = self.owners[written]
            stored = self.env.get(owner)
            has_copies = any(self.owners[x] is owner for x in (*self.split, *self.joined))
            if isinstance(stored, Pair):
                is_at_home = stored.root == root
            else:
                is_at_home = root is None or not symbols.carries(owner.meta["val"], self.symbol)
            if has_copies or not is_at_home:
                refusals.refuse_write(node, written)
            for reader in self.readers.get(owner, ()) if root else ():
                pair = self.env.get(reader)
                if isinstance(pair, Pair) and pair.second is not None and calls_of(reader) == calls_of(node):
                    refusals.refuse_early_read(node, reader)

    def _write_chunk(self, node: Node, root: str, index: int) -> Node:
        def part(x: Node) -> Any:
            return self._part(x, root, index, node)

        args, kwargs = map_arg(node.args, part), map_arg(node.kwargs, part)
        target = aten.reshape.default if _needs_reshape(node, args) else node.target
        return self.writer.call(node, args, kwargs, chunk=index, target=target)

    def _write_held_back(self) -> None:
        # Chunk 1 of all values that only have chunk 0 so far.
        # Emptied first, since writing chunk 1 may join a value and so call this method again.
        nodes, self.held_back = self.held_back, []
        for node in nodes:
            pair = self.env[node]
            assert isinstance(pair, Pair)
            pair.second = self._write_chunk(node, pair.root, 1)
            if node in self.gradients:
                # Join immediately, so that neither half stays alive to the end.
                self._join(node, pair)
        self.running = None

    # -- reading --------------------------------------------------------------------------------

    def _whole(self, node: Node) -> Any:
        """Return the argument `node` for a reader that is written once: a size's number, or a whole value's node."""
        value = node.meta.get("val")
        if symbols.is_scalar_of(value, self.symbol):
            return symbols.number_of(node, self.symbol, self.whole)
        if node.op == "get_attr":
            return self.writer.get_attr(node, self.whole)
        stored = self.env[node]
        return stored if isinstance(stored, Node) else self._join(node, stored)

    def _part(self, node: Node, root: str, index: int, reader: Node) -> Any:
        """Return the argument for chunk `index` of `reader`, which belongs to the module `root` and reads `node`.

        - If `node` is a size: a number.
        - If `node` is a pair, or its shape has the chunk symbol: its chunk.
        - Otherwise: its whole value.
        """
        value = node.meta.get("val")
        if symbols.is_scalar_of(value, self.symbol):
            return symbols.number_of(node, self.symbol, self.half)
        if node.op == "get_attr":
            return self.writer.get_attr(node, self.half)
        stored = self.env[node]
        if isinstance(stored, Pair):
            # Another module's chunks: eager concatenates them and splits the whole again.
            if stored.root != root and not self._is_laid_out_as_half(node, stored):
                whole = self._join(node, stored)
                return self._split(node, whole, reader)[index] if symbols.carries(value, self.symbol) else whole
            part = (stored.first, stored.second)[index]
            assert part is not None, f"{reader.name} reads chunk {index} of {node.name} before it is written"
            return part
        return self._split(node, stored, reader)[index] if symbols.carries(value, self.symbol) else stored

    def _is_laid_out_as_half(self, node: Node, pair: Pair) -> bool:
        """Whether a module can read `pair`, the chunks of `node` in another module, without joining and splitting them
        again.

        Eager joins and splits them, so its halves must have the same strides as the chunks.
        """
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not symbols.carries(value, self.symbol):
            return False
        dim = symbols.require_chunk_dim(node, value, self.symbol, "hand from module to module")
        # Eager splits a gradient by views: along dim 0 a half is contiguous, along any other dim it has the whole's
        # strides.
        is_forward = origin_of(node).direction == "forward"
        return pair.first.meta["val"].is_contiguous() and (is_forward or dim == 0)

    def _split(self, node: Node, whole: Node, reader: Node) -> tuple[Node, Node]:
        """Return the two halves of a whole value. They are written at the first use, with the strides that eager has.

        The halves of a module's input are contiguous; those of a gradient are views.
        """
        if node not in self.split:
            dim = symbols.require_chunk_dim(node, node.meta["val"], self.symbol, "split live-in")
            first, second = (self._half(node, whole, dim, index, origin_of(reader)) for index in (0, 1))
            self.split[node] = first, second
            log.debug("split live-in %s along dim %d", node.name, dim)
        return self.split[node]

    def _half(self, node: Node, whole: Node, dim: int, index: int, origin: Origin) -> Node:
        bounds = (dim, index * self.half, (index + 1) * self.half)
        write = partial(self.writer.call, node, chunk=index, origin=origin)
        # A slice is a view, as the halves are in eager.
        half = write((whole, *bounds), {}, target=aten.slice.Tensor)
        if half.meta["val"].is_contiguous() or origin_of(node).direction == "backward":
            return half
        return write((half,), {"memory_format": torch.contiguous_format}, target=aten.clone.default)

    def _join(self, node: Node, pair: Pair) -> Node:
        """Return the node of a pair's whole value, which is written at the first use.

        The whole value is the concatenation of the chunks, or their sum if they are a gradient. If both chunks write a
        buffer in place, it is the node of chunk 1.
        """
        if pair.second is None:
            self._write_held_back()
        owner = self.owners[node]
        if owner in self.mutated and isinstance(self.env.get(owner), Node):
            assert pair.second is not None
            # A buffer: one storage, written by both chunks already.
            return pair.second
        # Writing chunk 1 may have joined this gradient.
        if node not in self.joined:
            self.joined[node] = self._write_join(node, pair)
        return self.joined[node]

    def _write_join(self, node: Node, pair: Pair) -> Node:
        value = node.meta.get("val")
        assert pair.second is not None
        if isinstance(value, Tensor) and symbols.carries(value, self.symbol):
            dim = symbols.require_chunk_dim(node, value, self.symbol, "concatenate live-out")
            log.debug("concatenate live-out %s along dim %d", node.name, dim)
            args: tuple[Any, ...] = ([pair.first, pair.second], dim)
            return self.writer.call(node, args, {}, target=aten.cat.default)
        if node in self.gradients and isinstance(value, Tensor) and value.is_floating_point():
            log.debug("add gradient %s", node.name)
            args = (pair.first, pair.second)
            return self.writer.call(node, args, {}, target=aten.add.Tensor)
        raise refusals.refuse_join(node, value)

    def _counts(self) -> tuple[int, int, int]:
        return sum(isinstance(value, Pair) for value in self.env.values()), len(self.split), len(self.joined)


def _needs_reshape(node: Node, args: Any) -> bool:
    """Whether a view in backward must become a reshape.

    Autograd reshapes gradients. If the whole gradient is contiguous, the trace records this as a view. The gradient of
    a chunk may not be contiguous, and then a view would fail.
    """
    is_gradient_view = node.target is aten.view.default and origin_of(node).direction == "backward"
    return is_gradient_view and not args[0].meta["val"].is_contiguous()
