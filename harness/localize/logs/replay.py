"""A replay: a run up to a given step that logs operator calls and keeps values.

Each rank writes an archive with its log, its records' digests, and the values. torch is imported only to read values.
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
EXCHANGED, TYPES = "exchanged.json", "types.json"
# A log is text, and a damaged or hostile archive may claim any size.
_MAX_CALLS_BYTES = 4 << 30
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
SPARE_BYTES = 32 << 20
"""The most bytes of outputs that each rank keeps while it logs a step, so that a small step needs no second replay."""
RECORD = "record"
"""The name of a recorded tensor in an archive; `name_of_value` has the names of calls' values."""


class ValueSite(NamedTuple):
    """The site of a value: an output of a rank's operator call or, with `is_input`, an input of that call.

    - `call`: the call's index in the step.
    - `position`: the index among the call's outputs or inputs. Negative for another tensor that shares the written
      memory. For example, `xor_` through a view also changes the whole gradient, at -1.
    """

    rank: int
    call: int
    position: int
    is_input: bool = False


def value_at(call: Call, site: ValueSite) -> str | None:
    """Return the digest of a call's value at a site; None if the call has no such value."""
    values, at = (call.inputs if site.is_input else call.outputs), site.position
    if at < 0:
        values, at = call.aliases, -1 - at
    return values[at] if at < len(values) else None


@dataclass(frozen=True, kw_only=True)
class ValueExchange:
    """A value of the other system that replaces an output or an input of a call during a replay.

    - `site`: the call, and the output or input to replace.
    - `archives`: the folder with the other system's values.
    - `name`, `wanted`: the name of the new value in that folder, and its digest.
    - `operator`: the operator of the call.
    - `found`: the digest of the value to replace, "" for any value.
    - `reads`: the digests that the call's inputs must have; None for any inputs.
    - `in_place`: whether to overwrite the input's memory, for all later readers. Otherwise only this call gets the
      value.
    """

    site: ValueSite
    archives: Path
    name: str
    wanted: str
    operator: str
    found: str = ""
    reads: tuple[str, ...] | None = None
    in_place: bool = False


# Reasons why an exchange was not made, or parts of them.
OTHER_INPUTS = "it reads other inputs than its matching call"
OTHER_TYPE = "stands there, and the value is"
UNSTEADY = "it did not repeat what it computed"


class Exchanged(NamedTuple):
    """The outcome of a planned exchange: whether it was `done` and, if not, the reason in `not_done`.

    `found` is the digest of the value that was there before the exchange.
    """

    site: ValueSite
    done: bool
    not_done: str = ""
    found: str = ""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A request to run a system again up to `step`, and to log or change operator calls.

    - `log`: log every call of step `step`.
    - `every_step`: log the calls of all steps up to `step`.
    - `record`: the recorded tensor whose value to keep, or None.
    - `values`: the inputs and outputs of calls whose values to keep.
    - `stressed`: run with random sleeps, and with other values in uninitialized memory.
    - `spare`: a number of bytes per rank; outputs of calls are kept as long as they fit.
    - `exchanges`: values of the other system to insert in the last step.
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
        """Whether the calls of step `step` are to be logged."""
        return self.every_step or step == self.step

    def values_of(self, rank: int) -> dict[ValueSite, str]:
        """Return site -> name in the rank's archive, for each requested value of a rank."""
        return {site: name_of_value(number) for number, site in enumerate(self.values) if site.rank == rank}


def name_of_value(number: int) -> str:
    """Return the name of the `number`-th requested value in an archive."""
    return f"value{number}"


def name_of_spare(site: ValueSite) -> str:
    """Return the name in an archive of a value that was kept within the spare budget: "call7.output0"."""
    return f"call{site.call}.{'input' if site.is_input else 'output'}{site.position}"


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A request to a recording run to also log the calls that `replay` states, and to write them into `folder`."""

    replay: Replay
    folder: Path


@dataclass
class StepTrace:
    """The content of the file that a rank writes in a replay, another run of a system.

    - `calls`: the calls of all logged steps, in order.
    - `steps`: for each logged step, its number and its number of calls.
    - `records`: the records of all steps.
    - `values`: the requested values by name.
    - `spare`: further outputs, as many as fitted into a budget of bytes.
    - `types`: the dtype and shape of each digest in `calls`: `float32[2, 3]`.
    """

    calls: list[Call] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    records: Mapping[Key, Record] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    spare: dict[str, Tensor] = field(default_factory=dict)
    exchanged: list[Exchanged] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)

    def add_calls(self, step: int, calls: Iterable[Call]) -> None:
        """Append the log of a step."""
        # Indices of producers count within the step, and are converted to indices into the whole log.
        before = len(self.calls)
        self.calls += [
            call._replace(producers=tuple(None if index is None else before + index for index in call.producers))
            for call in calls
        ]
        self.steps.append((step, len(self.calls) - before))


def archive_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's archive in the folder of a replay."""
    return folder / f"rank{rank}.zip"


def archives_of(folder: Path, role: Role, number: int = 1) -> Path:
    """Return the folder for the archives of a system's `number`-th replay. It is within the search's `folder`."""
    return folder / f"{role}.archives{number}"


def write_archive(path: Path, step_trace: StepTrace) -> None:
    """Write a rank's archive atomically."""
    from bitproof.harness.capture.value import pack_value

    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed at the end, so that a rank that dies leaves no half of an archive.
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(CALLS, calls_to_text(step_trace.calls))
        archive.writestr(STEPS, json.dumps(step_trace.steps))
        archive.writestr(RECORDS, json.dumps([*step_trace.records.items()]))
        archive.writestr(EXCHANGED, json.dumps(step_trace.exchanged))
        archive.writestr(TYPES, json.dumps(step_trace.types))
        for name, value in step_trace.values.items():
            archive.writestr(name, pack_value(value))
        _write_spare(archive, {name: pack_value(value) for name, value in step_trace.spare.items()})
    partial.replace(path)


def copy_spare_values(source: Path, target: Path, sites: Sequence[ValueSite]) -> bool:
    """Copy the values at `sites`, which an earlier replay kept, from archives in `source` to archives in `target`.

    This saves a replay. Returns False, and writes nothing, if a value is missing.
    """
    found: dict[int, dict[str, memoryview]] = {}
    try:
        spare = {rank: _read_spare(archive_of(source, rank)) for rank in {site.rank for site in sites}}
    except RecordingError:
        return False
    # All values are looked up before anything is written.
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
    """Return the bytes of a compressed archive with only the calls of the archive at `path`. Baselines store such
    archives.
    """
    packed = io.BytesIO()
    # A `ZipInfo` of its own has a fixed time, so that equal calls become equal bytes.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(CALLS), _read(path, CALLS), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def read_log(path: Path) -> list[Call]:
    """Return the calls of all logged steps in an archive, in order.

    Raises RecordingError if the archive is missing or damaged.
    """
    try:
        text = _read(path, CALLS).decode()
    except UnicodeDecodeError as error:
        raise RecordingError("a log of operator calls is damaged", found=str(error), where=str(path)) from error
    return calls_from_text(text, str(path))


def read_steps(path: Path) -> list[tuple[int, int]]:
    """Return a pair (step, number of its calls) for each logged step. Raises RecordingError if these are damaged."""
    try:
        return [(int(step), int(count)) for step, count in json.loads(_read(path, STEPS))]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the steps of a replay are damaged", found=str(error), where=str(path)) from error


def step_of(path: Path, index: int) -> tuple[int, int]:
    """Return a pair: the step of the call at `index` of an archive, and the index of that step's first call.

    Raises IndexError if the archive has no such call.
    """
    begin = 0
    for step, count in read_steps(path):
        if index < begin + count:
            return step, begin
        begin += count
    raise IndexError(f"{path} has {begin} calls, and not one of index {index}")


def read_records(path: Path) -> dict[Key, Record]:
    """Return a rank's records in a replay, in order. Raises RecordingError if they are missing or damaged."""
    try:
        items = json.loads(_read(path, RECORDS))
        return {Key(*key): Record(digest, dtype, tuple(shape), *rest) for key, (digest, dtype, shape, *rest) in items}
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the records of a replay are damaged", found=str(error), where=str(path)) from error


def read_exchanged(path: Path) -> list[Exchanged]:
    """Return the outcomes of a rank's planned exchanges. Raises RecordingError if they are missing or damaged."""
    try:
        found = json.loads(_read(path, EXCHANGED))
        return [Exchanged(ValueSite(*site), done, not_done, held) for site, done, not_done, held in found]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("the exchanges of a replay are damaged", found=str(error), where=str(path)) from error


def read_types(path: Path) -> dict[str, str]:
    """Return the dtype and shape of each digest in a rank's log, such as `float32[2, 3]`.

    Raises RecordingError if they are missing or damaged.
    """
    try:
        return {str(digest): str(type_) for digest, type_ in json.loads(_read(path, TYPES)).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise RecordingError("the types of a replay are damaged", found=str(error), where=str(path)) from error


def read_value(path: Path, name: str) -> Tensor:
    """Return a value in an archive. Raises RecordingError if it is missing or damaged."""
    from bitproof.harness.capture.value import unpack_value

    return unpack_value(_read(path, name), f"{path}, {name},")


def _write_spare(archive: zipfile.ZipFile, values: Mapping[str, bytes]) -> None:
    """Write many small values into a single member of the archive.

    The member begins with a line of JSON that has each value's size by name; the bytes of all values follow.
    """
    # A member for each would take longer to write and to find than most of these values themselves. Requested values
    # may be large, so each of them has a member.
    with archive.open(SPARE, "w") as member:
        member.write(json.dumps({name: len(value) for name, value in values.items()}).encode() + b"\n")
        for value in values.values():
            member.write(value)


def _read_spare(path: Path) -> dict[str, memoryview]:
    """Return the values kept within the spare budget, by name. Raises RecordingError if they are missing or damaged."""
    packed = _read(path, SPARE)
    found, begin = dict[str, memoryview](), packed.find(b"\n") + 1
    try:
        sizes, content = json.loads(packed[:begin]), memoryview(packed)
        for name, size in sizes.items():
            found[name] = content[begin : begin + size]
            begin += size
        # A negative size would move `begin` back, so that the sum may still be right.
        if begin != len(packed) or min(sizes.values(), default=0) < 0:
            raise ValueError(f"sizes for {begin} bytes, and {len(packed)} of them")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError("the values of a replay are damaged", found=str(error), where=str(path)) from error
    return found


def _read(path: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            facts = archive.getinfo(member)
            # Other methods need more memory than their sizes show.
            if facts.compress_type not in _METHODS:
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
                # Without a size it would unpack everything, however much, and cut it afterwards.
                content = opened.read(facts.file_size)
            if len(content) != facts.file_size:
                raise EOFError(f"{len(content)} bytes of {facts.file_size}")
            return content
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise RecordingError(f"a replay left no {member}", found=str(error), where=str(path)) from error
