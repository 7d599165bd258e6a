"""Paths in a run's folder, by case and role: recordings, logs, graphs and profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.case import COMPILED, TRACED, Case
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.options import ROLES, Role


@dataclass(frozen=True)
class CaseFolders:
    """A case's paths in the run folder `run_dir`. `work` is a temporary folder, removed after the run."""

    case: Case
    run_dir: Path
    work: Path

    def recording(self, role: Role, arm: str) -> Path:
        """Return the folder of a run's recording. Its name ends with the run's purpose, as in `graph.control`, unless
        `arm` is "first".
        """
        suffix = "" if arm == "first" else f".{arm}"
        return self.run_dir / "recordings" / self.case.name / f"{self.label(role)}{suffix}"

    def logs(self, role: Role) -> Path:
        return (self.run_dir / "logs" / self.case.name / self.label(role)).resolve()

    def log_files(self) -> list[str]:
        files = (self.run_dir / "logs" / self.case.name).rglob("*.log")
        return sorted((path.relative_to(self.run_dir).as_posix() for path in files), key=_by_number)

    def log_of(self, check: str) -> Path:
        return self.run_dir / "logs" / self.case.name / f"{check}.log"

    def graphs(self, role: Role) -> Path:
        """Return the folder of a system's dumped graphs. If both systems have graphs, the name of the reference's
        folder has a suffix.
        """
        twin = role == "reference" and {self.case.reference, self.case.candidate} <= {*TRACED}
        return (self.run_dir / "graphs" / f"{self.case.name}{'.reference' if twin else ''}").resolve()

    def remarks_on_graphs(self) -> list[str]:
        if {*TRACED, COMPILED} & {self.case.reference, self.case.candidate}:
            return []
        known = ", ".join((*TRACED, COMPILED))
        return [
            f"--dump-graphs wrote nothing: only the passes of the systems {known} are known, and neither "
            f"{self.case.reference} nor {self.case.candidate} is among them"
        ]

    def profile(self, role: Role) -> Path:
        return (self.work / "profile" / self.case.name / self.label(role)).resolve()

    def profiles(self) -> dict[str, Path]:
        """Return the profiles that ranks wrote on this machine in each system's first run.

        The result maps system and rank, such as `graph rank 1`, to a file.
        """
        return {
            f"{self.label(role)} rank {rank}": file
            for role in ROLES
            for rank in range(self.case.of(role).parallelism.world_size)
            if (file := self.profile(role) / f"rank{rank}.json").is_file()
        }

    def joined_profile(self) -> Path:
        return self.run_dir / "profile" / f"{self.case.name}.json"

    def label(self, role: Role) -> str:
        """Return a folder name for a role's system. If both roles have the same system, the candidate's name has a
        suffix.
        """
        label = file_name(getattr(self.case, role))
        twin = role == "candidate" and self.case.reference == self.case.candidate
        return f"{label}.candidate" if twin else label


def _by_number(path: str) -> list[str | int]:
    """Return a sort key for paths, which places rank10 after rank9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.removesuffix(".log"))]
