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
EXCHANGED = "exchanged.json"
_MAX_CALLS_BYTES = 4 << 30
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
SPARE_BYTES = 32 << 20
"""What second runs that log a step keep, on each rank, of what calls gave: a small step's values need no replay."""
RECORD = "record"
"""The name under which a replay leaves a recorded tensor; `name_of_output` has those of calls' outputs."""


class ValueSite(NamedTuple):
    """One output, or one input, of one operator call, the `call`-th of a rank's step."""

    rank: int
    call: int
    position: int
    is_input: bool = False


@dataclass(frozen=True, kw_only=True)
class ValueExchange:
    """A value of the other system, put in place of what a call computed or is about to read.

    The value is in the other system's archive in the folder `archives`, under `name`, and has the digest `wanted`.
    `operator` is the call's, `found` the digest of what stands at the site without the exchange, "" for any. With
    `reads`, the exchange only takes place if the call reads inputs of these digests. An input is written `in_place` if
    a call that writes in place is missing before it; otherwise only this call reads the value.
    """

    site: ValueSite
    archives: Path
    name: str
    wanted: str
    operator: str
    found: str = ""
    reads: tuple[str, ...] | None = None
    in_place: bool = False


class Exchanged(NamedTuple):
    """What became of one exchange: `done`, or `not_done` says why not; `found` is the digest that stood there."""

    site: ValueSite
    done: bool
    not_done: str = ""
    found: str = ""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay leaves of its last step: with `log` every call, and the values of a record and of calls.

    With `every_step` the log has the calls of all steps; `stressed` lets the replay run as a stressed run does. Beside
    what is asked for, each rank leaves the first values that its calls gave, as many as fit into `spare` bytes.
    `exchanges` are made in the last step.
    """

    step: int
    log: bool = False
    record: Key | None = None
    values: tuple[ValueSite, ...] = ()
    every_step: bool = False
    stressed: bool = False
    spare: int = 0
    exchanges: tuple[ValueExchange, ...] = ()

    def watches(self, step: int) -> bool:
        """Whether a step's calls are watched."""
        return self.every_step or step == self.step

    def values_of(self, rank: int) -> dict[ValueSite, str]:
        """The values that a rank keeps, with the name of each in the archive."""
        return {site: name_of_value(number) for number, site in enumerate(self.values) if site.rank == rank}


def name_of_value(number: int) -> str:
    """The name in the archive of the `number`-th value that a replay was asked for."""
    return f"value{number}"


def name_of_spare(site: ValueSite) -> str:
    """The name in the archive of a value that was not asked for."""
    return f"call{site.call}.{'input' if site.is_input else 'output'}{site.position}"


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
    exchanged: list[Exchanged] = field(default_factory=list)

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
        archive.writestr(EXCHANGED, json.dumps(step_trace.exchanged))
        for name, value in step_trace.values.items():
            archive.writestr(name, pack_value(value))
        _write_spare(archive, {name: pack_value(value) for name, value in step_trace.spare.items()})
    partial.replace(path)


def hand_on(source: Path, target: Path, sites: Sequence[ValueSite]) -> bool:
    """Leave in one folder of archives what a replay that is asked for these values leaves; False where it must run.

    That is where the replay whose archives lie in `source` did not leave them unasked.
    """
    found: dict[int, dict[str, memoryview]] = {}
    try:
        spare = {rank: _read_spare(archive_of(source, rank)) for rank in {site.rank for site in sites}}
    except RecordingError:
        return False
    for number, site in enumerate(sites):
        if (value := spare[site.rank].get(name_of_spare(site))) is None:
            return False
        found.setdefault(site.rank, {})[name_of_value(number)] = value
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


def read_exchanged(path: Path) -> list[Exchanged]:
    """What became of a rank's exchanges. Raises RecordingError when that is missing or damaged."""
    try:
        found = json.loads(_read(path, EXCHANGED))
        return [Exchanged(ValueSite(*site), done, not_done, held) for site, done, not_done, held in found]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the exchanges of a replay are damaged", found=str(error), where=str(path)) from error


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
