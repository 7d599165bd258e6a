"""One case, proved: its two systems' graphs, every output's answer, and the check that the answers mean something.

1. Take the reference's step and the candidate's finished graph, or a prefix of its column, traced once, with no ranks:
   groups come from the table that passes use.
2. Write both down as data, from fake values computed anew.
3. Compare them, output by output.
4. Compute every PROVED output's term on random inputs, and both graphs: an output with other bits is no proof, and is
   REFUSED in the loudest words. So is what the graphs did there and do not say: a call that fails, results that lie
   otherwise, an input that holds other bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import PRECOMPILED, PREPARED, Case
from bitproof.harness.certificate.data import Graph
from bitproof.harness.graph.collector import collector_paused
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.prove.answers import BUFFER, INPUT, PARAMETER, PROVED, REFUSED, OutputAnswer, Proof, prove_graphs
from bitproof.harness.prove.evaluate import Evaluator, NotEvaluatedError, run_graph, same_bits
from bitproof.harness.prove.graphs.export import RefusedError, export_graph
from bitproof.harness.prove.graphs.memory_layouts import Layouts
from bitproof.harness.prove.precompiled import precompiled_step
from bitproof.harness.prove.terms import Rule
from bitproof.harness.systems.autoplace import placed_case
from bitproof.harness.systems.graph import read_inputs, step_graph

MOST_ELEMENTS = 20_000_000
"""Elements of a step's parameters beyond which terms are not computed."""

MOST_RANKS = 16

OTHER_BITS = "its term, computed on random inputs, gives OTHER BITS than the graphs: a defect of bitproof"

KNOWN_SYSTEMS = ("eager", "eager_chunked", *PREPARED)


@dataclass(frozen=True)
class CaseProof:
    """What is known of a case. `proof` is None where it was refused as a whole, for `reason`, or not tried.

    `evaluated` counts the PROVED outputs whose terms were computed, and gave both graphs' bits; `not_evaluated` says
    why there are none.
    """

    case: Case
    verdict: str
    proof: Proof | None = None
    graphs: tuple[Graph, Graph] | None = None
    reason: str | None = None
    evaluated: int = 0
    not_evaluated: str | None = None
    seconds: tuple[tuple[str, float], ...] = field(default=())


NOT_TRIED = "NOT TRIED"


def why_not(case: Case) -> str | None:
    """Why a case cannot be proved at all, in words; None where it can be tried."""
    for system in (case.reference, case.candidate):
        if system not in KNOWN_SYSTEMS:
            return f"system {system} is not known as a graph"
    if case.pipeline.backend != "fx" and case.pipeline.until is None:
        return (
            f"backend {case.pipeline.backend} compiles the graph into code that is not read; "
            "--until concretize_symbols proves the graph that it is given"
        )
    return None


@collector_paused()
def prove_case(
    case: Case,
    options: GraphOptions | None = None,
    *,
    device: torch.device | None = None,
    precompiled: Path | None = None,
    evaluate: bool = True,
    rules: dict[str, list[Rule]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CaseProof:
    """Prove one case on tensors of `device`, by default the CPU; `options` bring passes into the candidate's graph.

    With `precompiled` the candidate is the step that this folder holds. `seconds` of what is returned are those of
    `clock`. This process is deterministic from then on, as a run's are: by that torch chooses operators.

    Raises what tracing and passes raise, and ArtifactError. What cannot be understood is part of the answer.
    """
    if (reason := why_not(case)) is not None:
        return CaseProof(case, NOT_TRIED, reason=reason)
    set_determinism(case.seed)
    case = placed_case(case)
    device = device or torch.device("cpu")
    laps = _Laps(clock)
    reference = traced_reference(of_the_reference(case), device)
    laps.lap("reference")
    if precompiled is None:
        candidate, candidate_groups = _graph_of(case, case.candidate, device, options or GraphOptions())
    else:
        candidate, candidate_groups = precompiled_step(case, case.candidate, device, precompiled)
    laps.lap("candidate")
    try:
        _check_alike(reference.step, candidate)
        names, inputs = reference.names, reference.inputs
        exported = export_graph(candidate.module, names, inputs, reference.outputs, candidate_groups)
        graphs = reference.graph, exported
    except RefusedError as error:
        return CaseProof(case, REFUSED, reason=_told(error), seconds=laps.all())
    laps.lap("export")
    proof = prove_graphs(*graphs, rules=rules)
    laps.lap("compare")
    found = CaseProof(case, proof.verdict, proof, graphs)
    if evaluate:
        with _one_thread():
            run = (reference.step.module, reference.groups), (candidate.module, candidate_groups)
            found = _evaluated(found, run, names, inputs)
        laps.lap("evaluate")
    return replace(found, seconds=laps.all())


def of_the_reference(case: Case) -> Case:
    """The case without what its reference does not depend on, so that cases which share one share its trace."""
    kept = ("reference", "chunking", "model", "parallelism", "batch", "precision", "seed", "autoplace")
    return Case(name="reference", family="prove", **{name: getattr(case, name) for name in kept})


@dataclass(frozen=True)
class _Reference:
    """A reference's step, traced and as data. Nobody changes it."""

    step: StepGraph
    groups: GroupTable

    @functools.cached_property
    def inputs(self) -> list[Tensor]:
        """Its inputs on fake values."""
        return [node.meta["val"] for node in self.step.module.graph.find_nodes(op="placeholder")]

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of its inputs."""
        return [
            *(PARAMETER + name for name in self.step.parameter_names),
            *(BUFFER + name for name in self.step.buffer_names),
            *(f"{INPUT}{index}" for index in range(self.step.num_inputs)),
        ]

    @functools.cached_property
    def outputs(self) -> list[str]:
        """The names of what it returns."""
        return ["loss", *(f"gradient of {name}" for name in self.step.parameter_names)]

    @functools.cached_property
    def graph(self) -> Graph:
        """It as data. Raises RefusedError."""
        return export_graph(self.step.module, self.names, self.inputs, self.outputs, self.groups)


@functools.lru_cache(maxsize=6)
def traced_reference(case: Case, device: torch.device) -> _Reference:
    """A case's reference; whole steps are large, so few are kept."""
    return _Reference(*_graph_of(case, case.reference, device, GraphOptions()))


def _graph_of(case: Case, system: str, device: torch.device, options: GraphOptions) -> tuple[StepGraph, GroupTable]:
    """A system's step as it is known now, and the groups that it names."""
    return (
        precompiled_step(case, system, device) if system == PRECOMPILED else step_graph(case, system, device, options)
    )


def _check_alike(reference: StepGraph, candidate: StepGraph) -> None:
    sides = [(g.parameter_names, g.buffer_names, g.num_inputs) for g in (reference, candidate)]
    num_kept = len(reference.parameter_names) + len(reference.buffer_names)
    if sides[0] != sides[1] or not _lie_alike(num_kept, reference.module, candidate.module):
        raise RefusedError("the two systems' models have other parameters, buffers or inputs", where="both graphs")


def _lie_alike(num_kept: int, *modules: GraphModule) -> bool:
    """Whether parameters and buffers, the first inputs, were traced with equal layouts, as far as graphs say: one that
    was read from a file does not."""
    sides = [[x.meta.get("val") for x in module.graph.find_nodes(op="placeholder")[:num_kept]] for module in modules]
    pairs = ((x, y) for x, y in zip(*sides, strict=False) if isinstance(x, Tensor) and isinstance(y, Tensor))
    return all((x.dtype, x.device, x.shape, x.stride()) == (y.dtype, y.device, y.shape, y.stride()) for x, y in pairs)


def _evaluated(
    found: CaseProof, steps: Sequence[tuple[GraphModule, GroupTable]], names: Sequence[str], inputs: Sequence[Tensor]
) -> CaseProof:
    """Compute what was proved, and REFUSE each output whose term gives other bits than either graph."""
    assert found.proof is not None and found.graphs is not None
    if sum(x.numel() for x in inputs) > MOST_ELEMENTS:
        return replace(found, not_evaluated="the step is too large to be computed here")
    if any(x.device.type != "cpu" for x in inputs):
        return replace(found, not_evaluated="the step is not on the CPU")
    world_size = found.case.parallelism.world_size
    if world_size > MOST_RANKS:
        return replace(found, not_evaluated=f"{world_size} ranks are too many to be computed in one process")
    values = random_inputs(found.case, names, inputs)
    constants = [x for module, _ in steps for x in _constants(module)]
    before = [x.clone() for x in constants]
    try:
        runs = [
            run_graph(module, values, table.partitions(), watch=Layouts(graph))
            for (module, table), graph in zip(steps, found.graphs, strict=True)
        ]
    except NotEvaluatedError as error:
        return replace(found, not_evaluated=f"{error} is not computed here")
    except RefusedError as error:
        return _refused(found, error)
    if not all(map(same_bits, constants, before)):
        return _refused(found, RefusedError("a tensor of the graph itself holds other bits after a run", where="one"))
    evaluator = Evaluator(found.proof.table, [dict(zip(names, own, strict=True)) for own in values])
    outputs = [_by_name(graph, names, run) for graph, run in zip(found.graphs, runs, strict=True)]
    answers: list[OutputAnswer] = []
    num_evaluated, why = 0, None
    for answer in found.proof.answers:
        if answer.verdict == PROVED:
            try:
                value = evaluator(answer.terms[0])
            except NotEvaluatedError as error:
                why = f"{error} is not computed here"
            except Exception as error:
                answer = replace(answer, verdict=REFUSED, reason=f"its term cannot be computed: {error!r}")
            else:
                sides = [side[answer.output] for side in outputs]
                if all(same_bits(x, y) for side in sides for x, y in zip(value, side, strict=True)):
                    num_evaluated += 1
                else:
                    answer = replace(answer, verdict=REFUSED, reason=OTHER_BITS)
        answers.append(answer)
    answers += _written_untold(answers, names, values, [held for _, held in runs])
    proof = replace(found.proof, answers=tuple(answers))
    return replace(found, proof=proof, verdict=proof.verdict, evaluated=num_evaluated, not_evaluated=why)


def _refused(found: CaseProof, error: RefusedError) -> CaseProof:
    """A case whose graphs did something, when they ran, that a proof takes for impossible: nothing of it stands."""
    return replace(found, verdict=REFUSED, proof=None, graphs=None, reason=_told(error))


def _told(error: RefusedError) -> str:
    return f"{error.what}, in {error.where}"


def _constants(module: GraphModule) -> list[Tensor]:
    """The tensors that are part of a graph."""
    found = (
        functools.reduce(getattr, str(node.target).split("."), cast(Any, module))
        for node in module.graph.find_nodes(op="get_attr")
    )
    return [x for x in found if isinstance(x, Tensor)]


def _written_untold(
    answers: Sequence[OutputAnswer],
    names: Sequence[str],
    values: Sequence[Sequence[Tensor]],
    held: Sequence[Sequence[Sequence[Tensor]]],
) -> list[OutputAnswer]:
    """A refusal for each input that holds other bits after a graph has run, and that no call says it writes."""
    answered = {answer.output for answer in answers}
    found = []
    for place, name in enumerate(names):
        if f"written {name}" in answered:
            continue
        for side, ranks in zip(("reference", "candidate"), held, strict=True):
            if not all(same_bits(own[place], given[place]) for own, given in zip(ranks, values, strict=True)):
                reason = f"the {side} leaves other bits in it when it runs, and no call says that it writes it"
                found.append(OutputAnswer(f"written {name}", REFUSED, reason=reason))
                break
    return found


def _by_name(
    graph: Graph, names: Sequence[str], run: tuple[list[list[Tensor]], list[list[Tensor]]]
) -> dict[str, list[Tensor]]:
    """Every rank's value of each output, what the graph wrote into its inputs among them."""
    returned = {name: [own[place] for own in run[0]] for place, (name, _) in enumerate(graph.outputs)}
    return returned | {f"written {name}": [own[place] for own in run[1]] for place, name in enumerate(names)}


def random_inputs(case: Case, names: Sequence[str], like: Sequence[Tensor]) -> list[list[Tensor]]:
    """Each rank's inputs: small normal numbers for parameters and buffers, the case's own tokens, zeros for counts.

    Buffers are the same on all ranks, as a model's are.
    """
    read = [list(step.values()) for step in read_inputs(case, 0)]
    ranks = []
    for rank in range(case.parallelism.world_size):
        values = []
        for place, (name, x) in enumerate(zip(names, like, strict=True)):
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread an operator, as ranks have: bits of large sums depend on how many there are."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


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
