"""A run's report: a result per case, and facts about the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.shard import Shard
from bitproof.harness.records.faults import Score
from bitproof.harness.records.result import CaseResult


@dataclass(kw_only=True)
class Report:
    """A run: its machine, every case's result, and the exit status.

    - `options`: the command line's options that a replay repeats.
    - `not_run`: for each case that this machine cannot judge, the reason, by the case's name.
    - `remarks`: sentences that apply to every case.
    - `faults`: the score of fault injection.
    - `shard`: if several machines share the cases, the number of this part, and the whole selection.
    - `left_out`: the cases in `not_run`, without the cases that `shard` already lists.
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
