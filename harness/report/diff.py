"""The result of comparing two recordings in words, as `bitproof diff` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitproof.harness.records import Comparison, Drift
from bitproof.harness.report import text

MAX_TENSORS = 20


def tell_diff(
    comparison: Comparison,
    folders: tuple[Path, Path],
    drift: list[Drift],
    manifest_differences: Iterable[tuple[str, tuple[Any, Any]]],
) -> Iterator[str]:
    """The verdict, records by kind, the first divergence, drift, and the differences of the manifests, by path."""
    yield f"{comparison.verdict}: {folders[0]} against {folders[1]}"
    if comparison.reason:
        yield comparison.reason.replace("the reference", "the first").replace("the candidate", "the second")
    for kind, compared in comparison.compared.items():
        yield f"  {kind}: {compared} compared, {comparison.mismatched[kind]} differ"
    if comparison.first_divergence:
        yield f"first divergence: {text.locate(comparison.first_divergence)}"
    yield from (f"  {line}" for line in text.drift(drift, ("in the first", "in the second"), len(drift), MAX_TENSORS))
    yield from comparison.layout_mismatches
    yield from comparison.remarks
    differences = list(manifest_differences)
    yield "the manifests agree" if not differences else "the manifests differ:"
    for path, (left, right) in differences:
        yield f"  {json.dumps(path)[1:-1]}: {json.dumps(left)} against {json.dumps(right)}"
