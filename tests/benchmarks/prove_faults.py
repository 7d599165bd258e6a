"""Is any fault of the catalogue proved? `prove_faults.py [--layers 2] [--witness] [FAULT|FAMILY ...]`.

Every row that edits a finished graph is struck into the first of the cases of `bitproof faults` that takes it, with few
layers and all its ranks, and the graph with it is proved against the reference. A fault must not be PROVED: it changes
bits on some input. Told besides: where what is shown names a place at which the fault struck, and which rewrites that
keep every bit are proved. No rank runs, so faults that only some inputs show are faults here, too. Rows that tamper
with calls or with the order of sums strike behind a proof's back: they are left out. With `--witness` both graphs are
run on the case's tokens and random parameters, of several magnitudes, and with a router's rows near to each other, on
all ranks in this process: of the outputs that are NOT PROVED it counts those whose bits differ on one of these, and
names those where they do not, with the calls at which the difference ends on all of these inputs (`where_it_ends.py`).
Where experts are chosen, and where softmax saturates, depends on magnitudes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.fx import GraphModule

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case
from bitproof.harness.disturb.faults import Entry, Site
from bitproof.harness.disturb.mutate import mutate
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.in_one_process import NotEvaluatedError
from bitproof.harness.graph.operators import written_arguments
from bitproof.harness.powers.mutants.cli import DEFAULT_CASES
from bitproof.harness.powers.mutants.command import choose, homes
from bitproof.harness.powers.proofs.prover.answers import BUFFER, NOT_PROVED, PROVED, REFUSED, prove_graphs
from bitproof.harness.powers.proofs.prover.evaluate import run_graph
from bitproof.harness.powers.proofs.prover.explain import Shown
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.pairs import same_value
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.prove import random_inputs
from bitproof.harness.powers.proofs.prover.reference import of_the_reference, traced_reference
from bitproof.harness.systems.step_graphs import step_graph
from tests.benchmarks.where_it_ends import steps_of, where_it_ends
from tests.figures import figure
from tests.small import small

FACTORS = (1.0, 10.0, 40.0, 0.1, 2.0, 3.0, 5.0, 7.0, 15.0, 20.0, 30.0, 0.3)
"""Of the random parameters: the first as a case is computed."""


class Draw(NamedTuple):
    """Random inputs: the factor of the real ones, and how near to each other a router's rows and the experts' biases
    are, so that little decides which expert gets a token."""

    factor: float
    nearness: float | None = None


DRAWS = (*(Draw(factor) for factor in FACTORS), *(Draw(1.0, 2.0**-bits) for bits in (16, 18, 20, 22)))


class Alike(NamedTuple):
    """An output that differs on no inputs that were tried, and why not."""

    output: str
    why: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What is concluded of a graph with a row in it; whether a call that is shown stands where the row struck."""

    verdict: str
    is_placed: bool = False
    num_others: int = 0  # outputs that are not PROVED
    unlike: int = 0  # of those that are NOT PROVED, those that were seen to differ
    alike: tuple[Alike, ...] = ()  # and those that were not


class Subject:
    """One case, traced once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        device = torch.device("cpu")
        reference = traced_reference(of_the_reference(case), device)
        candidate, groups = step_graph(case, case.candidate, device, GraphOptions())
        self.reference: Graph = export_graph(
            reference.module, reference.names, reference.inputs, reference.outputs, reference.groups
        )
        self.module = candidate.module
        self.write = functools.partial(
            export_graph, names=reference.names, inputs=reference.inputs, outputs=reference.outputs, groups=groups
        )
        plain = prove_graphs(self.reference, self.write(self.module))
        assert plain.verdict == PROVED, f"{case.name} without a fault is {plain.verdict}"
        self.names, self.outputs, self.partitions = reference.names, reference.outputs, groups.partitions()
        self.inputs = functools.cache(lambda: random_inputs(case, reference.names, reference.inputs))
        self.bits = functools.cache(lambda draw: self.run(self.module, draw))
        self.steps = functools.cache(lambda draw: steps_of(self.module, self.drawn(draw), self.partitions))

    def drawn(self, draw: Draw) -> list[list[Any]]:
        """Each rank's inputs."""
        coordinates = [rank % self.case.parallelism.tp for rank in range(len(self.inputs()))]
        return [
            [_drawn(name, x, draw, at) for name, x in zip(self.names, own, strict=True)]
            for own, at in zip(self.inputs(), coordinates, strict=True)
        ]

    def run(self, module: GraphModule, draw: Draw) -> dict[str, list[Any]]:
        """What a graph gives on every rank, by output. Raises RefusedError and NotEvaluatedError."""
        returned, held = run_graph(module, self.drawn(draw), self.partitions)
        found = {name: [own[place] for own in returned] for place, name in enumerate(self.outputs)}
        return found | {f"written {name}": [own[place] for own in held] for place, name in enumerate(self.names)}

    def seen(self, module: GraphModule, outputs: Sequence[str]) -> tuple[int, tuple[Alike, ...]]:
        """How many of these outputs differ on the inputs, and which do not, with the reason."""
        alike = [*outputs]
        for draw in DRAWS if outputs else ():
            if not alike:
                break
            try:
                found = self.run(module, draw)
            except (RefusedError, NotEvaluatedError) as error:
                return 0, tuple(Alike(name, (f"it does not run: {str(error).splitlines()[0]}",)) for name in outputs)
            pairs = {name: [*zip(found[name], self.bits(draw)[name], strict=True)] for name in alike}
            alike = [name for name, both in pairs.items() if all(same_value(x, y) or _is_nan(x, y) for x, y in both)]
        return len(outputs) - len(alike), self.reasons(module, alike) if alike else ()

    def reasons(self, module: GraphModule, alike: Sequence[str]) -> tuple[Alike, ...]:
        """Where, on all inputs, the difference ends before it reaches these outputs."""
        plain = [self.steps(draw) for draw in DRAWS]
        changed = [steps_of(module, self.drawn(draw), self.partitions) for draw in DRAWS]
        ends = where_it_ends(plain, changed, self.module, module)
        last = dict(zip(self.outputs, ((x,) for x in module.graph.output_node().args[0]), strict=True))
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        for name, held in zip(self.names, inputs, strict=True):
            last[f"written {name}"] = tuple(x for x in module.graph.nodes if held in written_arguments(x))
        return tuple(Alike(name, ends(*last[name])) for name in alike)

    def prove(self, entry: Entry, witness: bool = False) -> Outcome:
        """Prove the case with a row in its graph. Raises UsageError where it finds nothing to strike."""
        module, sites = mutate(entry, self.module, self.case)
        try:
            proof = prove_graphs(self.reference, self.write(module))
        except RefusedError as error:
            return Outcome(REFUSED, any((site.module or "no module") in str(error.where) for site in sites))
        findings = [answer.finding for answer in proof.answers if answer.finding]
        shown = {call for finding in findings for side in finding.first for call in side}
        num_others = len(proof.answers) - proof.count(PROVED)
        left = [answer.output for answer in proof.answers if answer.verdict == NOT_PROVED]
        seen = self.seen(module, left) if witness and left else (0, ())
        return Outcome(proof.verdict, any(_is_at(call, sites) for call in shown), num_others, *seen)


def _drawn(name: str, x: Any, draw: Draw, at: int) -> Any:
    """A rank's input; `at` is the rank's place among those that share a tensor."""
    if not x.is_floating_point():
        return x + at * name.startswith(BUFFER)
    near = draw.nearness is not None and name.endswith(("router.weight", "expert_bias"))
    return (x[:1] + x * draw.nearness if near else x) * draw.factor


def _first(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _is_nan(*values: Any) -> bool:
    """Whether a value holds a NaN, which proofs do not cover."""
    return any(isinstance(x, torch.Tensor) and bool(x.isnan().any()) for x in values)


def _is_at(call: Shown, sites: Sequence[Site]) -> bool:
    return any(site.is_at(call.module, call.direction) for site in sites)


def first_struck(entry: Entry, subjects: Iterable[Subject], witness: bool = False) -> tuple[Case, Outcome] | None:
    """The first case in which a row finds something to strike, and what is concluded; None where there is none."""
    for subject in subjects:
        try:
            return subject.case, subject.prove(entry, witness)
        except UsageError:
            continue
    return None


def main() -> int:
    """Prove each row, print it, and return 1 where a fault is proved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", help="names of faults or of families; all where none is given")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--witness", action="store_true", help="run both graphs, and look for bits that differ")
    options = parser.parse_args()
    start = time.process_time()
    cases = [small(CASES[name], options.layers) for name in DEFAULT_CASES if not CASES[name].is_foreign]
    subject = functools.cache(Subject)
    faults: Counter[str] = Counter()
    rewrites: Counter[str] = Counter()
    seen: Counter[bool] = Counter()
    unseen: Counter[bool] = Counter()
    placed, lost = 0, []
    for entry in (entry for entry in choose(options.wanted) if entry.edit is not None):
        found = first_struck(entry, (subject(case) for case in homes(entry, cases)), options.witness)
        if found is None:
            lost.append(entry.name)
            continue
        case, outcome = found
        (faults if entry.is_fault else rewrites)[outcome.verdict] += 1
        placed += entry.is_fault and outcome.is_placed
        lines = [outcome.verdict]
        lines += [f"{outcome.num_others} outputs"] if outcome.num_others else []
        lines += ["at its place" if outcome.is_placed else "elsewhere"] if entry.is_fault else []
        lines += [f"{outcome.unlike} seen to differ"] if options.witness and outcome.verdict == NOT_PROVED else []
        lines += [f"{len(outcome.alike)} not"] if outcome.alike else []
        seen[entry.is_fault] += outcome.unlike
        unseen[entry.is_fault] += len(outcome.alike)
        loud = "UNSOUND: " if entry.is_fault and outcome.verdict == PROVED else ""
        print(f"{loud}{entry.name} in {case.name}: {', '.join(lines)}", flush=True)
        why = Counter(alike.why for alike in outcome.alike)
        for ends, count in why.most_common():
            named = [alike.output for alike in outcome.alike if alike.why == ends]
            print(f"    {count} as {_first(ends)}: {_first(named)}", flush=True)
    print(f"faults: {dict(faults)}; {placed} shown at a place where they struck; rewrites: {dict(rewrites)}")
    if options.witness:
        print(f"faults' outputs that are NOT PROVED: {seen[True]} seen to differ, {unseen[True]} not")
    print(f"not struck: {', '.join(lost) or 'none'}; {time.process_time() - start:.0f} s of this process")
    status = int(faults[PROVED] > 0)
    return status if options.wanted else status or figure("fuzz.prove_faults", faults.total() - faults[PROVED])


if __name__ == "__main__":
    sys.exit(main())
