"""`--sensitivity`: count the operator calls whose error of 1 ULP the case's comparison would notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from bitproof.harness.checks.check import Check, Evidence
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.sensitivity.records import Effort
from bitproof.harness.records import Finding
from bitproof.harness.settings import CHECKS, option, settings


@dataclass(frozen=True)
class SensitivityOptions:
    """The option `--sensitivity`: the limits of the measurement; None if no measurement was requested."""

    sensitivity: Effort | None = settings(
        None,
        option(
            "--sensitivity",
            CHECKS,
            "Measure how many operator calls each case would notice if one were off by 1 ULP, as `sensitivity` does.",
            kind=bool,
            default=False,
        ),
        read=lambda sensitivity: Effort() if sensitivity else None,
        to_options=lambda effort: {"sensitivity": effort is not None},
    )


class SensitivityCheck(Check):
    """Makes each call of a step wrong by 1 ULP, one call at a time, and counts the errors that the case notices."""

    name = "sensitivity"
    Options = SensitivityOptions

    @classmethod
    def of(cls, options: SensitivityOptions) -> Self | None:
        """Return the check for these options; None if it was not requested."""
        return None if options.sensitivity is None else cls(options)

    def refuse(self, options: RunOptions) -> None:
        """Raise UsageError under torchrun, since this check replays all ranks in one process."""
        from bitproof.harness.execute.transport import refuse_torchrun

        refuse_torchrun("sensitivity", "replays all ranks in one process")

    def judge(self, evidence: Evidence) -> Finding | None:
        """Measure a case's sensitivity in a separate process. Return None if the verdict is not the expected one."""
        from bitproof.harness.powers.sensitivity.report import finding_of
        from bitproof.harness.powers.sensitivity.sensing import Sensing, sense_apart

        if not evidence.result.as_expected:
            return None
        task = Sensing(
            case=evidence.case,
            recording=evidence.path("candidate"),
            effort=self.options.sensitivity,
            extra_passes=evidence.options.extra_passes,
            packing=evidence.packing,
        )
        return finding_of(sense_apart(task, evidence.result.device, evidence.log))

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        """Rebuild the finding from its data in a report of schema 1."""
        from bitproof.harness.powers.sensitivity.report import finding_of, read_data

        return finding_of(read_data(data))

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        """Find the first row whose counts contradict each other, such as more calls seen than tried.

        Returns (path of the row, violated rule, counts in words), or None if all rows are consistent.
        """
        from bitproof.harness.powers.sensitivity.report import read_data

        for index, row in enumerate(read_data(data).rows):
            if not row.at_once <= row.seen <= row.tried - row.blind <= row.calls - row.blind:
                found = f"{row.at_once} at once of {row.seen} seen, {row.blind} blind, {row.tried} tried of {row.calls}"
                return f"rows[{index}]", "at_once <= seen <= tried - blind, tried <= calls", found
        return None
