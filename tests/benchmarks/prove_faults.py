"""Is any fault of the catalogue proved? `python tests/benchmarks/prove_faults.py [--layers 2] [FAULT|FAMILY ...]`.

Every row that edits a finished graph is struck into the first of the cases of `bitproof faults` that takes it, with few
layers and all its ranks, and the graph with it is proved against the reference. A fault must not be PROVED: it changes
bits on some input. Told besides: where what is shown names a place at which the fault struck, and which rewrites that
keep every bit are proved. No rank runs, so faults that only some inputs show are faults here, too. Rows that tamper
with calls or with the order of sums strike behind a proof's back: they are left out.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case
from bitproof.harness.certificate.data import Graph
from bitproof.harness.cli.faults import DEFAULT_CASES
from bitproof.harness.commands.faults import choose, homes
from bitproof.harness.disturb.faults import Entry, Site
from bitproof.harness.disturb.mutate import mutate
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.prove.answers import PROVED, REFUSED, prove_graphs
from bitproof.harness.prove.explain import Shown
from bitproof.harness.prove.graphs.export import RefusedError, export_graph
from bitproof.harness.prove.prove import of_the_reference, traced_reference
from bitproof.harness.systems.step_graphs import step_graph
from tests.small import small


@dataclass(frozen=True)
class Outcome:
    """What is concluded of a graph with a row in it; whether a call that is shown stands where the row struck."""

    verdict: str
    is_placed: bool = False
    num_others: int = 0  # outputs that are not PROVED


class Subject:
    """One case, traced once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        device = torch.device("cpu")
        reference = traced_reference(of_the_reference(case), device)
        candidate, groups = step_graph(case, case.candidate, device, GraphOptions())
        self.reference: Graph = export_graph(
            reference.step.module, reference.names, reference.inputs, reference.outputs, reference.groups
        )
        self.module = candidate.module
        self.write = functools.partial(
            export_graph, names=reference.names, inputs=reference.inputs, outputs=reference.outputs, groups=groups
        )
        plain = prove_graphs(self.reference, self.write(self.module))
        assert plain.verdict == PROVED, f"{case.name} without a fault is {plain.verdict}"

    def prove(self, entry: Entry) -> Outcome:
        """Prove the case with a row in its graph. Raises UsageError where it finds nothing to strike."""
        module, sites = mutate(entry, self.module, self.case)
        try:
            proof = prove_graphs(self.reference, self.write(module))
        except RefusedError as error:
            return Outcome(REFUSED, any((site.module or "no module") in str(error.where) for site in sites))
        findings = [answer.finding for answer in proof.answers if answer.finding]
        shown = {call for finding in findings for side in finding.first for call in side}
        num_others = len(proof.answers) - proof.count(PROVED)
        return Outcome(proof.verdict, any(_is_at(call, sites) for call in shown), num_others)


def _is_at(call: Shown, sites: Sequence[Site]) -> bool:
    return any(site.is_at(call.module, call.direction) for site in sites)


def first_struck(entry: Entry, subjects: Iterable[Subject]) -> tuple[Case, Outcome] | None:
    """The first case in which a row finds something to strike, and what is concluded; None where there is none."""
    for subject in subjects:
        try:
            return subject.case, subject.prove(entry)
        except UsageError:
            continue
    return None


def main() -> int:
    """Prove each row, print it, and return 1 where a fault is proved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", help="names of faults or of families; all where none is given")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    start = time.process_time()
    cases = [small(CASES[name], options.layers) for name in DEFAULT_CASES]
    subject = functools.cache(Subject)
    faults: Counter[str] = Counter()
    rewrites: Counter[str] = Counter()
    placed, lost = 0, []
    for entry in (entry for entry in choose(options.wanted) if entry.edit is not None):
        found = first_struck(entry, (subject(case) for case in homes(entry, cases)))
        if found is None:
            lost.append(entry.name)
            continue
        case, outcome = found
        (faults if entry.is_fault else rewrites)[outcome.verdict] += 1
        placed += entry.is_fault and outcome.is_placed
        told = [outcome.verdict]
        told += [f"{outcome.num_others} outputs"] if outcome.num_others else []
        told += ["at its place" if outcome.is_placed else "elsewhere"] if entry.is_fault else []
        loud = "UNSOUND: " if entry.is_fault and outcome.verdict == PROVED else ""
        print(f"{loud}{entry.name} in {case.name}: {', '.join(told)}", flush=True)
    print(f"faults: {dict(faults)}; {placed} shown at a place where they struck; rewrites: {dict(rewrites)}")
    print(f"not struck: {', '.join(lost) or 'none'}; {time.process_time() - start:.0f} s of this process")
    return int(faults[PROVED] > 0)


if __name__ == "__main__":
    sys.exit(main())
