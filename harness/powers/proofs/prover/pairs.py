"""Proves two programs equal: an answer for each output, and a check of the answers on values.

1. Convert both graphs to data. They must have the same inputs with equal layouts.
2. Prove output by output.
3. Compute both graphs, and the term of every PROVED output, on random inputs. If a term and a graph have different
   bits, the proof is wrong, and the output is REFUSED.
4. If a NOT PROVED output has different bits in the two graphs, the inputs are a witness that the programs differ.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import deterministic

from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.in_one_process import NotEvaluatedError
from bitproof.harness.powers.proofs.prover.answers import (
    MUST_READ,
    NOT_PROVED,
    PROVED,
    REFUSED,
    OutputAnswer,
    Proof,
    answer_lines,
    meaning_of,
    prove_graphs,
)
from bitproof.harness.powers.proofs.prover.evaluate import (
    Evaluator,
    FailsError,
    differing,
    run_graph,
    same_bits,
)
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.graphs.memory_layouts import Layouts
from bitproof.harness.powers.proofs.prover.graphs.open_sizes import SizeBounds
from bitproof.harness.powers.proofs.prover.induction import Induction
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.terms import Rule

MOST_ELEMENTS = 20_000_000
"""If a program's inputs have more elements than this, terms are not computed."""

MOST_RANKS = 16

OTHER_BITS = "its term, computed on random inputs, gives OTHER BITS than the graphs: a defect of bitproof"

Values = Sequence[Sequence[Any]]
"""The inputs of each rank, in order."""


@dataclass(frozen=True)
class Provable:
    """A program that can be proved equal to another: a graph with named inputs and outputs.

    - `module`: the graph. None if another process traced the program. Then `written` has the graph as data, and the
      program cannot be run.
    - `inputs`: only their layouts matter. Their sizes may be symbols with bounds instead of numbers.
    - `others`: (name, value as text) of each output that is not a tensor.
    """

    module: GraphModule | None
    names: Sequence[str]
    inputs: Sequence[Any]
    outputs: Sequence[str]
    groups: GroupTable = field(default_factory=GroupTable)
    others: tuple[tuple[str, str], ...] = ()
    written: tuple[Graph, SizeBounds] | None = None

    @functools.cached_property
    def exported(self) -> tuple[Graph, SizeBounds]:
        """(the graph as data, the bounds of its symbolic sizes). Raises RefusedError for an unsupported call."""
        if self.written is not None:
            return self.written
        assert self.module is not None, "a graph or what was written of it"
        bounds = SizeBounds()
        graph = export_graph(self.module, self.names, self.inputs, self.outputs, self.groups, bounds)
        return graph, bounds

    @property
    def graph(self) -> Graph:
        return self.exported[0]


@dataclass(frozen=True)
class PairProof:
    """The result of proving two programs equal.

    - `proof`: the answers for all outputs. None if the programs were refused as a whole or not tried.
    - `reason`: why `proof` is None.
    - `evaluated`: how many PROVED outputs were also computed on values, and had equal bits.
    - `not_evaluated`: why other PROVED outputs were not computed, or None.
    - `seconds`: (phase, seconds) for each phase.
    - `bounds`: the bounds of symbolic sizes within which the result holds, as text.
    - `induction`: whether the proof extends to any number of steps.
    - `not_run`: why the programs themselves could not be run, or None. If they were not run, it is only assumed that
      the graphs compute the same as the programs.
    """

    verdict: str
    proof: Proof | None = None
    graphs: tuple[Graph, Graph] | None = None
    reason: str | None = None
    evaluated: int = 0
    not_evaluated: str | None = None
    seconds: tuple[tuple[str, float], ...] = ()
    bounds: tuple[str, ...] = ()
    induction: Induction | None = None
    not_run: str | None = None

    @property
    def answers(self) -> tuple[OutputAnswer, ...]:
        """The answers for all outputs; () if the programs were refused as a whole."""
        return self.proof.answers if self.proof else ()

    def __str__(self) -> str:
        return "\n".join(self.lines(all_in="`answers`"))

    def lines(self, *, all_in: str) -> list[str]:
        """Return the result as lines of text. The first line has the verdict and the counts of outputs.

        Further lines are, in this order:

        - the outputs with different strides in the two graphs;
        - for each output that is not PROVED, its first differing calls or why it is REFUSED;
        - the bounds of symbolic sizes;
        - why the programs were not run;
        - whether any number of steps is proved.

        If there are too many outputs, a line states that `all_in` has the complete list.
        """
        if self.proof is None:
            return [f"{self.verdict}: {self.reason}"]
        counts = {verdict: self.proof.count(verdict) for verdict in (PROVED, NOT_PROVED, REFUSED)}
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        computed = f"; {self.evaluated} of {counts[PROVED]} computed and found so"
        if self.not_evaluated:
            computed += f" ({self.not_evaluated})"
        lines = [f"{self.verdict}: {text} of {len(self.answers)} outputs{computed}{meaning_of(self.proof)}"]
        lines += answer_lines(self.proof, all_in=all_in)
        lines += [f"  for all sizes of {bound}" for bound in self.bounds]
        if self.verdict == PROVED and self.not_run:
            lines.append(f"  not run, {self.not_run}: that the graphs are what the programs do is assumed")
        if self.verdict == PROVED and self.induction is not None and (self.induction.state or self.induction.reason):
            held = "PROVED" if self.induction.holds else f"not shown, {self.induction.reason}"
            lines.append(f"  any number of steps: {held}")
        return lines

    @property
    def differs(self) -> bool:
        """Whether some output had different bits in the two programs, computed from equal inputs."""
        return any(answer.witness for answer in self.answers)


def prove_programs(
    reference: Provable,
    candidate: Provable,
    values: Callable[[], Sequence[Values]] | None = None,
    *,
    must_read: Sequence[str] = MUST_READ,
    rules: dict[str, list[Rule]] | None = None,
    lap: Callable[[str], None] = lambda name: None,
) -> PairProof:
    """Prove two programs with the same inputs equal, output by output.

    - `values`: returns sets of inputs on which both programs are also computed. If None, nothing is computed.
    - `must_read`: prefixes of input names. For each prefix, a PROVED output must depend on an input with this prefix.
      If empty, it suffices that some output depends on an input.
    - `rules`: rules to use instead of RULES, for tests.
    - `lap`: a function that is called at the end of each phase, with the phase's name.

    Unsupported calls do not raise: outputs, or the whole result, become REFUSED. The whole result is also REFUSED if
    the programs leave the random generator in different states.
    """
    try:
        graphs = reference.graph, candidate.graph
        _check_inputs(*graphs)
        _check_others(reference, candidate)
    except RefusedError as error:
        return PairProof(REFUSED, reason=refusal_text(error))
    lap("export")
    proof = prove_graphs(*graphs, rules=rules, must_read=must_read)
    # Two programs that ignore their inputs agree without showing anything.
    if not must_read and not proof.reads_something:
        return PairProof(REFUSED, reason="no output reads an input, so that equal ones show nothing")
    # Equal outputs are not enough: code after the programs may draw numbers.
    if proof.verdict == PROVED and len({side.generator for side in proof.sides}) > 1:
        return PairProof(
            REFUSED, reason="the two leave the random generator in other states: what is drawn next differs"
        )
    lap("compare")
    bounds = reference.exported[1].joined(candidate.exported[1])
    found = PairProof(proof.verdict, proof, graphs, bounds=tuple(bounds))
    if values is not None:
        found = evaluated(found, reference, candidate, values())
        lap("evaluate")
    return found


def _check_inputs(*graphs: Graph) -> None:
    sides = [[call for call in graph.calls if call.op == "input"] for graph in graphs]
    names = [[call.name for call in side] for side in sides]
    if sorted(names[0]) != sorted(names[1]):
        # If the sets of names are equal, one side has a name more often.
        unlike = sorted({*names[0]} ^ {*names[1]}) or ["one name several times"]
        raise RefusedError(f"the two take other inputs: {', '.join(unlike[:6])}", where="both graphs")
    for one, other in zip(*(sorted(side, key=lambda call: call.name) for side in sides), strict=True):
        lies = [_layout_text(call.value) for call in (one, other)]
        if lies[0] != lies[1]:
            what = f"{one.name} is {lies[0]} in the reference and {lies[1]} in the candidate"
            raise RefusedError(what, where="both graphs")


def _layout_text(value: Any) -> str:
    if not hasattr(value, "shape"):
        return "a number"
    shape, strides = ([n if isinstance(n, int) else "open" for n in sizes] for sizes in (value.shape, value.strides))
    lies = f"{value.dtype} {shape}, strides {strides}, on {value.device}"
    return lies if value.offset == 0 else f"{lies}, from element {value.offset} on"


def _check_others(reference: Provable, candidate: Provable) -> None:
    for (name, one), (_, other) in zip(sorted(reference.others), sorted(candidate.others), strict=False):
        if one != other:
            raise RefusedError(f"{name} is {one} in the reference and {other} in the candidate", where="the outputs")
    if {name for name, _ in reference.others} != {name for name, _ in candidate.others}:
        raise RefusedError("an output is a tensor on one side and none on the other", where="the outputs")


def evaluated(found: PairProof, reference: Provable, candidate: Provable, sets: Sequence[Values]) -> PairProof:
    """Compute both programs on each set of inputs in `sets`, and return `found` with updated answers.

    - A PROVED output becomes REFUSED if its term and a graph have different bits.
    - A NOT PROVED output gets a witness if its values in the two programs differ.
    """
    steps = reference, candidate
    for place, values in enumerate(sets):
        if found.proof is not None:
            with _as_on_a_rank():
                found = _evaluated(found, steps, values, is_further=place > 0)
    return found


def _evaluated(found: PairProof, steps: tuple[Provable, Provable], given: Values, *, is_further: bool) -> PairProof:
    assert found.proof is not None and found.graphs is not None
    tensors = [x for x in given[0] if isinstance(x, Tensor)]
    # Reasons why nothing is computed here. The proof itself stays as it is.
    if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        return replace(found, not_evaluated="the step is too large to be computed here")
    if any(x.device.type != "cpu" for x in tensors):
        return replace(found, not_evaluated="the step is not on the CPU")
    if len(given) > MOST_RANKS:
        return replace(found, not_evaluated=f"{len(given)} ranks are too many to be computed in one process")
    modules = [step.module for step in steps if step.module is not None]
    if len(modules) < len(steps):
        return replace(found, not_evaluated="another process traced the step")
    constants = [x for module in modules for x in _constants(module)]
    # To find a write into a constant, since no output shows it.
    before = [x.clone() for x in constants]
    # By name, since the candidate may take the same inputs in another order.
    by_name = [dict(zip(steps[0].names, own, strict=True)) for own in given]
    try:
        runs, failures = [], list[FailsError]()
        for step, module, graph in zip(steps, modules, found.graphs, strict=True):
            ranks = [[own[name] for name in step.names] for own in by_name]
            try:
                with _one_generator_state():
                    runs.append(run_graph(module, ranks, step.groups.partitions(), watch=Layouts(graph)))
            except FailsError as error:
                failures.append(error)
        # Programs that both fail on a further set, which is drawn, may be equal: a loss may only accept numbers between
        # 0 and 1, for example. So this shows nothing.
        if failures:
            return found if is_further and len(failures) == len(steps) else _refused(found, failures[0])
    except NotEvaluatedError as error:
        return replace(found, not_evaluated=f"{error} is not computed here")
    except RefusedError as error:
        return _refused(found, error)
    # A graph that writes its own constants computes something else in the next step.
    if not all(map(same_bits, constants, before)):
        return _refused(found, RefusedError("a tensor of the graph itself holds other bits after a run", where="one"))
    evaluator = Evaluator(found.proof.table, by_name, constants)
    outputs = [_by_name(graph, step, run) for step, graph, run in zip(steps, found.graphs, runs, strict=True)]
    answers, num_evaluated, why = [], 0, found.not_evaluated
    for answer in found.proof.answers:
        try:
            answer = _checked(answer, evaluator, [side.get(answer.output) for side in outputs])
            # The check may have changed the verdict.
            num_evaluated += answer.verdict == PROVED
        except NotEvaluatedError as error:
            why = f"{error} is not computed here"
        answers.append(answer)
    held = [
        {name: [own[i] for own in run[1]] for i, name in enumerate(step.names)}
        for step, run in zip(steps, runs, strict=True)
    ]
    answers += _unstated_writes(answers, by_name, held)
    proof = replace(found.proof, answers=tuple(answers))
    return replace(found, proof=proof, verdict=proof.verdict, evaluated=num_evaluated, not_evaluated=why)


def _checked(answer: OutputAnswer, evaluator: Evaluator, sides: Sequence[Any]) -> OutputAnswer:
    if answer.verdict == NOT_PROVED and None not in sides:
        unlike = [(x, y) for x, y in zip(*sides, strict=True) if not same_value(x, y)]
        if unlike:
            # The first witness stays, since an answer has only one.
            return replace(answer, witness=answer.witness or witness_of(*unlike[0]))
        return replace(answer, agreed=answer.agreed + 1)
    if answer.verdict != PROVED:
        return answer
    try:
        value = evaluator(answer.terms[0])
    except NotEvaluatedError:
        raise
    except Exception as error:
        return replace(answer, verdict=REFUSED, reason=f"its term cannot be computed: {error!r}")
    if all(same_value(x, y) for side in sides for x, y in zip(value, side, strict=True)):
        return answer
    return replace(answer, verdict=REFUSED, reason=OTHER_BITS)


def same_value(x: Any, y: Any) -> bool:
    """Return whether two outputs, tensors or numbers, agree in every bit. All NaNs count as equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return same_bits(x, y)
    # In Python, True equals 1, but as outputs they differ.
    return type(x) is type(y) and x == y


def witness_of(x: Any, y: Any) -> str:
    """Describe how two unequal values differ: `3 of 12 elements, element 0: 1.0 and 2.0`."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return f"{x} and {y}"
    if x.dtype != y.dtype or x.shape != y.shape:
        kinds = [f"{str(v.dtype).removeprefix('torch.')} {list(v.shape)}" for v in (x, y)]
        return f"{kinds[0]} and {kinds[1]}"
    unlike = differing(x, y).reshape(-1).nonzero().reshape(-1)
    first = int(unlike[0])
    values = x.reshape(-1)[first].item(), y.reshape(-1)[first].item()
    return f"{len(unlike)} of {x.numel()} elements, element {first}: {values[0]!r} and {values[1]!r}"


def _refused(found: PairProof, error: RefusedError) -> PairProof:
    return replace(found, verdict=REFUSED, proof=None, graphs=None, reason=refusal_text(error))


def refusal_text(error: RefusedError) -> str:
    """Return a refusal as a line of text: its reason, and the part of the program that caused it."""
    return f"{error.what}, in {error.where}"


def _constants(module: GraphModule) -> list[Tensor]:
    found = (
        functools.reduce(getattr, str(node.target).split("."), cast(Any, module))
        for node in module.graph.find_nodes(op="get_attr")
    )
    return [x for x in found if isinstance(x, Tensor)]


def _unstated_writes(
    answers: Sequence[OutputAnswer],
    given: Sequence[dict[str, Any]],
    held: Sequence[dict[str, list[Any]]],
) -> list[OutputAnswer]:
    # A write that no call in the graph states must not go unnoticed.
    answered = {answer.output for answer in answers}
    found = []
    for name in given[0]:
        if f"written {name}" in answered:
            continue
        for side, after in zip(("reference", "candidate"), held, strict=True):
            if not all(same_value(x, own[name]) for x, own in zip(after[name], given, strict=True)):
                reason = f"the {side} leaves other bits in it when it runs, and no call says that it writes it"
                found.append(OutputAnswer(f"written {name}", REFUSED, reason=reason))
                break
    return found


def _by_name(graph: Graph, step: Provable, run: tuple[list[list[Any]], list[list[Any]]]) -> dict[str, list[Any]]:
    returned = {name: [own[place] for own in run[0]] for place, (name, _) in enumerate(graph.outputs)}
    return {f"written {name}": [own[place] for own in run[1]] for place, name in enumerate(step.names)} | returned


@contextmanager
def _one_generator_state() -> Iterator[None]:
    # Both programs start with the same generator state, or they would draw different numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _as_on_a_rank() -> Iterator[None]:
    # The bits of large sums depend on the number of threads.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Rows that an operator does not write contain arbitrary memory, which would look like a difference.
        with filling_memory():
            yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def filling_memory() -> Iterator[None]:
    """Let torch fill newly allocated memory with fixed values, within a `with` block.

    So uninitialized elements are equal in two runs.
    """
    mode = torch.get_deterministic_debug_mode()
    filled = getattr(deterministic, "fill_uninitialized_memory")  # noqa: B009 (a property, which mypy does not know)
    torch.set_deterministic_debug_mode("warn")  # memory is filled in no other mode; Inductor's settings stay
    setattr(deterministic, "fill_uninitialized_memory", True)  # noqa: B010
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        setattr(deterministic, "fill_uninitialized_memory", filled)  # noqa: B010
