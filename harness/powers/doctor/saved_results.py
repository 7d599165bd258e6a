"""The results of `doctor --gpu`, saved after each check, so that the next call can continue an interrupted call.

    REPORT_DIR/doctor-gpu.json    each check with result, meaning of a failure and seconds; machine and versions
    REPORT_DIR/doctor-gpu.md      the same as a page, to send to the maintainers

The next call reads the results from a cache that only its owner may write (`runtime/disk_cache.py`), because anyone
could forge a file in REPORT_DIR. It skips the checks that passed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.doctor.plan import GPU_CHECKS, minutes
from bitproof.harness.report.markdown_text import inline, table_of
from bitproof.harness.report.write import write_atomically
from bitproof.harness.runtime.disk_cache import keep, read_cached
from bitproof.harness.validate import GROWING, read

FILE, PAGE = "doctor-gpu.json", "doctor-gpu.md"
KIND = "first-hour"
Outcome = Literal["pass", "FAIL", "NOT RUN"]


@dataclass(frozen=True, kw_only=True)
class SavedCheck:
    """A row of the saved page: a GPU check and its result.

    - `found`: the findings in words.
    - `means`, `then`: after a failure, its meaning and the first thing to do; otherwise "".
    """

    __pydantic_config__ = GROWING

    name: str
    outcome: Outcome
    found: str
    means: str
    then: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SavedResults:
    """The results of a `doctor --gpu` call so far.

    - `is_over`: whether the call has run all checks.
    - `about`: the machine, libraries, settings and code. A later call continues only from results with the same
      `about`.
    """

    __pydantic_config__ = GROWING

    about: dict[str, str]
    is_over: bool = False
    tried: tuple[SavedCheck, ...] = ()

    def plus(self, name: str, outcome: Outcome, found: str, seconds: float) -> SavedResults:
        planned = GPU_CHECKS[name]
        means, then = (planned.means, planned.then) if outcome == "FAIL" else ("", "")
        new = SavedCheck(name=name, outcome=outcome, found=found, means=means, then=then, seconds=round(seconds, 1))
        return dataclasses.replace(self, tried=(*self.tried, new))

    def write(self, report_dir: Path) -> None:
        report_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(report_dir / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        write_atomically(report_dir / PAGE, self.page())

    def keep(self, folder: Path | None) -> None:
        """Save these results in the cache `folder`, so that the next call can continue. If None, nothing is saved."""
        if folder is not None:
            keep(folder, KIND, _key(self.about), dataclasses.asdict(self))

    def page(self) -> str:
        # Values come from the machine, so they are escaped for Markdown.
        lines = [f"- {inline(name)}: {inline(value)}" for name, value in self.about.items()]
        rows: list[tuple[str, ...]] = [
            (
                x.outcome,
                x.name,
                f"{x.seconds:g}",
                _planned(x.name),
                x.found,
                "; then: ".join(filter(None, (x.means, x.then))),
            )
            for x in self.tried
        ]
        reached = {x.name for x in self.tried}
        left = tuple(name for name in GPU_CHECKS if name not in reached)
        # An interrupted call leaves the remaining checks in the page, in their order.
        rows += [("not reached", name, "", _planned(name), "", "") for name in left]
        table = table_of(["", "check", "seconds", "planned", "found", "a failure means"], rows)
        ahead = f"{minutes(left)} of {minutes()} planned minutes are left" if left else "Every check was reached"
        return "\n".join(["# doctor --gpu", "", *lines, "", f"{ahead}.", "", table, ""])


def _planned(name: str) -> str:
    return str(GPU_CHECKS[name].seconds)


def _key(about: Mapping[str, str]) -> str:
    return json.dumps(about, sort_keys=True)


def earlier(folder: Path | None, about: Mapping[str, str]) -> tuple[SavedCheck, ...]:
    """Return the passed checks of an interrupted call with the same `about`, from the cache `folder`.

    Returns () if there was no such call.
    """
    value = None if folder is None else read_cached(folder, KIND, _key(about))
    try:
        found = None if value is None else read(SavedResults, value, KIND, RecordingError)
    except (ValueError, RecursionError, RecordingError):
        return ()
    # A call that ended is not continued: a new one checks everything again.
    if found is None or found.is_over or found.about != about:
        return ()
    # A check that the plan no longer has is dropped.
    return tuple(x for x in found.tried if x.outcome == "pass" and x.name in GPU_CHECKS)
