"""Is every corrupted certificate rejected? `python tests/benchmarks/fuzz_certificates.py [DIR] [CORRUPTIONS] [SEED]`.

By default 10,000 corruptions of a small certificate that uses most rules; of the one in DIR, as `prove --certificate`
wrote it, where that is given. Digests are left out, so that the checker's own arguments are what rejects.

Of a large certificate the steps are checked once, then the graphs' calls, and each corrupted one goes on from a copy
of that state where it first differs: the checker reads nothing before it comes to it, so that is what it would say from
the start. What is not rejected there is checked again as a whole; so is one in 500, to show that the shortcut and
the whole agree.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import SIDES, RejectedError, rejecting
from bitproof.harness.powers.proofs.prover.certify import call_data, step_data
from bitproof.harness.powers.proofs.prover.proof_data import Call, Certificate, Graph, ProofStep, Tensor
from tests.figures import figure
from tests.harness.certificate.corruption import corrupt
from tests.harness.certificate.samples import W, X, check, parts, whole

LARGE = 1_000
"""Steps of a certificate from which on it is checked once for all corruptions."""

WHOLE_TOO = 500
"""One in so many of these is checked as a whole, too."""


def example() -> Certificate:
    """The certificate that tests corrupt."""
    from bitproof.harness.powers.proofs.prover.certify import certificate_of
    from tests.harness.powers.proofs.toy_graphs import compare

    return certificate_of("example", compare(parts, whole, W, X))


def certificate_in(folder: Path) -> Certificate:
    """The certificate in a folder, as the prover's data; without its subject."""
    main, graphs, steps = checker.load(folder)
    reference, candidate = (
        Graph(tuple(_call(*call) for call in graph["calls"]), _frozen(graph["outputs"])) for graph in graphs
    )
    lists = (_frozen(main[name]) for name in ("answers", "assumptions"))
    return Certificate(main["case"], reference, candidate, tuple(ProofStep(*_frozen(step)) for step in steps), *lists)


def _call(name: str, op: str, args: Any, value: Any, writes: Any, random: int, place: Any) -> Call:
    return Call(name, op, _frozen(args), _value(value), tuple(writes), bool(random), _frozen(place))


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return _frozen(value)
    return tuple(map(_value, value["several"])) if "several" in value else Tensor(*_frozen(value["tensor"]))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def first_change(certificate: Certificate, corrupted: Certificate) -> int:
    """How many steps and calls the checker has seen before it could see a difference."""
    one, two = (_seen(x) for x in (certificate, corrupted))
    begin = 0
    for mine, others in zip(one, two, strict=True):
        if mine is not others:
            return begin + next(
                compress(range(len(mine)), map(operator.is_not, mine, others)), min(len(mine), len(others))
            )
        begin += len(mine)
    return begin


def _seen(certificate: Certificate) -> list[Sequence[object]]:
    """What the checker reads, in its order."""
    return [certificate.steps, certificate.reference.calls, certificate.candidate.calls]


def fuzz_whole(certificate: Certificate, corruptions: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Each corruption's kind, and whether it was rejected when all was checked again."""
    for number in range(corruptions):
        kind, corrupted = corrupt(certificate, _chance(seed, number))
        yield kind, _rejects(partial(check, corrupted))


def fuzz_in_one_pass(certificate: Certificate, corruptions: int, seed: int) -> Iterator[tuple[str, bool]]:
    """The same, each corrupted certificate checked from where it first differs, and whole if nothing is found there."""
    by_place: dict[int, list[int]] = defaultdict(list)
    for number in range(corruptions):
        by_place[first_change(certificate, corrupt(certificate, _chance(seed, number))[1])].append(number)
    replay = Replay(certificate)
    for place in sorted(by_place):
        replay.go_on(place)
        for number in by_place[place]:
            kind, corrupted = corrupt(certificate, _chance(seed, number))
            is_rejected = replay.rejects(corrupted) or _rejects(partial(check, corrupted))
            if is_rejected and number % WHOLE_TOO == 0 and not _rejects(partial(check, corrupted)):
                raise AssertionError(f"the shortcut alone rejects corruption {number}")
            yield kind, is_rejected


class Replay:
    """The checker's state when it has seen so many of a certificate's steps and calls."""

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.known: dict[int, Any] = {}
        self.known = {id(x): self._data(x) for several in _seen(certificate) for x in several}
        self.state = checker.new_state()
        self.walks = [checker.new_walk(self.state, *x) for x in zip(self._graphs(certificate), SIDES, strict=True)]
        self.place = 0

    def go_on(self, place: int) -> None:
        """See all before `place`."""
        for see in self._left(self.certificate, self.walks):
            if self.place == place:
                return
            see()
            self.place += 1

    def rejects(self, corrupted: Certificate) -> bool:
        """Whether the checker, in this state, rejects the rest of a corrupted certificate. The state is left as it was:
        terms are only ever added, so what was added is taken away; walks go on as copies."""
        num_terms, state = len(self.state["terms"]), self.state

        def run() -> None:
            graphs = self._graphs(corrupted)
            walks = [self._copied(walk, graph) for walk, graph in zip(self.walks, graphs, strict=True)]
            for see in self._left(corrupted, walks):
                see()
            answers = [[*answer] for answer in corrupted.answers]
            checker.check_answers({"answers": answers}, checker.answers_of(state, walks, graphs))

        found = _rejects(run)
        for term in state["terms"][num_terms:]:
            del state["at"][checker.line_of(term)]
        for column in ("terms", "last", "types", "roots"):
            del state[column][num_terms:]
        return found

    def _left(self, certificate: Certificate, walks: Sequence[dict[str, Any]]) -> Iterator[Callable[[], object]]:
        """What the checker does from here on, in its order."""
        for number in range(len(self.state["terms"]), len(certificate.steps)):
            yield partial(checker.take_step, self.state, self._data(certificate.steps[number]))
        for walk in walks:
            for _ in range(len(walk["values"]), len(walk["calls"])):
                yield partial(checker.take_call, walk)

    def _data(self, x: Any) -> Any:
        """A step or a call as JSON: those of the certificate itself were made once."""
        if id(x) in self.known:
            return self.known[id(x)]
        return json.loads(json.dumps(step_data(x) if isinstance(x, ProofStep) else call_data(x)))

    def _graphs(self, certificate: Certificate) -> list[dict[str, Any]]:
        return [
            {"calls": [self._data(call) for call in graph.calls], "outputs": [[*x] for x in graph.outputs]}
            for graph in (certificate.reference, certificate.candidate)
        ]

    def _copied(self, walk: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
        found = checker.new_walk(self.state, graph, walk["side"])
        for name in ("values", "stale", "lying", "inputs", "symbols", "generator", "filling", "reading"):
            found[name] = copy.deepcopy(walk[name])
        return found


def _rejects(run: Callable[[], object]) -> bool:
    try:
        with rejecting():
            run()
    except RejectedError:
        return True
    return False


def _chance(seed: int, number: int) -> random.Random:
    return random.Random(seed * 1_000_003 + number)


def main(folder: str | None, corruptions: int, seed: int) -> int:
    """Run, print, and return 1 where a corrupted certificate is accepted."""
    certificate = certificate_in(Path(folder)) if folder else example()
    start = time.process_time()
    check(certificate)
    print(f"{len(certificate.steps)} steps, checked in {time.process_time() - start:.2f} s", flush=True)
    start = time.process_time()
    rejected: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    fuzz = fuzz_in_one_pass if len(certificate.steps) > LARGE else fuzz_whole
    for kind, is_rejected in fuzz(certificate, corruptions, seed):
        (rejected if is_rejected else accepted)[kind] += 1
    seconds = time.process_time() - start
    counts = f"{rejected.total()} rejected, {accepted.total()} accepted"
    print(f"{corruptions} corruptions from seed {seed}, {seconds:.0f} s of this process: {counts}")
    for kind, count in sorted((rejected + accepted).items()):
        print(f"  {kind:38} {count:6}, accepted {accepted[kind]}")
    tried = rejected.total() + accepted.total()
    missed = figure("fuzz.certificates", rejected.total() / tried if tried else math.nan)
    return int(accepted.total() > 0 or missed)


if __name__ == "__main__":
    given = sys.argv[1:]
    folder = given.pop(0) if given and not given[0].isdigit() else None
    numbers = [int(text) for text in given]
    sys.exit(main(folder, *(numbers + [10_000, 0][len(numbers) :])))
