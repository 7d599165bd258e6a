"""Is every corrupted certificate rejected? `python tests/benchmarks/fuzz_certificates.py [DIR] [CORRUPTIONS] [SEED]`.

By default 10,000 corruptions of a small certificate that uses most rules; of the one in DIR, as `prove --certificate`
wrote it, where that is given. Digests are left out, so that the checker's own arguments are what rejects.

A large certificate is checked once, call by call. Before a call whose steps, arguments or result are corrupted, the
process forks, and the child goes on with the corrupted certificate to the end. The checker reads nothing of a call
before it comes to it, so that is what it would say of the corrupted certificate from its beginning.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.certificate.check import check, replay
from harness.certificate.data import Certificate
from harness.certificate.files import read_certificate
from harness.certificate.rules import RejectedError, Terms
from tests.harness.certificate.corruption import corrupt

LARGE = 5_000
"""Steps of a certificate from which on it is checked once, with a child for each corruption."""

ACCEPTED, REJECTED = 11, 12
"""Statuses of a forked child; any other is a failure of its own."""


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
    return next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b), min(len(one), len(two)))


def in_place(certificate: Certificate, corrupted: Certificate) -> None:
    """Give a certificate, which a checker holds, the corrupted one's content. Only a forked child does."""
    for side in ("reference", "candidate"):
        for name in ("calls", "outputs", "groups"):
            object.__setattr__(getattr(certificate, side), name, getattr(getattr(corrupted, side), name))
    for name in ("steps", "answers"):
        object.__setattr__(certificate, name, getattr(corrupted, name))


def fuzz_whole(certificate: Certificate, corruptions: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Each corruption's kind, and whether it was rejected when all was checked again."""
    for number in range(corruptions):
        kind, corrupted = corrupt(certificate, _chance(seed, number))
        try:
            check(corrupted)
        except RejectedError:
            yield kind, True
        else:
            yield kind, False


def fuzz_in_one_pass(certificate: Certificate, corruptions: int, seed: int) -> Iterator[tuple[str, bool]]:
    """The same where a child goes on from the corrupted place."""
    by_place: dict[int, list[int]] = defaultdict(list)
    for number in range(corruptions):
        by_place[first_change(certificate, corrupt(certificate, _chance(seed, number))[1])].append(number)
    gc.collect()
    gc.freeze()
    checking = replay(certificate, Terms())
    for place in checking:
        for number in by_place[place]:
            kind, corrupted = corrupt(certificate, _chance(seed, number))
            if (child := os.fork()) == 0:
                status = ACCEPTED
                try:
                    in_place(certificate, corrupted)
                    for _ in checking:
                        pass
                except RejectedError:
                    status = REJECTED
                finally:
                    os._exit(status)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (ACCEPTED, REJECTED), f"a child of {kind} ended with {code}"
            yield kind, code == REJECTED


def _chance(seed: int, number: int) -> random.Random:
    return random.Random(seed * 1_000_003 + number)


def main(folder: str | None, corruptions: int, seed: int) -> int:
    """Run, print, and return 1 where a corrupted certificate is accepted."""
    certificate = read_certificate(Path(folder)) if folder else example()
    start = time.process_time()
    check(certificate)
    print(f"{certificate.num_steps} steps, checked in {time.process_time() - start:.2f} s", flush=True)
    start = time.perf_counter()
    rejected: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    fuzz = fuzz_in_one_pass if certificate.num_steps > LARGE else fuzz_whole
    for kind, is_rejected in fuzz(certificate, corruptions, seed):
        (rejected if is_rejected else accepted)[kind] += 1
    children = sum(os.times()[:4])
    counts = f"{rejected.total()} rejected, {accepted.total()} accepted"
    took = f"{time.perf_counter() - start:.0f} s, {children:.0f} s of the process and its children in all"
    print(f"{corruptions} corruptions from seed {seed} in {took}: {counts}")
    for kind, count in sorted((rejected + accepted).items()):
        print(f"  {kind:38} {count:6}, accepted {accepted[kind]}")
    return int(accepted.total() > 0)


if __name__ == "__main__":
    given = sys.argv[1:]
    folder = given.pop(0) if given and not given[0].isdigit() else None
    numbers = [int(text) for text in given]
    sys.exit(main(folder, *(numbers + [10_000, 0][len(numbers) :])))
