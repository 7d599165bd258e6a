"""Proves that the steps of a case's two systems compute equal bits.

Both steps are traced without starting ranks, and the candidate's passes run on its graph. Then the two graphs are
proved equal (`pairs.py`), and computed on the case's own tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import PREPARED, Case
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.proofs.prover.answers import BUFFER, INPUT, PROVED, REFUSED
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.pairs import (
    MOST_ELEMENTS,
    MOST_RANKS,
    PairProof,
    Provable,
    prove_programs,
    refusal_text,
)
from bitproof.harness.powers.proofs.prover.precompiled import precompiled_step
from bitproof.harness.powers.proofs.prover.reference import Reference, graph_of, of_the_reference, reference_of
from bitproof.harness.powers.proofs.prover.terms import Rule
from bitproof.harness.powers.proofs.prover.whole_step import UpdateProof, prove_update
from bitproof.harness.systems.graph_key import placed_case
from bitproof.harness.systems.step_graphs import read_inputs

KNOWN_SYSTEMS = ("eager", "eager_chunked", *PREPARED)


@dataclass(frozen=True)
class CaseProof(PairProof):
    """The proof that the two steps of a case compute equal bits.

    `update` is the proof of the optimizer's update after the steps. None if this proof was not requested, or if the
    steps are not PROVED.
    """

    case: Case = field(kw_only=True)
    update: UpdateProof | None = field(default=None, kw_only=True)


NOT_TRIED = "NOT TRIED"


def why_not(case: Case) -> str | None:
    """Return why a case cannot be proved at all, such as a compiled candidate; None if a proof can be tried."""
    for system in (case.reference, case.candidate):
        if system not in KNOWN_SYSTEMS:
            return f"system {system} is not known as a graph"
    if case.pipeline.compiles:
        return (
            f"backend {case.pipeline.backend} compiles the graph into code that is not read; "
            "--until concretize_symbols proves the graph that it is given"
        )
    return None


@gc_paused()
def prove_case(
    case: Case,
    options: GraphOptions | None = None,
    *,
    device: torch.device | None = None,
    precompiled: Path | None = None,
    evaluate: bool = True,
    follow: bool = False,
    rules: dict[str, list[Rule]] | None = None,
    in_turn: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> CaseProof:
    """Prove that the two steps of a case compute equal bits.

    - `options`: options for the candidate's graph, such as added passes.
    - `device`: the device of the tensors, by default the CPU.
    - `precompiled`: the folder of a precompiled step to use as the candidate.
    - `evaluate`: also compute both graphs on values.
    - `follow`: if the step is PROVED, also prove the optimizer's update after it.
    - `rules`: rules to use instead of RULES, for tests.
    - `in_turn`: trace both graphs in this process, one after the other. If False, another process may trace a large
      reference at the same time.
    - `clock`: measures the `seconds` of the result.

    If `why_not` returns a reason, the case is NOT TRIED. Unsupported calls do not raise: they are REFUSED. Raises the
    errors of tracing and passes, and ArtifactError. Afterwards, this process has the determinism switches of a run.
    """
    if (reason := why_not(case)) is not None:
        return CaseProof(NOT_TRIED, reason=reason, case=case)
    # Before tracing: torch chooses operators by these switches.
    set_determinism(case.seed)
    case = placed_case(case)
    device = device or torch.device("cpu")
    laps = _Laps(clock)
    with reference_of(of_the_reference(case), device, in_turn=in_turn) as traced:
        laps.lap("reference")
        if precompiled is None:
            candidate, candidate_groups = graph_of(case, case.candidate, device, options or GraphOptions())
        else:
            candidate, candidate_groups = precompiled_step(case, case.candidate, device, precompiled)
        laps.lap("candidate")
        reference = traced()
    # With a forked process, this is only the time that the candidate's trace did not cover.
    if not in_turn:
        laps.lap("rest of the reference")
    try:
        _check_alike(reference, candidate)
        other = Provable(candidate.module, reference.names, reference.inputs, reference.outputs, candidate_groups)
        # A function, since values are only needed after the proof.
        sets = functools.partial(_sets_of_inputs, case, reference) if evaluate else None
        for module, _ in [(x.module, x.graph) for x in (reference.program, other)]:
            forget_values(module)  # both graphs are data by now
        found = prove_programs(reference.program, other, sets, rules=rules, lap=laps.lap)
    except RefusedError as error:
        return CaseProof(REFUSED, reason=refusal_text(error), seconds=laps.all(), case=case)
    update = None
    # The update reads the gradients of the step, so these must be equal first.
    if follow and found.verdict == PROVED:
        update = prove_update(case, found, (reference.groups, candidate_groups), device)
        laps.lap("update")
    return CaseProof(**vars(replace(found, seconds=laps.all())), case=case, update=update)


def forget_values(module: GraphModule | None) -> None:
    # Fake values take half of a graph's memory.
    for node in module.graph.nodes if module is not None else ():
        if node.op != "placeholder":
            node.meta.pop("val", None)


def _check_alike(reference: Reference, candidate: StepGraph) -> None:
    sides = [(g.parameter_names, g.buffer_names, g.num_inputs) for g in (reference, candidate)]
    # A graph from a file has no fake values: `given` then consists of None, and its layouts are not compared.
    given = [node.meta.get("val") for node in candidate.module.graph.find_nodes(op="placeholder")]
    num_kept = len(reference.parameter_names) + len(reference.buffer_names)
    if sides[0] != sides[1] or not _have_equal_layouts(reference.inputs[:num_kept], given[:num_kept]):
        raise RefusedError("the two systems' models have other parameters, buffers or inputs", where="both graphs")


def _have_equal_layouts(*sides: Sequence[Any]) -> bool:
    pairs = ((x, y) for x, y in zip(*sides, strict=False) if isinstance(x, Tensor) and isinstance(y, Tensor))
    return all((x.dtype, x.device, x.shape, x.stride()) == (y.dtype, y.device, y.shape, y.stride()) for x, y in pairs)


def _sets_of_inputs(case: Case, reference: Reference) -> list[list[list[Tensor]]]:
    world_size = case.parallelism.world_size
    if sum(x.numel() for x in reference.inputs) > MOST_ELEMENTS or world_size > MOST_RANKS:
        return [[reference.inputs] * world_size]  # `evaluated` takes the reason from their number and sizes
    return [random_inputs(case, reference.names, reference.inputs)]


def random_inputs(case: Case, names: Sequence[str], like: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return values for a graph's inputs `names`, as a list for each rank.

    Parameters and buffers are small random numbers, integer buffers are zeros, and other inputs are the case's own
    tokens. Parameters differ between ranks, buffers do not.
    """
    read = [list(step.values()) for step in read_inputs(case, 0)]
    ranks = []
    for rank in range(case.parallelism.world_size):
        values = []
        for place, (name, x) in enumerate(zip(names, like, strict=True)):
            # Ranks hold different shards of parameters, so these differ between ranks.
            seed = place if name.startswith(BUFFER) else place + len(names) * (1 + rank)
            generator = torch.Generator().manual_seed(seed)
            if name.startswith(INPUT):
                value = read[rank][int(name.removeprefix(INPUT))]
            elif x.is_floating_point():
                value = (torch.randn(tuple(x.shape), generator=generator) * 0.05).to(x.dtype)
            else:
                value = torch.zeros(tuple(x.shape), dtype=x.dtype)
            values.append(torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype).copy_(value))
        ranks.append(values)
    return ranks


class _Laps:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = self._clock()
        self._laps.append((name, now - self._start))
        self._start = now

    def all(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)
