"""A certificate's graphs, made again from its case and compared call by call with those that it holds."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.certificate.data import Call, Certificate, Graph, Subject
from bitproof.harness.certificate.errors import require
from bitproof.harness.certificate.types import SIDES
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.graph.graph_options import GraphOptions, check_extra_passes
from bitproof.harness.prove.prove import prove_case
from bitproof.harness.runtime.sources import own_digest
from bitproof.harness.torch_versions import torch_version

LONGEST = 200
"""Characters of a difference that a message shows."""

_PARTS = [part.name for part in fields(Call) if part.name != "place"]
"""All that a call is, but for where it came from, which readers alone are shown."""


def check_retraced(
    certificate: Certificate,
    subject: Subject,
    case: Case,
    extra_passes: Sequence[str] = (),
    precompiled: Path | None = None,
) -> None:
    """Hold a certificate's graphs against those that this code makes of its case, with this torch, on this machine.

    Passes and a precompiled step are the caller's: a certificate may name some, and nothing that it names is run.
    Raises UsageError where it names others; RejectedError where it was made by something else than what is here, or
    where a call differs.
    """
    if subject.extra_passes != tuple(extra_passes) or bool(subject.precompiled) != (precompiled is not None):
        raise UsageError(
            f"the certificate of {certificate.case} was made with other options",
            expected=_options(subject.extra_passes, bool(subject.precompiled)),
            found=_options(extra_passes, precompiled is not None),
            fix="check this certificate alone, with these options, if you trust what they name",
        )
    for name, told, here in (
        ("code", subject.code, own_digest()),
        ("torch", subject.torch, torch_version()),
        ("a machine of kind", subject.machine, platform.machine()),
    ):
        require(told == here, f"its graphs cannot be made again here: made with {name} {told}, here is {here}")
    options = GraphOptions(extra_passes=tuple(extra_passes))
    check_extra_passes(options.extra_passes, case)
    is_whole = certificate.reference.is_whole_step
    try:
        found = prove_case(case, options, precompiled=precompiled, evaluate=False, follow=is_whole, in_turn=False)
    except UsageError:
        raise
    except BitproofError as error:
        require(False, f"its case gives no graphs: {str(error).splitlines()[0]}")
        return
    if found.graphs is None:
        require(False, f"its case gives no graphs: {found.reason}")
        return
    graphs = found.graphs
    if is_whole:
        update = found.update.proof if found.update else None
        require(update is not None, f"its case gives no whole step: {found.update and found.update.reason}")
        assert update is not None
        graphs = update.sides[0].graph, update.sides[1].graph
    for side, graph, anew in zip(SIDES, (certificate.reference, certificate.candidate), graphs, strict=True):
        _check_alike(side, graph, anew)


def _options(extra_passes: Sequence[str], precompiled: bool) -> str:
    told = [*(f"--extra-pass {name}" for name in extra_passes), *(["--precompiled DIR"] if precompiled else [])]
    return " ".join(told) or "none"


def _short(call: Call, part: str) -> str:
    text = str(getattr(call, part))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _check_alike(side: str, told: Graph, anew: Graph) -> None:
    """Two graphs must be the same but for the places in source that readers are shown."""
    for index, (one, other) in enumerate(zip(told.calls, anew.calls, strict=False)):
        unlike = [part for part in _PARTS if getattr(one, part) != getattr(other, part)]
        how = ", ".join(f"{part} {_short(one, part)} is {_short(other, part)} when made again" for part in unlike)
        require(not unlike, f"call {index} of the {side}, {one.op} `{one.name}`: {how}")
    num_told, num_anew = len(told.calls), len(anew.calls)
    require(num_told == num_anew, f"the {side} has {num_told} calls, and {num_anew} when made again")
    require(told.outputs == anew.outputs, f"the {side} returns other calls than when made again")
