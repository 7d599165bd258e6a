"""What does `prove` say of pairs that users take for equal? `prove_pairs.py [PAIR ...]` prints a table.

Each pair (`written_pairs.py`) runs first, bit for bit, on drawn inputs of three dtypes and four sizes.
Then it is proved, in float32 at the first size. Status 1: a pair that differs there is PROVED.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import bitproof
from tests.benchmarks.written_pairs import PAIRS, truth


def main(names: list[str]) -> int:
    """Run, prove, print, and return the exit status."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, wrong = Counter[str](), []
    print("| pair | when both run | answer | |\n|---|---|---|---|")
    for name in names or PAIRS:
        f, g, draw = PAIRS[name]
        differs = truth(name)
        torch.manual_seed(0)
        found = bitproof.prove(f, g, *draw(torch.float32, 1))
        lines = str(found).splitlines()
        reasons = [found.reason or "", *(x.witness or x.reason or "" for x in found.answers if x.verdict != "PROVED")]
        why = next(filter(None, reasons), "" if found.verdict == "PROVED" else lines[0])
        runs = "equal" if differs is None else f"differ ({differs})"
        counts[f"{'equal' if differs is None else 'differ'}, {found.verdict}"] += 1
        print(f"| {name} | {runs} | {found.verdict} | {' '.join(why.split())[:160]} |", flush=True)
        if found.verdict == "PROVED" and differs == "float32, size 1":
            wrong.append(name)
    print(f"\n{len(names or PAIRS)} pairs, torch {torch.__version__}: {dict(counts)}; PROVED and different: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
