"""A replay: a run that ends with one step and leaves behind, on each rank, what that step computed.

What a rank leaves is one archive: the log of its operator calls, the digests of what it observed, and the values
that were asked for. Loads no torch before a value is read.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import most_unpacked
from bitproof.harness.localize.logs.calls import Call, calls_from_text, calls_to_text
from bitproof.harness.records import Key, Record, Role

if TYPE_CHECKING:
    from torch import Tensor

CALLS, STEPS, RECORDS, SPARE = "calls.jsonl", "steps.json", "records.json", "spare"
_MAX_CALLS_BYTES = 4 << 30
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
SPARE_BYTES = 32 << 20
"""What second runs that log a step keep, on each rank, of what calls gave: a small step's values need no replay."""
RECORD = "record"
"""The name under which a replay leaves a recorded tensor; `name_of_output` has those of calls' outputs."""


class OutputSite(NamedTuple):
    """One output of one operator call, the `call`-th of a rank's step."""

    rank: int
    call: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay leaves of its last step: with `log` every call, and the values of a record and of outputs.

    With `every_step` the log has the calls of all steps; `stressed` lets the replay run as a stressed run does. Beside
    what is asked for, each rank leaves the first values that its calls gave, as many as fit into `spare` bytes.
    """

    step: int
    log: bool = False
    record: Key | None = None
    outputs: tuple[OutputSite, ...] = ()
    every_step: bool = False
    stressed: bool = False
    spare: int = 0

    def watches(self, step: int) -> bool:
        """Whether a step's calls are watched."""
        return self.every_step or step == self.step

    def outputs_of(self, rank: int) -> dict[tuple[int, int], str]:
        """The outputs that a rank keeps: by call and output, the name of each in the archive."""
        sites = enumerate(self.outputs)
        return {(site.call, site.output): name_of_output(number) for number, site in sites if site.rank == rank}


def name_of_output(number: int) -> str:
    """The name in the archive of the `number`-th output that a replay was asked for."""
    return f"output{number}"


def name_of_spare(call: int, output: int) -> str:
    """The name in the archive of an output that was not asked for."""
    return f"call{call}.output{output}"


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A run that records leaves in `folder`, too, what a replay would have: its archives, rank by rank."""

    replay: Replay
    folder: Path


@dataclass
class StepTrace:
    """What one rank leaves of a replay: logged calls, what it observed in all steps, values by name, and spare ones.

    `steps` has, for each logged step in order, its number and how many of the calls are its own.
    """

    calls: list[Call] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    records: Mapping[Key, Record] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    spare: dict[str, Tensor] = field(default_factory=dict)

    def add_calls(self, step: int, calls: Iterable[Call]) -> None:
        """Take in the log of one more step."""
        before = len(self.calls)
        self.calls += [
            call._replace(producers=tuple(None if index is None else before + index for index in call.producers))
            for call in calls
        ]
        self.steps.append((step, len(self.calls) - before))


def archive_of(folder: Path, rank: int) -> Path:
    """Where a rank's archive lies in the folder of a replay."""
    return folder / f"rank{rank}.zip"


def archives_of(folder: Path, role: Role, number: int = 1) -> Path:
    """Where the replays of a search leave what they are asked for: a side's first, or second, within its folder."""
    return folder / f"{role}.archives{number}"


def write_archive(path: Path, step_trace: StepTrace) -> None:
    """Write one rank's archive; it appears whole or not at all."""
    from bitproof.harness.capture.value import pack_value

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(CALLS, calls_to_text(step_trace.calls))
        archive.writestr(STEPS, json.dumps(step_trace.steps))
        archive.writestr(RECORDS, json.dumps([*step_trace.records.items()]))
        for name, value in step_trace.values.items():
            archive.writestr(name, pack_value(value))
        _write_spare(archive, {name: pack_value(value) for name, value in step_trace.spare.items()})
    partial.replace(path)


def hand_on(source: Path, target: Path, outputs: Sequence[OutputSite]) -> bool:
    """Leave in one folder of archives what a replay that is asked for these outputs leaves; False where it must run.

    That is where the replay whose archives lie in `source` did not leave them unasked.
    """
    found: dict[int, dict[str, memoryview]] = {}
    try:
        spare = {rank: _read_spare(archive_of(source, rank)) for rank in {site.rank for site in outputs}}
    except RecordingError:
        return False
    for number, (rank, call, output) in enumerate(outputs):
        if (value := spare[rank].get(name_of_spare(call, output))) is None:
            return False
        found.setdefault(rank, {})[name_of_output(number)] = value
    target.mkdir(parents=True, exist_ok=True)
    for rank, values in found.items():
        with zipfile.ZipFile(archive_of(target, rank), "w", zipfile.ZIP_STORED) as archive:
            for name, packed in values.items():
                archive.writestr(name, bytes(packed))
    return True


def packed_calls(path: Path) -> bytes:
    """An archive with the calls of another one alone: what a baseline keeps."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(CALLS), _read(path, CALLS), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def read_log(path: Path) -> list[Call]:
    """The calls in an archive, of all logged steps in order. Raises RecordingError when it is missing or damaged."""
    try:
        text = _read(path, CALLS).decode()
    except UnicodeDecodeError as error:
        raise RecordingError("a log of operator calls is damaged", found=str(error), where=str(path)) from error
    return calls_from_text(text, str(path))


def read_steps(path: Path) -> list[tuple[int, int]]:
    """Each logged step and the number of its calls. Raises RecordingError when they are missing or damaged."""
    try:
        return [(int(step), int(count)) for step, count in json.loads(_read(path, STEPS))]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the steps of a replay are damaged", found=str(error), where=str(path)) from error


def step_of(path: Path, index: int) -> tuple[int, int]:
    """The logged step in which a call of an archive was made, and where that step's calls begin."""
    begin = 0
    for step, count in read_steps(path):
        if index < begin + count:
            return step, begin
        begin += count
    raise IndexError(f"{path} has {begin} calls, and not one of index {index}")


def read_records(path: Path) -> dict[Key, Record]:
    """What a rank observed in a replay, in order. Raises RecordingError when it is missing or damaged."""
    try:
        items = json.loads(_read(path, RECORDS))
        return {Key(*key): Record(digest, dtype, tuple(shape), *told) for key, (digest, dtype, shape, *told) in items}
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the records of a replay are damaged", found=str(error), where=str(path)) from error


def read_value(path: Path, name: str) -> Tensor:
    """A value in an archive. Raises RecordingError when it is missing or damaged."""
    from bitproof.harness.capture.value import unpack_value

    return unpack_value(_read(path, name), f"{path}, {name},")


def _write_spare(archive: zipfile.ZipFile, values: Mapping[str, bytes]) -> None:
    """Write many small values into one member, after a line of JSON that has the size of each by name.

    A member for each would take longer to write, and to find again, than most of them. What a replay was asked for may
    be large, and has one.
    """
    with archive.open(SPARE, "w") as member:
        member.write(json.dumps({name: len(value) for name, value in values.items()}).encode() + b"\n")
        for value in values.values():
            member.write(value)


def _read_spare(path: Path) -> dict[str, memoryview]:
    """By name, the values that were not asked for. Raises RecordingError when they are missing or damaged."""
    packed = _read(path, SPARE)
    found, begin = dict[str, memoryview](), packed.find(b"\n") + 1
    try:
        sizes, content = json.loads(packed[:begin]), memoryview(packed)
        for name, size in sizes.items():
            found[name] = content[begin : begin + size]
            begin += size
        if begin != len(packed) or min(sizes.values(), default=0) < 0:
            raise ValueError(f"sizes for {begin} bytes, and {len(packed)} of them")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError("the values of a replay are damaged", found=str(error), where=str(path)) from error
    return found


def _read(path: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            facts = archive.getinfo(member)
            if facts.compress_type not in _METHODS:  # the others need more memory than their sizes show
                raise zipfile.BadZipFile(f"it is compressed by method {facts.compress_type}")
            most = min(_MAX_CALLS_BYTES, most_unpacked(facts.compress_size))
            if member == CALLS and facts.file_size > most:  # a baseline's may be packed
                raise RecordingError(
                    "a log of calls is too large to read",
                    expected=f"{most} bytes at most",
                    found=f"{facts.file_size} bytes",
                    where=str(path),
                )
            with archive.open(facts) as opened:
                content = opened.read(facts.file_size)  # without a size it would unpack more than that, and cut it
            if len(content) != facts.file_size:
                raise EOFError(f"{len(content)} bytes of {facts.file_size}")
            return content
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise RecordingError(f"a replay left no {member}", found=str(error), where=str(path)) from error
