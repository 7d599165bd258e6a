"""`bitproof prove A.pt2 B.pt2`: proves two exported programs equal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bitproof.harness.powers.proofs.prover.answers import NOT_PROVED, PROVED, REFUSED
from bitproof.harness.powers.proofs.prover.certify import assumed
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.pairs import PairProof, refusal_text
from bitproof.harness.powers.proofs.prover.programs.exported_file import read_exported
from bitproof.harness.powers.proofs.prover.programs.subjects import prove_equal
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED


def prove_files(one: Path, other: Path, *, as_json: bool) -> int:
    """Prove two files equal, print the result, and return the exit status.

    - 0: every output is PROVED.
    - 1: an output is NOT PROVED, and none is REFUSED.
    - 3: an output is REFUSED, for example in a program with a nested graph.

    Nothing in the files is run: see `prover/programs/exported_file.py`. Raises UsageError for a file that cannot be
    read.
    """
    try:
        found = prove_equal(read_exported(one), read_exported(other))
    except RefusedError as error:
        found = PairProof(REFUSED, reason=refusal_text(error))
    status = {PROVED: SUCCESS, NOT_PROVED: UNEXPECTED}.get(found.verdict, UNJUDGED)
    if as_json:
        print(json.dumps(_data(found) | {"programs": [str(one), str(other)], "exit_status": status}, indent=1))
    else:
        print("\n".join(found.lines(all_in="--json")))
        if found.proof is not None:
            print("\n".join(["", "Assumptions:", *(f"- {text}" for text in _assumed(found))]))
    return status


def _assumed(found: PairProof) -> list[str]:
    return [*assumed(found.graphs, found.proof.table.used())] if found.proof and found.graphs else []


def _data(found: PairProof) -> dict[str, object]:
    return {
        "schema": 1,
        "verdict": found.verdict,
        "reason": found.reason,
        "evaluated": found.evaluated,
        "not_evaluated": found.not_evaluated,
        "bounds": list(found.bounds),
        "assumptions": _assumed(found),
        "answers": [asdict(answer) for answer in found.answers],
    }
