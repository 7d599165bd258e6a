"""Runs in two halves: ranks are killed after their system has saved, and new processes resume from the saved state.

The system of a case with `resume_at` has two methods, which are called on every rank: `save(folder)` after that many
steps, and `load(folder)` in a new process, after the factory made a new system there. As soon as all ranks have saved,
all are killed (SIGKILL), so unsaved state is lost: in the new process, generators are seeded with the case's seed, and
loaders start with their first batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.user_code.user_frames import user_code


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The first half of a run: after `at` steps the system saves into `folder`, and the run ends.

    With `goes_on`, the second half: the system loads `folder`, and takes the remaining steps.
    """

    at: int
    folder: str
    goes_on: bool = False

    def begin(self, system: Any) -> None:
        """Load the saved state, if this is the second half."""
        if self.goes_on:
            with user_code("load(folder)"):
                _method(system, "load")(Path(self.folder))

    def end(self, system: Any) -> None:
        """If this is the first half, create the folder if necessary, and let the system save into it."""
        if not self.goes_on:
            Path(self.folder).mkdir(parents=True, exist_ok=True)  # each rank does so, as any rank may be first
            with user_code("save(folder)"):
                _method(system, "save")(Path(self.folder))


def _method(system: Any, name: str) -> Any:
    """A method of the user's system. Raises UsageError if the system has no method of that name."""
    found = getattr(getattr(system, "made", system), name, None)
    if not callable(found):
        raise UsageError(
            f"a case with resume_at ends its candidate and has it go on, and that has no method {name}",
            expected="methods save(folder) and load(folder) on what the factory returns",
            found=type(getattr(system, "made", system)).__name__,
        )
    return found


def first_half(case: Case, system: str) -> tuple[Case, str]:
    """The case and the system of the first half: usually those given, which are the candidate's.

    If the candidate loads the reference's checkpoint, they are the reference's.
    """
    return (case.of("reference"), case.reference) if case.resumes_reference else (case, system)


def join_halves(first: Path, second: Path) -> None:
    """Put a rank's records of the first half before its records of the second half, in the file of the second half.

    If the rank kept values in both halves, these are joined as well.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.torch import load_file, save_file

    # In the process that forks all ranks: pyarrow's reader must start no threads there.
    tables = [pq.ParquetFile(path).read(use_threads=False) for path in (first, second)]
    pq.write_table(pa.concat_tables(tables), second, compression="zstd")
    values = [path.with_suffix(".safetensors") for path in (first, second)]
    if all(path.exists() for path in values):
        save_file(load_file(values[0]) | load_file(values[1]), values[1])
