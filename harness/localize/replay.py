"""A replay: a run that ends with one step and leaves behind, on each rank, what that step computed.

What a rank leaves is one archive: the log of its operator calls, and the values that were asked for.
Loads no torch before a value is read.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import RecordingError
from harness.localize.calls import Call, calls_from_text, calls_to_text
from harness.records import Key

if TYPE_CHECKING:
    from torch import Tensor

CALLS = "calls.jsonl"
RECORD, OUTPUT = "record", "output"
"""The names under which a replay leaves values: of a recorded tensor, and of a call's output."""


class OutputSite(NamedTuple):
    """One output of one operator call, the `call`-th of a rank's step."""

    rank: int
    call: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay leaves of its last step: with `log` every call, and the values of a record and of an output."""

    step: int
    log: bool = False
    record: Key | None = None
    output: OutputSite | None = None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Replay:
        """Read what a request holds."""
        record, output = values["record"], values["output"]
        return Replay(
            step=values["step"],
            log=values["log"],
            record=Key(*record) if record else None,
            output=OutputSite(*output) if output else None,
        )


def archive_of(folder: Path, rank: int) -> Path:
    """Where a rank's archive lies in the folder of a replay."""
    return folder / f"rank{rank}.zip"


def write_archive(path: Path, calls: Sequence[Call], values: Mapping[str, Tensor]) -> None:
    """Write one rank's archive; it appears whole or not at all."""
    from harness.capture.value import pack_value

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(CALLS, calls_to_text(calls))
        for name, value in values.items():
            archive.writestr(name, pack_value(value))
    partial.replace(path)


def read_log(path: Path) -> list[Call]:
    """The calls in an archive. Raises RecordingError when it is missing or damaged."""
    return calls_from_text(_read(path, CALLS).decode(), str(path))


def read_value(path: Path, name: str) -> Tensor:
    """A value in an archive. Raises RecordingError when it is missing or damaged."""
    from harness.capture.value import unpack_value

    return unpack_value(_read(path, name), f"{path}, {name},")


def _read(path: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise RecordingError(f"a replay left no {member}", found=str(error), where=str(path)) from error
