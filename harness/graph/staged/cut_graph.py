"""Cuts the finished graph of a micro-batch into stages, and each stage into forward and backward.

Needs:    a graph whose calls state their origin, with forward's calls before backward's; layers that are named
          layers.N.
Promises: every call is in a single part, and the calls of a part keep their order. Run in sequence, the parts
          compute the same as the graph.
Refuses:  graphs that placed_calls.py refuses.

Numbers and views computed only from the graph's inputs are an exception: each part that reads them computes them.

1. Place calls in stages and halves (placed_calls.py).
2. Find the values between parts: activations to the next stage, gradients to the previous stage, and backward's inputs
   from its own stage's forward.
3. Write each part as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from bitproof.harness.graph.analysis.halves import Half, subgraph
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.placed_calls import (
    NOTHING_ONCE,
    ONCE_A_STEP,
    Apart,
    Crossing,
    Once,
    OnceAStep,
    PlacedCalls,
)
from bitproof.harness.graph.tracing.trace import ChunkSymbol


@dataclass(frozen=True)
class Part:
    """The graph of a stage's forward or backward. All names are those of nodes in the whole graph.

    - `inputs`, `outputs`: the names of all inputs and outputs, in their order.
    - `received`: the inputs from another stage.
    - `sent`: the outputs for another stage.
    - `results`: the outputs that are results of the step: the loss and gradients.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class CutGraph:
    """All parts of a graph, and the names of the whole graph's inputs, loss and gradients.

    - `by_place`: the parts by (stage, half).
    - `gradients`: for each parameter a dict: by stage, the name of the gradient that the stage computes.
    - `open_dim`: the chunk symbol and its size, for sizes that still contain the symbol.
    - `once`: the kinds of calls that run apart from forward and backward.
    - `once_parts`: the parts that run once a step, by (stage, "gathers" or "reductions").
    - `summed`: the names of the values that are added over micro-batches before they are reduced.
    - `weights`: by stage, the second part of a divided backward. The first part is in `by_place`.
    """

    by_place: dict[tuple[int, Half], Part]
    placeholders: tuple[str, ...]
    loss: str
    gradients: tuple[dict[int, str], ...]
    cuts: Cuts
    open_dim: ChunkSymbol
    once: Once = NOTHING_ONCE
    once_parts: dict[tuple[int, OnceAStep], Part] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    weights: dict[int, Part] = field(default_factory=dict)

    def of_other(self, module: GraphModule) -> CutGraph:
        """Cut another graph of the same step into the same stages. Raises PassError as `cut` does."""
        return cut(module, self.cuts, self.open_dim, self.once)


def cut(module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol, once: Once = NOTHING_ONCE) -> CutGraph:
    """Return the parts of a graph, without changing `module`. Raises PassError if placed_calls.py refuses it.

    `open_dim` is the chunk symbol and its size, for sizes that still contain the symbol. `once` states the kinds of
    calls that run apart from forward and backward.
    """
    placed = PlacedCalls(module, cuts, open_dim, once)
    halves: tuple[Half, ...] = ("forward", "backward")
    parts = {(stage, half): _part(placed, stage, half) for stage in range(cuts.num_stages) for half in halves}
    inputs = tuple(node.name for node in placed.inputs)
    gradients = tuple({stage: x.name for stage, x in each.items()} for each in placed.gradients.values())
    once_parts = {
        (stage, kind): part
        for stage in range(cuts.num_stages)
        for kind in ONCE_A_STEP
        if (part := _once_part(placed, stage, kind)).outputs
    }
    weights = {stage: _once_part(placed, stage, "weights") for stage in range(cuts.num_stages)} if once.weights else {}
    summed = frozenset(node.name for node in placed.summed)
    return CutGraph(parts, inputs, placed.results[0].name, gradients, cuts, open_dim, once, once_parts, summed, weights)


def _once_part(placed: PlacedCalls, stage: int, kind: Apart) -> Part:
    own = placed.own(stage, kind)
    given = placed.given(own)
    outputs = placed.gathered(stage) if kind == "gathers" else placed.results_of(own)
    names = tuple(node.name for node in outputs)
    return Part(
        module=subgraph(placed.module, given, placed.with_numbers(own), outputs),
        inputs=tuple(node.name for node in given),
        outputs=names,
        received=(),
        sent=(),
        results=names,
    )


def _part(placed: PlacedCalls, stage: int, half: Half) -> Part:
    """Write the graph of a stage's forward or backward, with the values that it exchanges.

    These are steps 2 and 3 at the top of this file.
    """
    own = placed.own(stage, half)
    given = placed.given(own)
    # Both parts of a divided backward read what arrives before the first.
    both = placed.given([*own, *placed.own(stage, "weights")]) if half == "backward" else given
    received, sent = placed.received(stage, half, both), placed.sent(own)
    results = [*placed.results_of(own), *(placed.kept_for_weights(stage) if half == "backward" else ())]
    # A value may be sent, be a result and be kept for backward. It is a single output.
    outputs = list(dict.fromkeys([*sent, *results, *(placed.kept(own) if half == "forward" else ())]))
    return Part(
        module=subgraph(placed.module, given, placed.with_numbers(own), outputs),
        inputs=tuple(node.name for node in given),
        outputs=tuple(node.name for node in outputs),
        received=tuple(map(placed.crossing, received)),
        sent=tuple(node.name for node in sent),
        results=tuple(node.name for node in placed.results_of(own)),
    )
