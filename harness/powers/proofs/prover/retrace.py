"""Checks that the graphs in a certificate are those of its case.

The case is traced again, and each call must be equal to the certificate's call.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.certificate_checker import RejectedError, hold, is_whole_step
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.graph.graph_options import GraphOptions, check_extra_passes
from bitproof.harness.powers.proofs.prover.certify import graph_text
from bitproof.harness.powers.proofs.prover.proof_data import SIDES
from bitproof.harness.powers.proofs.prover.prove import prove_case
from bitproof.harness.runtime.sources import own_digest
from bitproof.harness.torch_versions import torch_version

LONGEST = 200
"""The maximum number of characters for a value in a message."""

_PARTS = ("name", "op", "args", "value", "writes", "random")
"""The names of a call's parts, in the order of the certificate's file. The source position comes last, and is left out.
"""


def check_retraced(
    main: Any,
    graphs: Sequence[Any],
    case: Case,
    extra_passes: Sequence[str] = (),
    precompiled: Path | None = None,
) -> None:
    """Trace a certificate's case again. Raises RejectedError if the graphs are not those of the certificate.

    - `main`, `graphs`: the contents of the certificate's files.
    - `extra_passes`, `precompiled`: options of the original proof. The user must give them, because code that only the
      certificate names must never run.

    A certificate is also rejected if it was made with other code of bitproof, another torch, or another kind of
    machine. Raises UsageError if it was made with other options.
    """
    subject = main["subject"]
    if subject["extra_passes"] != [*extra_passes] or bool(subject["precompiled"]) != (precompiled is not None):
        raise UsageError(
            f"the certificate of {main['case']} was made with other options",
            expected=_options(subject["extra_passes"], bool(subject["precompiled"])),
            found=_options(extra_passes, precompiled is not None),
            fix="check this certificate alone, with these options, if you trust what they name",
        )
    # Checked before tracing: with other code the graphs may differ without any fault of the certificate.
    for name, stated, here in (
        ("code", subject["code"], own_digest()),
        ("torch", subject["torch"], torch_version()),
        ("a machine of kind", subject["machine"], platform.machine()),
    ):
        hold(stated == here, f"its graphs cannot be made again here: made with {name} {stated}, here is {here}")
    anew = _graphs_of(case, extra_passes, precompiled, whole=is_whole_step(graphs[0]))
    for side, graph, text in zip(SIDES, graphs, anew, strict=True):
        _check_alike(side, graph, json.loads(text))


def _graphs_of(case: Case, extra_passes: Sequence[str], precompiled: Path | None, *, whole: bool) -> list[str]:
    options = GraphOptions(extra_passes=tuple(extra_passes))
    check_extra_passes(options.extra_passes, case)
    try:
        found = prove_case(case, options, precompiled=precompiled, evaluate=False, follow=whole, in_turn=False)
    # A wrong option is the caller's mistake, and no fault of the certificate.
    except UsageError:
        raise
    except BitproofError as error:
        raise RejectedError(f"its case gives no graphs: {str(error).splitlines()[0]}") from error
    if found.graphs is None:
        raise RejectedError(f"its case gives no graphs: {found.reason}")
    if not whole:
        return [graph_text(graph) for graph in found.graphs]
    if found.update is None or found.update.proof is None:
        raise RejectedError(f"its case gives no whole step: {found.update and found.update.reason}")
    return [graph_text(side.graph) for side in found.update.proof.sides]


def _options(extra_passes: Sequence[str], precompiled: bool) -> str:
    given = [*(f"--extra-pass {name}" for name in extra_passes), *(["--precompiled DIR"] if precompiled else [])]
    return " ".join(given) or "none"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _check_alike(side: str, stated: Any, anew: Any) -> None:
    for index, (one, other) in enumerate(zip(stated["calls"], anew["calls"], strict=False)):
        # The last part is the source position, which may differ.
        if one[:-1] != other[:-1]:
            parts = zip(_PARTS, one, other, strict=False)
            unlike = (f"{name} {_short(a)} is {_short(b)} when made again" for name, a, b in parts if a != b)
            raise RejectedError(f"call {index} of the {side}, {one[1]} `{one[0]}`: {', '.join(unlike)}")
    # The loop above ends with the shorter graph.
    num_stated, num_anew = len(stated["calls"]), len(anew["calls"])
    hold(num_stated == num_anew, f"the {side} has {num_stated} calls, and {num_anew} when made again")
    hold(stated["outputs"] == anew["outputs"], f"the {side} returns other calls than when made again")
