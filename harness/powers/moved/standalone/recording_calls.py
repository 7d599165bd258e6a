"""Records a program's distinct calls into an archive, or stores the results of some calls for use in another run."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Any

from torch import Tensor

from .call_archive import FORMAT, MAX_CALL, Archive, ValuesFile, is_drawn, write_json
from .call_events import CallEvent, Events, Listener
from .call_values import NAMES, digest_of, drawn, is_plain, measured, memory_of, short_digest
from .replaying import environment, run_call
from .watched_program import run_program


class _Recorder(Listener):
    """Stores each distinct call once: its inputs before it runs, and its results afterwards."""

    def __init__(self, values: ValuesFile) -> None:
        self.values = values
        self.calls: dict[str, dict[str, Any]] = {}
        self.lost: dict[str, str] = {}

    def before(self, event: CallEvent) -> None:
        # Calls with the same key use the same kernel in the same way: one of them stands for all.
        if event.key in self.calls or event.key in self.lost:
            return
        storages = []
        for index, (storage, low, high) in enumerate(event.storages):
            if high - low > MAX_CALL:
                self.lost[event.key] = f"{event.name}: an input of more than {MAX_CALL} bytes"
                return
            # Only the bytes between the first and the last element that the call's tensors use.
            content = ctypes.string_at(storage.data_ptr() + low, high - low) if high > low else b""
            row: dict[str, Any] = {"size": len(content), "align": event.aligned[index]}
            row["block"] = self.values.put(content)
            if row["block"] is None:
                # Above the budget a seed and a distribution are kept: a replay draws values like these, of a single
                # dtype.
                used = [t for t, place in zip(event.tensors, event.places, strict=False) if place[0] == index]
                if len({t.dtype for t in used}) > 1 or len(content) % used[0].element_size():
                    self.lost[event.key] = f"{event.name}: memory of several dtypes above the budget"
                    return
                distribution, seed = measured(used[0]), len(self.calls) % (1 << 20)
                again = drawn(used[0].dtype, len(content) // used[0].element_size(), seed, distribution)
                row |= {
                    "dtype": NAMES[used[0].dtype],
                    "seed": seed,
                    "drawn": distribution,
                    "digest": short_digest(again),
                }
            storages.append(row)
        tensors = [
            {"dtype": NAMES[t.dtype], "shape": [*t.shape], "stride": [*t.stride()], "storage": at, "offset": offset}
            for t, (at, offset) in zip(event.tensors, event.places, strict=False)
        ]
        self.calls[event.key] = {
            **{"op": event.name, "key": event.key, "args": event.args, "kwargs": event.kwargs},
            **{"storages": storages, "tensors": tensors, "settings": event.settings, "results": []},
            "state": None if event.state is None else self.values.put(event.state, always=True),
        }

    def after(self, event: CallEvent) -> None:
        call = self.calls.get(event.key)
        # Only the first call with this key has its inputs recorded, so only its results belong to them.
        if call is not None and not call["results"] and not is_drawn(call):
            call["results"] = [self.kept(value) for value in event.values]

    def kept(self, value: Any) -> dict[str, Any]:
        """Store a call's result if the budget allows it. Returns a dict:

        - "digest": digest of the result.
        - "block": its block in the values file; None if it is not stored.
        - "dtype", "shape": for a tensor only.
        """
        row: dict[str, Any] = {"digest": digest_of(value), "block": None}
        if isinstance(value, Tensor) and is_plain(value):
            row |= {"dtype": NAMES[value.dtype], "shape": [*value.shape], "block": self.values.put(memory_of(value))}
        return row


class RecordingSession:
    """Records the calls of a run into a folder. Run the program under `events`, then call `end`.

    `budget`: most bytes of values to store.
    """

    def __init__(self, folder: str, budget: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self.recorder = _Recorder(ValuesFile(os.path.join(folder, "values.bin"), budget))
        self.events = Events(self.recorder)

    def end(self, records: list[Any], program: str, arguments: list[str], steps: int) -> dict[str, Any]:
        """Write the archive of the run, with the program's `records`. Returns a dict of numbers:

        - "calls": distinct calls.
        - "drawn": calls with inputs above the budget. A replay uses random inputs for them.
        - "bytes": size of the stored values.
        """
        recorder, events = self.recorder, self.events
        recorder.values.file.flush()
        calls = [*recorder.calls.values()]
        head: dict[str, Any] = {
            **{"format": FORMAT, "environment": environment(), "program": program, "arguments": arguments},
            **{"steps": steps, "calls": calls, "log": events.log, "records": records},
            "uncollected": dict(events.uncollected) | {text: 1 for text in recorder.lost.values()},
        }
        # Written before the drawn calls run, since `Archive` reads the file.
        path = os.path.join(self.folder, "calls.json")
        write_json(path, head)
        if any(is_drawn(call) for call in calls):
            # Calls with drawn inputs had other results in the program, so they run once more on the drawn inputs.
            archive = Archive(self.folder)
            for call in filter(is_drawn, calls):
                values = run_call(archive, call)
                call["results"] = [recorder.kept(value) for value in values]
            recorder.values.file.flush()
            write_json(path, head)
        recorder.values.file.close()
        return {"calls": len(calls), "drawn": sum(map(is_drawn, calls)), "bytes": recorder.values.size}


def record(folder: str, program: str, arguments: list[str], steps: int, budget: int) -> dict[str, Any]:
    """Run a program, and record its calls into a folder, with at most `budget` bytes of values.

    Returns a dict of numbers:

    - "calls": distinct calls.
    - "drawn": calls with inputs above the budget. A replay uses random inputs for them.
    - "bytes": size of the stored values.
    """
    session = RecordingSession(folder, budget)
    records = run_program(program, arguments, steps, session.events)
    return session.end(records, program, arguments, steps)


def merge(folder: str, ranks: int, program: str, arguments: list[str], steps: int) -> dict[str, Any]:
    """Merge the archives of all ranks into an archive of their distinct calls.

    The ranks' archives are in the subfolders `0`, `1`, ... of `folder`. The merged archive has no logs and records.
    Returns the numbers that `record` returns.
    """
    # Without a budget, as each rank's archive was within its own.
    values = ValuesFile(os.path.join(folder, "values.bin"), 1 << 62)
    calls: dict[str, dict[str, Any]] = {}
    uncollected: Counter[str] = Counter()
    head: dict[str, Any] = {}
    for rank in range(ranks):
        archive = Archive(os.path.join(folder, str(rank)))
        head = head or archive.head
        uncollected.update(archive.head["uncollected"])
        for call in archive.calls:
            # Of a call that several ranks made, the first rank's values stand for all.
            if call["key"] in calls:
                continue
            for row in (*call["storages"], *call["results"]):
                if row.get("block") is not None:
                    row["block"] = values.put(archive.block(row["block"]))
            if call.get("state") is not None:
                call["state"] = values.put(archive.block(call["state"]))
            calls[call["key"]] = call
    values.file.close()
    content = {"program": program, "arguments": arguments, "steps": steps, "calls": [*calls.values()]}
    content |= {"log": [], "records": [], "uncollected": dict(uncollected)}
    write_json(os.path.join(folder, "calls.json"), head | content)
    return {"calls": len(calls), "drawn": sum(map(is_drawn, calls.values())), "bytes": values.size}


class _Keeper(Listener):
    """Stores the results of each call whose key is in `keys`, or whose digest of inputs is in `inputs`."""

    def __init__(self, values: ValuesFile, keys: set[str], inputs: set[str]) -> None:
        self.values, self.keys, self.inputs = values, keys, inputs
        self.kept: dict[str, dict[str, Any]] = {}
        self.lost = 0

    def after(self, event: CallEvent) -> None:
        if event.inputs in self.kept or not (event.key in self.keys or event.inputs in self.inputs):
            return
        values = [v for v in event.values if isinstance(v, Tensor)]
        # A result that cannot be read cannot be replaced later either.
        if not all(map(is_plain, values)):
            return
        blocks = [self.values.put(memory_of(value)) for value in values]
        # All results of a call or none: a partial exchange would mix two environments.
        if None in blocks:
            self.lost += 1
            return
        lines = [[NAMES[v.dtype], [*v.shape]] for v in values]
        self.kept[event.inputs] = {"key": event.key, "blocks": blocks, "values": lines}


class KeepingSession:
    """Stores the results of some calls of a run in the folder `out`, for use by `exchanging`."""

    def __init__(self, out: str, keys: set[str], inputs: set[str], budget: int) -> None:
        os.makedirs(out, exist_ok=True)
        self.out, self.keeper = out, _Keeper(ValuesFile(os.path.join(out, "values.bin"), budget), keys, inputs)
        self.events = Events(self.keeper)

    def end(self) -> dict[str, Any]:
        """Write the list of results to `out`. Returns a dict of numbers:

        - "kept": calls whose results were stored.
        - "lost": calls whose results exceeded the budget.
        """
        self.keeper.values.file.close()
        write_json(os.path.join(self.out, "results.json"), {"kept": self.keeper.kept})
        return {"kept": len(self.keeper.kept), "lost": self.keeper.lost}


def keep_results(folder: str, out: str, keys: set[str], inputs: set[str], budget: int) -> dict[str, Any]:
    """Run the archive's program again, and store results of some calls in the folder `out`.

    Results are stored for calls whose key is in `keys`, or whose digest of inputs is in `inputs`. Returns a dict:

    - "kept": number of calls whose results were stored.
    - "lost": number of calls whose results exceeded the budget.
    - "repeats": whether the run had the same records as the archive.
    """
    head = Archive(folder).head
    session = KeepingSession(out, keys, inputs, budget)
    records = run_program(head["program"], head["arguments"], head["steps"], session.events)
    return session.end() | {"repeats": [row[:4] for row in records] == [row[:4] for row in head["records"]]}
