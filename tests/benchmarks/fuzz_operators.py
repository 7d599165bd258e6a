"""Does PROVED ever meet different bits, whatever operators a program has? `fuzz_operators.py [MUTANTS] [SEED]`.

Random programs of operators that torch can trace (`random_programs.py`), with views, writes in
place, statistics and random draws, are changed ten times each: by what keeps every bit, by what nearly does, and by
what does not. Each mutant is proved against its program, and both run on three sets of inputs, two of them full of
zeros, denormals and equal numbers; inputs on which a NaN appears say nothing. Every ten programs have a process of
their own, since some calls end it: such a program is named with its end, and alone is lost.

Budgets: no output that is PROVED and differs; of the outputs that changes which keep every bit, and every layout, leave
equal, at most 4 % that are not PROVED. Outputs that are REFUSED when the program is proved against itself are counted
apart: they are named, and no rule could prove them.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure
from tests.harness.powers.proofs.fuzzing import random_subject
from tests.harness.powers.proofs.rewrites import KEEPS

PROGRAMS, MUTANTS_EACH, SECONDS = 10, 10, 60
REFUSED = "programs that are not traced, or refused as a whole"
ENDED = "ended"
FAILED = "mutants that torch refuses, or whose values are NaNs"


def tried(seed: int, number: int) -> Counter[str]:
    """Counts of one program's mutants, and a line for each unsound answer."""
    counts: Counter[str] = Counter()
    chance = random.Random(f"{seed} {number}")
    try:
        subject = random_subject(chance)
    except Exception:  # torch refuses it, or a proof does
        counts[REFUSED] += 1
        return counts
    counts["programs"] += 1
    counts["outputs of programs"] += len(subject.answered)
    counts["outputs REFUSED of a program against itself"] += len(subject.answered) - len(subject.provable)
    counts.update(f"op {call.op}" for call in subject.graph.calls)
    for _ in range(MUTANTS_EACH):
        outcome = subject.try_one(chance)
        kind = outcome.kind.removesuffix(" again")
        counts["mutants"] += 1
        counts[FAILED] += outcome.failed
        counts["proved"] += len(outcome.proved)
        if kind in KEEPS:
            flagged = subject.provable.intersection(outcome.flagged)
            counts["kept"] += len(flagged) + len(outcome.proved)
            counts["kept, unproved"] += len(flagged)
            counts[f"unproved {kind}"] += len(flagged)
        if outcome.unsound:
            counts[f"UNSOUND: seed {seed}, program {number}: {kind}: {', '.join(outcome.unsound)}"] += 1
    return counts


def _apart(seed: int) -> Counter[str]:
    """Counts of all programs of a seed. Where a process ends, another goes on behind the program that ended it."""
    counts: Counter[str] = Counter()
    done = 0
    while done < PROGRAMS:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reader)
            _try_all(seed, done, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            for line in pipe:
                counts += Counter(json.loads(line))
                done += 1
        _, status = os.waitpid(child, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            counts[f"{ENDED} by {how}: seed {seed}, program {done}"] += 1
            done += 1
    return counts


def _try_all(seed: int, first: int, writer: int) -> NoReturn:
    """What a process does: a line of counts a program."""
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number in range(first, PROGRAMS):
        signal.alarm(SECONDS)
        os.write(writer, f"{json.dumps(tried(seed, number))}\n".encode())
    os._exit(0)


def main(mutants: int, seed: int) -> int:
    """Run, print, and return 1 for an unsound answer, or too many that are not proved."""
    warnings.simplefilter("ignore")
    start, counts = time.monotonic(), Counter[str]()
    while counts["mutants"] < mutants:
        counts += _apart(seed)
        seed += 1
    ended = sorted(line for line in counts if line.startswith(ENDED))
    unsound = sorted(line for line in counts if line.startswith("UNSOUND"))
    ops = {line for line in counts if line.startswith("op aten")}
    share = counts["kept, unproved"] / max(counts["kept"], 1)
    print(f"{counts['mutants']} mutants of {counts['programs']} programs, {time.monotonic() - start:.0f} s")
    for text in (REFUSED, FAILED, "outputs of programs", "outputs REFUSED of a program against itself"):
        print(f"  {text}: {counts[text]}")
    print(f"  operators: {len(ops)}; programs that end their process: {len(ended)}")
    print(*(f"    {line}" for line in ended), sep="\n")
    print(f"  outputs PROVED: {counts['proved']}; unsound: {len(unsound)}")
    print(f"  outputs that a change keeps: {counts['kept']}; unproved: {counts['kept, unproved']}, {share:.1%}")
    for kind, count in counts.most_common():
        if kind.startswith("unproved "):
            print(f"    {kind}: {count}")
    print(*unsound, sep="\n")
    missed = figure("fuzz.operators", share if counts["kept"] else math.nan)
    return int(bool(unsound) or missed)


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*(given + [20_000, 0][len(given) :])))
