"""`--prove-first`: prove all cases before the first case runs, and report which outputs are equal for every input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bitproof.harness.case import Case
from bitproof.harness.checks.check import Check, Evidence
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.records import Finding, Verdict
from bitproof.harness.settings import CHECKS, setting


@dataclass(frozen=True)
class ProofOptions:
    """The option `--prove-first`: prove all cases before the first case runs."""

    prove_first: bool = setting(
        False, "--prove-first", CHECKS, "Prove each case before any runs; list what may differ."
    )


class ProofCheck(Check):
    """A check that proves all cases before the first case runs, and compares each proof with the verdict of the run."""

    name = "proof"
    Options = ProofOptions

    def __init__(self, options: ProofOptions) -> None:
        super().__init__(options)
        self._found: dict[str, ProofOutcome] = {}

    @classmethod
    def of(cls, options: ProofOptions) -> Self | None:
        return cls(options) if options.prove_first else None

    def refuse(self, options: RunOptions) -> None:
        refuse_many_ranks()

    def prepare(self, cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
        """Prove the cases, and yield lines to print: the verdict of each proof, and the outputs that may differ."""
        from bitproof.harness.powers.proofs.report import describe

        for name, found in prove_cases(cases, options, folder):
            self._found[name] = found
            yield from describe(name, found)

    def judges(self, verdict: Verdict) -> bool:
        # A proof is reported even if the run of its case failed.
        return True

    def judge(self, evidence: Evidence) -> Finding | None:
        """Return the proof of the case as a finding; None if there is no proof.

        If the run contradicts the proof, the finding has a headline.
        """
        from bitproof.harness.powers.proofs.report import contradicted, finding_of

        found = self._found.get(evidence.case.name)
        if found is None:
            return None
        if (device := evidence.result.device) not in ("cpu", "auto", "unknown"):
            why = f"proofs before a run are about the CPU's step, and this case ran on {device}"
            found = ProofOutcome(verdict=ProofVerdict.NOT_TRIED, reason=why)
        return finding_of(
            evidence.case.name, found, contradicted(evidence.result, found, injects=bool(evidence.options.inject))
        )

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        from bitproof.harness.powers.proofs.report import finding_of, read_data

        return finding_of("", read_data(data), None)

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        from bitproof.harness.powers.proofs.report import read_data

        found = read_data(data)
        if found.verdict == ProofVerdict.PROVED and (left := found.not_proved + found.refused):
            return "verdict", f"PROVED needs every output to be proved; {left} are not", str(found.verdict)
        return None


def prove_cases(cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[tuple[str, ProofOutcome]]:
    """Prove cases in a separate process, and yield (name of the case, outcome). Raises UsageError under torchrun."""
    from bitproof.harness.powers.proofs.preflight import Task, preflight_proofs

    refuse_many_ranks()
    task = Task(cases=tuple(cases), extra_passes=options.extra_passes)
    with closing(preflight_proofs(task, folder / "logs" / "prove.log", options.timeout)) as outcomes:
        for case, found in zip(cases, outcomes, strict=True):
            yield case.name, found


def refuse_many_ranks() -> None:
    from bitproof.harness.execute.transport import refuse_torchrun

    refuse_torchrun("prove", "is no work for many ranks: --prove-first proves in one process")
