"""A case that was made smaller: what changed, and what stands at the top of the file that shows it alone."""

from __future__ import annotations

import platform
import pprint
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bitproof.harness import __version__
from bitproof.harness.case import Case
from bitproof.harness.case.case import file_of
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report.text import blame, locate


def tell_shrunk(changes: Iterable[tuple[str, object, object]], tries: int, seconds: float) -> list[str]:
    """From what to what, setting by setting, and what it took."""
    rows = [(name, str(was), str(now)) for name, was, now in changes]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"  {name.ljust(widths[0])}  {was.rjust(widths[1])} -> {now}" for name, was, now in rows]
    took = f"{tries} tries, {seconds:.0f} s"
    return [f"shrunk in {took}:", *lines] if rows else [f"nothing could be left out: {took}"]


def tell_head(case: Case, result: CaseResult, command: str) -> str:
    """What stands at the top of the file."""
    from importlib.metadata import version

    return f"""Two training steps that should agree in every bit, and do not: {case.name}, shrunk.

`reference` is a part of {case.reference}, `candidate` the same part of {case.candidate}: what is left of both after all
calls were taken out that do not matter. In the case, {locate(result.first_divergence)} differs first.
{blame(result.first_divergence) or "No single call is to blame."}

Run it: `python FILE` exits with 1 when the two differ, and with 0 when they agree. It needs torch alone.
Written by bitproof {__version__} with torch {version("torch")} and Python {platform.python_version()}.
The case itself: {command}"""


def tell_own_systems(case: Case, result: CaseResult, command: str, extra_passes: Sequence[str]) -> str:
    """A file that holds a small case, runs a user's two systems in it, and exits with 1 where they differ."""
    values = replace(case, expected=Verdict.EQUAL.value, differs=()).to_dict()
    for side in ("reference", "candidate"):
        source, colon, name = values[side].rpartition(":")
        file = file_of(source) if colon else None
        values[side] = f"{file.resolve()}:{name}" if file else values[side]
    shown = pprint.pformat(values, width=110, sort_dicts=False)
    head = f"""Two systems that should agree in every bit, and do not: {case.name}, shrunk.

`reference` is {case.reference}, `candidate` {case.candidate}. {locate(result.first_divergence)} differs first.
{blame(result.first_divergence) or "No single call is to blame."}

Run it: `python FILE` exits with 1 when the two differ, and with 0 when they agree. It needs bitproof and what the two
systems need. Written by bitproof {__version__} with Python {platform.python_version()}.
The case itself: {command}"""
    return f"""{docstring(head)}

import bitproof

CASE = {shown}

if __name__ == "__main__":
    run = bitproof.run(
        bitproof.Case.from_dict(CASE), device={result.device!r}, control="never", extra_passes={tuple(extra_passes)!r}
    )
    print(run)
    raise SystemExit(run.report.exit_status)
"""


def docstring(text: str) -> str:
    """A text as the docstring of a file, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}\n"""'
