"""Is every corrupted certificate rejected? `python tests/benchmarks/fuzz_certificates.py [DIR] [CORRUPTIONS] [SEED]`.

By default 10,000 corruptions of a small certificate that uses most rules; of the one in DIR, as `prove --certificate`
wrote it, where that is given. Digests are left out, so that the checker's own arguments are what rejects.

A large certificate is checked once, call by call, and each corrupted one goes on from a copy of that state where it
first differs: the checker reads nothing of a call before it comes to it, so that is what it would say from the start.
Where that finds nothing, all is checked again.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.certificate.calls import Walk
from harness.certificate.check import Replay, check, rejecting
from harness.certificate.data import Certificate, Graph
from harness.certificate.files import read_certificate
from harness.certificate.rules import RejectedError
from tests.harness.certificate.corruption import corrupt

LARGE = 5_000
"""Steps of a certificate from which on it is checked once for all corruptions."""


def example() -> Certificate:
    """The certificate that tests corrupt."""
    from harness.prove.certify import certificate_of
    from tests.harness.certificate.test_check import W, X, parts, whole
    from tests.harness.prove.graphs import compare

    return certificate_of("example", compare(parts, whole, W, X))


def first_change(certificate: Certificate, corrupted: Certificate) -> int:
    """How many calls the checker has walked before it could see a difference, the reference's first."""
    begin, found = 0, [len(certificate.reference.calls) + len(certificate.candidate.calls)]
    for one, two in ((certificate.reference, corrupted.reference), (certificate.candidate, corrupted.candidate)):
        if one.groups is not two.groups:
            found.append(begin)
        if one.calls is not two.calls:
            found.append(begin + _parted(one.calls, two.calls))
        begin += len(one.calls)
    if certificate.steps is not corrupted.steps:
        found.append(_parted(certificate.steps, corrupted.steps))
    return min(found)


def _parted(one: Sequence[object], two: Sequence[object]) -> int:
    return next(compress(range(len(one)), map(operator.is_not, one, two)), min(len(one), len(two)))


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
    replay, place, goes_on = Replay(certificate), 0, True
    while goes_on:
        for number in by_place[place]:
            kind, corrupted = corrupt(certificate, _chance(seed, number))
            yield kind, _rejected_from_here(replay, corrupted) or _rejects(partial(check, corrupted))
        goes_on = replay.take()
        place += 1


def _rejected_from_here(replay: Replay, corrupted: Certificate) -> bool:
    """Whether the checker, in the state that it is in, rejects the rest of a corrupted certificate. The state is left
    as it was: terms are only ever added, so what was added is taken away; walks go on as copies."""
    terms, num_terms = replay.terms, len(replay.terms.terms)
    kept, terms.used = terms.used, set()
    here = copy.copy(replay)
    here.certificate = corrupted
    here.reference = _copied(replay.reference, corrupted.reference)
    here.candidate = _copied(replay.candidate, corrupted.candidate)
    found = _rejects(here.run)
    for term in terms.terms[num_terms:]:
        del terms.places[term]
    for column in (terms.terms, terms.equals, terms.shapes):
        del column[num_terms:]
    terms.used = kept
    return found


def _copied(walk: Walk, graph: Graph) -> Walk:
    found = copy.copy(walk)
    found.graph = graph
    for name in ("values", "stale", "flying", "symbols", "owners"):
        setattr(found, name, copy.copy(getattr(walk, name)))
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
    certificate = read_certificate(Path(folder)) if folder else example()
    start = time.process_time()
    check(certificate)
    print(f"{certificate.num_steps} steps, checked in {time.process_time() - start:.2f} s", flush=True)
    start = time.process_time()
    rejected: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    fuzz = fuzz_in_one_pass if certificate.num_steps > LARGE else fuzz_whole
    for kind, is_rejected in fuzz(certificate, corruptions, seed):
        (rejected if is_rejected else accepted)[kind] += 1
    seconds = time.process_time() - start
    counts = f"{rejected.total()} rejected, {accepted.total()} accepted"
    print(f"{corruptions} corruptions from seed {seed}, {seconds:.0f} s of this process: {counts}")
    for kind, count in sorted((rejected + accepted).items()):
        print(f"  {kind:38} {count:6}, accepted {accepted[kind]}")
    return int(accepted.total() > 0)


if __name__ == "__main__":
    given = sys.argv[1:]
    folder = given.pop(0) if given and not given[0].isdigit() else None
    numbers = [int(text) for text in given]
    sys.exit(main(folder, *(numbers + [10_000, 0][len(numbers) :])))
