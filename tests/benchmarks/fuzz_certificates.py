"""Is every corrupted certificate rejected? `python tests/benchmarks/fuzz_certificates.py [DIR] [CORRUPTIONS] [SEED]`.

By default 10,000 corruptions of a small certificate that uses most rules; of the one in DIR, as `prove --certificate`
wrote it, where that is given. Digests are left out, so that the checker's own arguments are what rejects.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.certificate.calls import RejectedError
from harness.certificate.check import check
from harness.certificate.data import Certificate
from harness.certificate.files import read_certificate
from tests.harness.certificate.corruption import corrupt


def example() -> Certificate:
    """The certificate that tests corrupt."""
    from harness.prove.certify import certificate_of
    from tests.harness.certificate.test_check import W, X, parts, whole
    from tests.harness.prove.graphs import compare

    return certificate_of("example", compare(parts, whole, W, X))


def main(folder: str | None, corruptions: int, seed: int) -> int:
    """Run, print, and return 1 where a corrupted certificate is accepted."""
    certificate = read_certificate(Path(folder)) if folder else example()
    start = time.perf_counter()
    check(certificate)
    print(f"{len(certificate.steps)} steps, checked in {time.perf_counter() - start:.2f} s")
    chance, start = random.Random(seed), time.perf_counter()
    rejected: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for _ in range(corruptions):
        kind, corrupted = corrupt(certificate, chance)
        try:
            check(corrupted)
        except RejectedError:
            rejected[kind] += 1
        else:
            accepted[kind] += 1
    seconds = time.perf_counter() - start
    counts = f"{rejected.total()} rejected, {accepted.total()} accepted"
    print(f"{corruptions} corruptions from seed {seed} in {seconds:.0f} s: {counts}")
    for kind, count in sorted((rejected + accepted).items()):
        print(f"  {kind:38} {count:6}, accepted {accepted[kind]}")
    return int(accepted.total() > 0)


if __name__ == "__main__":
    given = sys.argv[1:]
    folder = given.pop(0) if given and not given[0].isdigit() else None
    numbers = [int(text) for text in given]
    sys.exit(main(folder, *(numbers + [10_000, 0][len(numbers) :])))
