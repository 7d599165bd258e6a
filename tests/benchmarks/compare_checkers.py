"""Do both checkers say the same? `python tests/benchmarks/compare_checkers.py [CERTIFICATES] [SEED]`.

Certificates are of the tests' own steps and of random programs against mutants of them (`two_checkers.py`), each as it
was made and with one thing changed (`corruption.py`) or some that JSON allows (`json_changes.py`), and forged ones,
made by rules that trust shapes (`forge_certificates.py`). Both checkers read the same bytes. What the one accepts and
the other rejects, or answers otherwise, is a disagreement: the budget is none. Steps are compared by
`forge_certificates.py`.

Random programs have processes of their own, 20 each, since some calls of torch end theirs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.certificate.data import Certificate
from bitproof.harness.prove.certify import contents_of
from tests.benchmarks.forge_certificates import forged_certificate
from tests.harness.certificate.corruption import corrupt
from tests.harness.certificate.json_changes import changed_as_json
from tests.harness.certificate.two_checkers import REJECTED, by_hand, of_random_programs, said_by_first, said_by_second

PROGRAMS, SECONDS = 20, 120
SHARE_BY_HAND, SHARE_FORGED = 0.35, 0.1


SHARE_AS_JSON = 0.3


def count(certificate: Certificate, kind: str, counts: Counter[str], chance: random.Random | None = None) -> None:
    """What both say of one certificate; with `chance`, of its files with something changed that JSON allows."""
    contents, subject = contents_of(certificate), certificate.subject is not None
    if chance is not None:
        contents = changed_as_json(contents, chance, subject=subject)
    first, second = said_by_first(contents, subject=subject), said_by_second(contents, subject=subject)
    counts["certificates"] += 1
    if first != second:
        counts[f"DISAGREE: {kind}, case {certificate.case}: the first says {first}, the second {second}"] += 1
    counts[f"{kind}: {'rejected' if first == REJECTED else 'accepted'} by the first"] += 1


def count_with_changes(certificates: Iterable[Certificate], changes: int, chance: random.Random) -> Counter[str]:
    """The same of each, and of it with one thing changed, so many times."""
    counts: Counter[str] = Counter()
    for certificate in certificates:
        count(certificate, "as made", counts)
        for _ in range(changes):
            if chance.random() < SHARE_AS_JSON:
                count(certificate, "changed as JSON", counts, chance)
                continue
            kind, changed = corrupt(certificate, chance)
            count(changed, f"changed in {kind}", counts)
    return counts


def _apart(seed: int, changes: int) -> Counter[str]:
    """The same of random programs, in a process of its own; nothing where that ended otherwise than it should."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        faulthandler.disable()
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        programs = islice(of_random_programs(seed), PROGRAMS)
        found = count_with_changes(programs, changes, random.Random(seed))
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Counter(json.loads(text)) if text else Counter({"processes that ended otherwise": 1})


def main(certificates: int, seed: int) -> int:
    """Run, print, and return 1 for a disagreement."""
    warnings.simplefilter("ignore")
    start = time.process_time()
    own = [*by_hand()]
    changes = int(certificates * SHARE_BY_HAND) // len(own)
    counts = count_with_changes(own, changes, random.Random(seed))
    for number in range(int(certificates * SHARE_FORGED)):
        found, _ = forged_certificate(random.Random(seed * 1_000_003 + number))
        count(found, "forged", counts)
    while counts["certificates"] < certificates:
        counts += _apart(seed, 40)
        seed += 1
    seconds = time.process_time() - start + os.times().children_user
    disagreements = sorted(line for line in counts if line.startswith("DISAGREE"))
    print(f"{counts['certificates']} certificates, {seconds:.0f} s of CPU: {len(disagreements)} disagreements")
    for kind, number in sorted(counts.items()):
        print(f"  {kind:60} {number:7}")
    return int(bool(disagreements))


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*(given + [100_000, 0][len(given) :])))
