"""Where what a case leaves lies in its run's folder: recordings, logs, graphs and profiles, by side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.case import COMPILED, TRACED, Case
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.options import ROLES, Role


@dataclass(frozen=True)
class CaseFolders:
    """One case's places in a run's folder. `work` is a temporary folder, which ends with the run."""

    case: Case
    run_dir: Path
    work: Path

    def recording(self, role: Role, arm: str) -> Path:
        """A recording; the first run's has the plain name."""
        suffix = "" if arm == "first" else f".{arm}"
        return self.run_dir / "recordings" / self.case.name / f"{self.label(role)}{suffix}"

    def logs(self, role: Role) -> Path:
        """The folder of one side's logs."""
        return (self.run_dir / "logs" / self.case.name / self.label(role)).resolve()

    def log_files(self) -> list[str]:
        """Every log of the case, as a path within the run folder."""
        files = (self.run_dir / "logs" / self.case.name).rglob("*.log")
        return sorted((path.relative_to(self.run_dir).as_posix() for path in files), key=_by_number)

    def log_of(self, check: str) -> Path:
        """The log of a check."""
        return self.run_dir / "logs" / self.case.name / f"{check}.log"

    def graphs(self, role: Role) -> Path:
        """Where a side's graphs go; where both sides have one, the reference's says so."""
        twin = role == "reference" and {self.case.reference, self.case.candidate} <= {*TRACED}
        return (self.run_dir / "graphs" / f"{self.case.name}{'.reference' if twin else ''}").resolve()

    def remarks_on_graphs(self) -> list[str]:
        """What is to be said where no graph can be dumped."""
        if {*TRACED, COMPILED} & {self.case.reference, self.case.candidate}:
            return []
        known = ", ".join((*TRACED, COMPILED))
        return [
            f"--dump-graphs wrote nothing: only the passes of the systems {known} are known, and neither "
            f"{self.case.reference} nor {self.case.candidate} is among them"
        ]

    def profile(self, role: Role) -> Path:
        """Where the ranks of one side write what their time went into."""
        return (self.work / "profile" / self.case.name / self.label(role)).resolve()

    def profiles(self) -> dict[str, Path]:
        """What ranks wrote in both first runs, by side and rank; not what ranks of other machines did."""
        return {
            f"{self.label(role)} rank {rank}": file
            for role in ROLES
            for rank in range(self.case.of(role).parallelism.world_size)
            if (file := self.profile(role) / f"rank{rank}.json").is_file()
        }

    def joined_profile(self) -> Path:
        """The file of all of these together."""
        return self.run_dir / "profile" / f"{self.case.name}.json"

    def label(self, role: Role) -> str:
        """A folder name for one side; where both sides run one system, the candidate says so."""
        label = file_name(getattr(self.case, role))
        twin = role == "candidate" and self.case.reference == self.case.candidate
        return f"{label}.candidate" if twin else label


def _by_number(path: str) -> list[str | int]:
    """A sort key that puts rank10 behind rank9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.removesuffix(".log"))]
