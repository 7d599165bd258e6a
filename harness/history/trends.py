"""Results of nights, case by case."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bitproof.harness.case.select import compile_expression
from bitproof.harness.errors import UsageError
from bitproof.harness.history.database import Night, Outcome
from bitproof.harness.printable import one_line
from bitproof.harness.records import Score, Throughput, Verdict
from bitproof.harness.report import text

DEFINITIONS = {
    "since": "the first night of the current result",
    "flake rate": "share of nights, after a case's first, on which its result is another than the night before",
    "unsure": "share of nights on which it was NONDETERMINISTIC, UNVERIFIED or ERROR",
    "slower": "last seconds over the median of the nights before",
}
UNSURE = (Verdict.NONDETERMINISTIC, Verdict.UNVERIFIED, Verdict.ERROR)
CHANGES_EVERY_NIGHT = "commit"
MAX_VALUE_CHARS = 60


@dataclass(frozen=True)
class Trend:
    """One case over the nights, for two systems in one environment.

    `by_night` has an entry for every night, None if it did not run. `label` is its name and, if the case has several
    trends, what distinguishes this one.
    """

    name: str
    nights: tuple[Night, ...]
    by_night: tuple[Outcome | None, ...]
    label: str = ""
    place: Mapping[str, str] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[Outcome]:
        """The nights on which the case was run, oldest first; never empty."""
        return [outcome for outcome in self.by_night if outcome is not None]

    @property
    def last(self) -> Outcome:
        """The newest."""
        return self.outcomes[-1]

    @property
    def as_expected(self) -> float:
        """Share of nights with the expected verdict."""
        return statistics.mean(outcome.as_expected for outcome in self.outcomes)

    @property
    def flake_rate(self) -> float:
        """Share of nights, after the first, on which the result is another than the night before."""
        results = [_result(outcome) for outcome in self.outcomes]
        turns = [before != after for before, after in itertools.pairwise(results)]
        return statistics.mean(turns) if turns else 0.0

    @property
    def flaky(self) -> tuple[Night, Night] | None:
        """The newest two runs of one commit in one environment with different results, the older one first.

        A run that names no commit, or one whose files were changed since, is like no other. What came later, good or
        bad, never takes this back.
        """
        last: dict[str, tuple[Night, tuple[Verdict, bool]]] = {}
        found = None
        for night, outcome in zip(self.nights, self.by_night, strict=True):
            commit = night.environment.get(CHANGES_EVERY_NIGHT)
            if outcome is None or not commit or str(commit).endswith("-dirty"):
                continue
            same, result = json.dumps(night.environment, sort_keys=True), _result(outcome)
            before = last.get(same)
            if before is not None and before[1] != result:
                found = (before[0], night)
            last[same] = night, result
        return found

    @property
    def unsure(self) -> float:
        """Share of nights on which the case proved nothing."""
        return statistics.mean(outcome.verdict in UNSURE for outcome in self.outcomes)

    @property
    def since(self) -> Night:
        """The first night of the current streak of one result."""
        first = None
        for night, outcome in zip(reversed(self.nights), reversed(self.by_night), strict=True):
            if outcome is not None and _result(outcome) != _result(self.last):
                break
            first = night if outcome is not None else first
        assert first is not None
        return first

    @property
    def median_seconds(self) -> float | None:
        """Of the nights before the last; None where there is none."""
        before = [outcome.seconds for outcome in self.outcomes[:-1]]
        return statistics.median(before) if before else None

    @property
    def slower(self) -> float | None:
        """The last night's seconds over the median of those before."""
        return self.last.seconds / self.median_seconds if self.median_seconds else None

    @property
    def speeds(self) -> list[Throughput | None]:
        """The candidate's throughput by night; None where it is not known."""
        return [None if outcome is None else outcome.throughput.get("candidate") for outcome in self.by_night]

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        last = self.last
        return {
            "name": self.name,
            "label": self.label,
            "reference": last.reference,
            "candidate": last.candidate,
            "environment": dict(self.place),
            "throughput": {side: asdict(found) for side, found in last.throughput.items()},
            "step_seconds_by_night": [speed and speed.step_seconds for speed in self.speeds],
            "tokens_per_second_by_night": [speed and speed.tokens_per_second for speed in self.speeds],
            "mfu_by_night": [speed and speed.mfu for speed in self.speeds],
            "commits": [commit_of(night) for night in self.nights],
            "family": last.family,
            "verdict": last.verdict.value,
            "expected": last.expected,
            "last_as_expected": last.as_expected,
            "first_divergence": last.first_divergence or None,
            "nights": len(self.outcomes),
            "as_expected": self.as_expected,
            "flake_rate": self.flake_rate,
            "flaky": [night.run_id for night in self.flaky] if self.flaky else None,
            "unsure": self.unsure,
            "since": self.since.run_id,
            "seconds": last.seconds,
            "median_seconds": self.median_seconds,
            "slower": self.slower,
            "verdicts": [None if outcome is None else outcome.verdict.value for outcome in self.by_night],
            "seconds_by_night": [None if outcome is None else outcome.seconds for outcome in self.by_night],
        }


@dataclass(frozen=True)
class Change:
    """Something of the machine or its versions that is another than the night before."""

    night: Night
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.night.time:%Y-%m-%d}: {self.what} {self.before} -> {self.after}"


def trends_of(nights: Sequence[Night], expression: str | None = None) -> list[Trend]:
    """A trend a case, in the newest night's order; cases that it did not run come last.

    Raises UsageError when there are no nights, or `expression`, in -k syntax, selects no case.
    """
    families: dict[str, str] = {}
    for night in reversed(nights):
        for name, outcome in night.outcomes.items():
            families.setdefault(name, outcome.family)
    if not families:
        raise UsageError("the history holds no results yet", fix="add a run with `bitproof history add RUN_DIR`")
    names = list(families)
    if expression and expression.strip():
        evaluate = compile_expression(expression)
        names = [name for name, family in families.items() if evaluate(_matcher(name, family))]
    if not names:
        known = ", ".join(families)
        raise UsageError("no case matches the expression", expected=f"one of {known}", found=f"-k {expression!r}")
    return [trend for name in names for trend in _trends_of_case(name, nights)]


PLACE = ("device", "backend", "torch", "cpu", "gpu_models")
"""What of a night's environment, with the two systems, makes a trend of its own: results elsewhere are others."""


def commit_of(night: Night) -> str | None:
    """The commit that a night ran, where it names one."""
    commit = night.environment.get(CHANGES_EVERY_NIGHT)
    return commit if isinstance(commit, str) else None


def _trends_of_case(name: str, nights: Sequence[Night]) -> list[Trend]:
    """A case's trends, the one that ran last first: one for each pair of systems in each environment."""
    runs = [(night, outcome) for night in nights if (outcome := night.outcomes.get(name)) is not None]
    newest = next((known for _, outcome in reversed(runs) if (known := _systems(outcome))), "")
    places: dict[str, dict[str, str]] = {}
    key_of: dict[str, str] = {}
    for night, outcome in reversed(runs):
        place = {"systems": _systems(outcome) or newest}
        place |= {part: _short(night.environment[part]) for part in PLACE if night.environment.get(part)}
        key_of[night.run_id] = json.dumps(place, sort_keys=True)
        places.setdefault(key_of[night.run_id], place)
    varying = [part for part in ("systems", *PLACE) if len({place.get(part) for place in places.values()}) > 1]
    made = []
    for key, place in places.items():
        told = ", ".join(
            place.get(part, "none") if part == "systems" else f"{part} {place.get(part)}" for part in varying
        )
        by_night = tuple(night.outcomes[name] if key_of.get(night.run_id) == key else None for night in nights)
        made.append(Trend(name, tuple(nights), by_night, f"{name} ({told})" if told else name, place))
    return made


def _systems(outcome: Outcome) -> str | None:
    """Both systems, in words; None where they are not known."""
    return f"{_short(outcome.reference)} / {_short(outcome.candidate)}" if outcome.reference else None


def changes_of(nights: Sequence[Night]) -> list[Change]:
    """Every change of the environment from one night to the next, except for the commit; and every change of the score
    between nights with injected faults.
    """
    found = []
    for before, after in itertools.pairwise(nights):
        old, new = (dict(text.flatten(night.environment)) for night in (before, after))
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name) and name != CHANGES_EVERY_NIGHT:
                found.append(Change(after, name, *(_short(values.get(name)) for values in (old, new))))
    for (_, before_score), (night, score) in itertools.pairwise(scores_of(nights)):
        old, new = _told(before_score), _told(score)
        found += [Change(night, name, old[name], new[name]) for name in old if old[name] != new[name]]
    return sorted(found, key=lambda change: change.night.time)


def scores_of(nights: Sequence[Night]) -> list[tuple[Night, Score]]:
    """The nights with injected faults, and their scores."""
    return [(night, night.score) for night in nights if night.score is not None]


def _told(score: Score) -> dict[str, str]:
    """The text of a change of a score."""
    return {
        "faults killed": f"{score.killed} of {score.faults}",
        "equivalents flagged": f"{score.flagged} of {score.equivalents}",
        "blame right in module and direction": "{} of {}".format(*score.places),
        "blame right in operator": "{} of {}".format(*score.operators),
        "blame right in rank": "{} of {}".format(*score.ranks),
    }


def _result(outcome: Outcome) -> tuple[Verdict, bool]:
    """What makes two nights alike: the verdict, and whether it is the expected one, in the expected kinds."""
    return outcome.verdict, outcome.as_expected


def _matcher(name: str, family: str) -> Any:
    return lambda word: any(word.lower() in known.lower() for known in (name, family))


def _short(value: Any) -> str:
    """One line of a value that came from a file."""
    line = "none" if value is None else one_line(str(value))
    return line if len(line) <= MAX_VALUE_CHARS else f"{line[:MAX_VALUE_CHARS]}..."
