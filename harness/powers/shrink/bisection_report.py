"""Presents the search for the first pass that changes bits: a table of runs, an answer in words, and bisect.json."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitproof.harness.powers.shrink.records import TRACE, Bisection
from bitproof.harness.records import SCHEMA
from bitproof.harness.report.json import divergence_to_dict
from bitproof.harness.report.text import CASE_FILE, blame, locate


def describe_probes(found: Bisection) -> Iterator[str]:
    from tabulate import tabulate

    rows = [
        (probe.applied, probe.reference, probe.verdict.value, f"{probe.seconds:.1f}")
        for probe in (*found.probes, *found.region_probes)
    ]
    headers = ("applied", "reference", "verdict", "seconds")
    yield from tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", "left", "right")).splitlines()


def describe_answer(
    found: Bisection, inject: str | None, dumped: Path | None, replay: Sequence[str], name: str
) -> Iterator[str]:
    """Yield the lines that answer a search for a pass.

    - `dumped`: the file that shows how the pass changed the graph, or None.
    - `replay`, `name`: options and name of the case, for the command that repeats the case.
    """
    if found.blamed is None:
        yield "nothing to bisect: EQUAL" if found.problem is None else f"not found: {found.problem}"
        if found.suspects:
            yield f"it is one of: {', '.join(found.suspects)}"
        return
    if found.blamed != TRACE:
        yield (
            f"{found.blamed} is to blame: the prefix that ends with {found.equal or TRACE} is EQUAL, the one that "
            f"ends with {found.blamed} is DIFFERENT"
        )
    elif inject is not None:
        yield f"no pass: the difference is there without any, tracing alone included, as {inject} is injected"
    else:
        yield "trace is to blame: the traced graph is DIFFERENT before any pass"
    if found.region:
        yield f"region: {found.region} is DIFFERENT when it alone is chunked"
    elif found.region_problem:
        yield f"region: {found.region_problem}"
    if found.divergence:
        yield f"first divergence: {locate(found.divergence)}"
        if blamed := blame(found.divergence):
            yield f"to blame in it: {blamed}"
    if dumped:
        yield f"what the pass did: {dumped}"
        # A case file selects the case already, and the case may be unknown by name.
        selection = [] if CASE_FILE in replay else ["-k", name]
        yield f"  again: {shlex.join(['bitproof', 'run', *selection, *replay, '--dump-graphs'])}"


def render(found: Bisection, name: str, status: int, inject: str | None, answer: Sequence[str]) -> str:
    """Return the text of bisect.json: the result of a search, and its `answer` in words. `name` is the case's name."""
    # An injected fault is no fault of tracing.
    is_injected = found.blamed == TRACE and inject is not None
    values = {
        "schema": SCHEMA,
        "case": name,
        "exit_status": status,
        "verdict": found.result.verdict if found.result else None,
        "pass": None if is_injected else found.blamed,
        "equal": found.equal,
        "suspects": list(found.suspects),
        "region": found.region,
        "probes": [dataclasses.asdict(probe) for probe in found.probes],
        "region_probes": [dataclasses.asdict(probe) for probe in found.region_probes],
        "first_divergence": divergence_to_dict(found.divergence),
        "problem": found.problem,
        "region_problem": found.region_problem,
        "answer": list(answer),
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"
