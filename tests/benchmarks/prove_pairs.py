"""What does `prove` say of pairs that users take for equal? `prove_pairs.py [PAIR ...]` prints a table.

Each pair (`written_pairs.py`) runs on eight sets of inputs of three dtypes and two sizes, bit for bit, and is proved
at each of these. A row states both, with a reason in float32. Status 1: a pair is PROVED where it was seen to differ.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import bitproof
from tests.benchmarks.written_pairs import DTYPES, PAIRS, SIZES, differs
from tests.figures import figure


def main(names: list[str]) -> int:
    """Run, prove, print, and return the exit status."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, wrong = Counter[str](), []
    print("| pair | when both run | answers | |\n|---|---|---|---|")
    for name in names or PAIRS:
        f, g, draw = PAIRS[name]
        runs, answers, why = [], Counter[str](), ""
        for dtype, size in itertools.product(DTYPES, SIZES):
            text = f"{str(dtype).removeprefix('torch.')}, size {size}"
            is_unlike = differs(name, dtype, size)
            runs += [text] if is_unlike else []
            torch.manual_seed(0)
            found = bitproof.prove(f, g, *draw(dtype, size))
            answers[found.verdict] += 1
            counts[f"{'differ' if is_unlike else 'equal'}, {found.verdict}"] += 1
            wrong += [f"{name} ({text})"] if is_unlike and found.verdict == "PROVED" else []
            if not why and found.verdict != "PROVED":
                others = [x for x in found.answers if x.verdict != "PROVED"]
                why = found.reason or next(x.witness or x.meaning or x.reason or "" for x in others)
        ran = f"differ ({len(runs)} of {len(DTYPES) * len(SIZES)}, {runs[0]})" if runs else "equal"
        said = ", ".join(f"{count} {verdict}" for verdict, count in answers.items())
        print(f"| {name} | {ran} | {said} | {' '.join(why.split())[:120]} |", flush=True)
    print(f"\n{len(names or PAIRS)} pairs at {len(DTYPES) * len(SIZES)} dtypes and sizes, torch {torch.__version__}:")
    print("\n".join(f"  {count:4} {what}" for what, count in counts.most_common()))
    print(f"PROVED and seen to differ: {', '.join(wrong) or 'none'}")
    return figure("fuzz.prove_pairs", 1 - len(wrong) / counts.total())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
