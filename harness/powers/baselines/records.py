"""The result of comparing a system's recording with its baseline."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from bitproof.harness.records import BlamedCall, Count, Drift
from bitproof.harness.validate import GROWING


class BaselineStatus(enum.StrEnum):
    """A system's recording compared with its baseline, an earlier recording of the same system on the same case.

    EQUAL and DRIFTED need a baseline from the same environment, which is everything that can affect a bit, except the
    code. With a baseline from another environment, a recording is NOT COMPARABLE. MISSING replaces NOT COMPARABLE and
    NO BASELINE if the command requires a baseline of this environment. UNVERIFIED means that evidence is missing.
    """

    EQUAL = "EQUAL"
    DRIFTED = "DRIFTED"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NO_BASELINE = "NO BASELINE"
    MISSING = "MISSING"
    UNVERIFIED = "UNVERIFIED"


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A system's recording compared with its baselines.

    - `path`: folder of the baseline; None if there is none.
    - `reasons`: why the status is not EQUAL.
    - `compared`, `mismatched`: numbers of records.
    - `tensors_drifted`: number of tensors that differ. `drift` describes the first few of them.
    - `call`: first operator call whose output differs from the baseline's, if known.
    """

    __pydantic_config__ = GROWING

    status: BaselineStatus
    path: str | None = None
    reasons: list[str] = field(default_factory=list)
    compared: Count = 0
    mismatched: Count = 0
    tensors_drifted: Count = 0
    drift: list[Drift] = field(default_factory=list)
    call: BlamedCall | None = None
