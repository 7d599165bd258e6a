"""Does PROVED ever meet different bits? `python tests/benchmarks/fuzz_prove.py [MUTANTS] [SEED] [CASE]`, 10,000 from 0.

Mutants of three small steps on four ranks (`mutants.py`), or of a case's reference with one MoE
layer on two ranks, each with one change that is exact, inexact or plainly wrong, are proved against their step and run:
small ones on two sets of inputs, layers on one; on the first once more with each collective as late as it may be.
Budget: no output that is PROVED and differs. Told besides, by mutation: outputs that are not proved and whose bits
agreed on these inputs and, of small steps, on eight more sets of other magnitudes.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure
from tests.harness.powers.proofs.fuzzing import Fuzzer, one_layer


def main(mutants: int, seed: int, case: str | None) -> int:
    """Run, print, and return 1 for an unsound answer."""
    start = time.process_time()
    fuzzer, chance = Fuzzer([one_layer(case)] if case else ()), random.Random(seed)
    kinds: Counter[str] = Counter()
    flagged: Counter[str] = Counter()
    proved = agreed = failed = unsound = 0
    for _ in range(mutants):
        outcome = fuzzer.try_one(chance)
        kinds[outcome.kind] += 1
        failed += outcome.failed
        flagged[outcome.kind] += len(outcome.flagged)
        proved += len(outcome.proved)
        agreed += len(outcome.flagged) + len(outcome.proved)
        if outcome.unsound:
            unsound += 1
            print(f"UNSOUND: {outcome.kind}: {', '.join(outcome.unsound)}", flush=True)
    seconds = time.process_time() - start
    print(f"{mutants} mutants, seed {seed}, {seconds:.0f} s of this process: {unsound} unsound; torch refuses {failed}")
    print(f"outputs whose bits agreed: {agreed}; of these proved: {proved}, flagged: {sum(flagged.values())}")
    for kind, count in flagged.most_common():
        print(f"  {kind:22} {count:6} flagged in {kinds[kind]} mutants")
    name = f"fuzz.prove_{case}" if case else "fuzz.prove"
    return figure(name, 1 - unsound / mutants if mutants else math.nan)


if __name__ == "__main__":
    given = sys.argv[1:]
    case = given.pop() if given and not given[-1].isdigit() else None
    numbers = [int(text) for text in given]
    mutants, seed = numbers + [10_000, 0][len(numbers) :]
    sys.exit(main(mutants, seed, case))
