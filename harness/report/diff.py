"""Describe how two recordings differ, as `bitproof diff` prints it."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitproof.harness.records import Comparison, Drift
from bitproof.harness.report import text

MAX_TENSORS = 20
WIDTH = 80
_NO_VALUES = "; no values kept"
_LEAST = 12
"""The least number of characters that a line shows of each value, even after a long name."""

_CAUSES = {
    "loss": "forward of this step, or its data: what came before it agrees",
    "activation": "forward or backward of this step, in or before this module",
    "grad": "backward of this step: its losses agree",
    "grad_norm": "the norm or the clipping: the gradients agree",
    "buffer": "what writes this buffer in this step",
    "param": "the update: the gradients of this step agree",
    "optimizer": "the update: the gradients of this step agree",
    "rng": "a draw of random numbers: one side draws more often, or with another seed",
}
"""The part of the step that has the cause, by the kind of the first differing record: all earlier records agree."""


def describe_diff(
    comparison: Comparison,
    folders: tuple[Path, Path],
    drift: list[Drift],
    manifest_differences: Iterable[tuple[str, tuple[Any, Any]]],
    systems: tuple[str, str],
    case: str,
    *,
    advises: bool = True,
) -> Iterator[str]:
    """Yield the lines that `bitproof diff` prints.

    The lines show the verdict, counts by kind, the first divergence, differing tensors, and differences of manifests.
    With `advises`, they also show commands that explain a difference of environments.
    """
    differences = list(manifest_differences)
    yield f"{comparison.verdict}: {folders[0]} against {folders[1]}"
    if comparison.reason:
        # Two recordings have no roles here: they may be two runs of the same system.
        yield comparison.reason.replace("the reference", "the first").replace("the candidate", "the second")
    for kind, compared in comparison.compared.items():
        yield f"  {kind}: {compared} compared, {comparison.mismatched[kind]} differ"
    if comparison.first_divergence:
        yield f"first divergence: {text.locate(comparison.first_divergence)}"
    lines = [*text.drift(drift, ("in the first", "in the second"), len(drift), MAX_TENSORS)]
    if sum(line.endswith(_NO_VALUES) for line in lines) > 1:
        # Said once, not in every line.
        lines = [
            *(line.removesuffix(_NO_VALUES) for line in lines),
            "no values kept: `record --values PATTERN` keeps them",
        ]
    for line in lines:
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    if comparison.first_divergence:
        yield from _about_the_cause(comparison.first_divergence.kind, systems, case)
        # The same case on another machine or torch: `bitproof moved` finds the calls whose bits this changed.
        if advises and any(path.startswith(("machine.", "environment.")) for path, _ in differences):
            yield "  to see which operator calls the other environment moved, and whether they explain it all:"
            yield f"    {shlex.join(['bitproof', 'moved', case])} --python PATH --out upgrade"
            yield f"    {shlex.join(['bitproof', 'diff', *map(str, folders)])} --certificate upgrade/moved.json"
    yield from comparison.layout_mismatches
    yield from comparison.remarks
    yield "the manifests agree" if not differences else "the manifests differ:"
    for path, (left, right) in differences:
        yield _narrow(f"  {json.dumps(path)[1:-1]}: ", json.dumps(left), json.dumps(right))


def _about_the_cause(kind: str, systems: tuple[str, str], case: str) -> Iterator[str]:
    yield f"  cause: {_CAUSES.get(kind, 'not known')}"
    # Two systems can be searched here. The same system at two times needs its earlier code, or a baseline of it.
    first, second = systems
    if first != second:
        yield "  to find the call, run both:"
        yield "    " + shlex.join(["bitproof", "run", case, "--reference", first, "--candidate", second])
    else:
        yield "  to find the call, make a baseline where the first was recorded:"
        yield "    " + shlex.join(["bitproof", "accept", "-k", case, "--new", "--why", "to find the call"])
        yield "  and with its folder beside you, where the second was recorded:"
        yield "    " + shlex.join(["bitproof", "run", case, "--baseline"])


def _narrow(name: str, left: str, right: str) -> str:
    # Both values get the same room, so that a difference at the same position is visible in both.
    room = max(_LEAST, (WIDTH - len(name) - len(" against ")) // 2)
    if len(name) + len(left) + len(right) + len(" against ") > WIDTH:
        left, right = (each if len(each) <= room else f"{each[: room - 3]}..." for each in (left, right))
    return f"{name}{left} against {right}"
