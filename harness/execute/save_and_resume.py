"""Run a system in two halves, to test its checkpoints: its ranks save and are killed, and new processes resume.

The case's `resume_at` is the number of steps before the kill. Every rank calls two methods of its system:

1. `save(folder)` after that many steps. As soon as all ranks have saved, all are killed (SIGKILL).
2. `load(folder)` in a new process, on a new system from the factory.

State that was not saved is lost. In the new process, generators are seeded with the case's seed, and loaders start with
their first batch.
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
    """One half of a run that is killed and resumed.

    - First half: the system takes `at` steps and saves its state into `folder`.
    - Second half (`goes_on`): a new system loads `folder`, and takes the remaining steps.
    """

    at: int
    folder: str
    goes_on: bool = False

    def begin(self, system: Any) -> None:
        """Let the system load its saved state, if this is the second half."""
        if self.goes_on:
            with user_code("load(folder)"):
                _method(system, "load")(Path(self.folder))

    def end(self, system: Any) -> None:
        """Let the system save its state into the folder, if this is the first half. Creates the folder if necessary."""
        if not self.goes_on:
            Path(self.folder).mkdir(parents=True, exist_ok=True)  # each rank does so, as any rank may be first
            with user_code("save(folder)"):
                _method(system, "save")(Path(self.folder))


def _method(system: Any, name: str) -> Any:
    # `made` is the factory's object, which a UserSystem wraps.
    found = getattr(getattr(system, "made", system), name, None)
    if not callable(found):
        raise UsageError(
            f"a case with resume_at ends its candidate and has it go on, and that has no method {name}",
            expected="methods save(folder) and load(folder) on what the factory returns",
            found=type(getattr(system, "made", system)).__name__,
        )
    return found


def first_half(case: Case, system: str) -> tuple[Case, str]:
    """Return the case and the system of the first half.

    If the candidate must load the state that the reference saved, the first half is a run of the reference. Otherwise
    it is a run of `system` on `case`.
    """
    return (case.of("reference"), case.reference) if case.resumes_reference else (case, system)


def join_halves(first: Path, second: Path) -> None:
    """Add a rank's records from the first half of a run to the file with its records from the second half.

    `first` and `second` are the files of the halves. If both halves have stored tensor values, these are joined, too.
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
