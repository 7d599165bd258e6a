"""A run's report: a result for each case, and facts about the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.shard import Shard
from bitproof.harness.records.faults import Score
from bitproof.harness.records.result import CaseResult


@dataclass(kw_only=True)
class Report:
    """One run: where it ran, what came of every case, and the status it ended with.

    `options` are the command line's, beyond the selection and the report folder: what a replay repeats.
    `not_run` has, by name, why each case that this machine cannot judge was left out, and `left_out` these cases, where
    no shard names them; `remarks` are what readers must know of how every case was run. `shard` says what else was
    selected, where the cases are one machine's part. `faults` is what came of putting known defects into cases, where
    the run did that, or was joined with one that did.
    """

    run_id: str
    exit_status: int
    environment: dict[str, Any]
    cases: list[CaseResult]
    options: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    faults: Score | None = None
    shard: Shard | None = None
    left_out: tuple[Case, ...] = ()
