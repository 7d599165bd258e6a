"""A case that was made smaller: what changed, and what stands at the top of the file that shows it alone."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from bitproof.harness import __version__
from bitproof.harness.case import Case
from bitproof.harness.records import CaseResult
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
