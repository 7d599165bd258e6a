"""Runs a program in the new environment, while some calls return their results from the old environment.

A result is only replaced if operator, arguments, layouts and input bits of the call are the same.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from torch import Tensor

from .call_archive import Archive, read_json
from .call_events import CallEvent, Events, Listener
from .call_values import DTYPES, hold, memory, short_digest
from .watched_program import FailedProgramError, run_program


class _Exchange(Listener):
    """Replaces the results of calls whose key is in `keys` by the old environment's results.

    `kept` maps the digest of a call's inputs to its old results, which are in the file `path`.
    """

    def __init__(self, kept: dict[str, Any], path: str, keys: set[str]) -> None:
        self.kept, self.path, self.keys, self.count = kept, path, keys, 0

    def after(self, event: CallEvent) -> None:
        row = self.kept.get(event.inputs)
        if row is None or row["key"] not in self.keys:
            return
        # Only tensors are kept: a number that a call returns cannot be replaced in place.
        values = [value for value in event.values if isinstance(value, Tensor)]
        hold(len(values) == len(row["blocks"]), "results of another number")
        with open(self.path, "rb") as file:
            for value, block, (dtype, shape) in zip(values, row["blocks"], row["values"], strict=False):
                file.seek(block[0])
                content = file.read(block[1])
                hold(short_digest(content) == block[2], "a kept result is damaged")
                old = memory(content, 0).view(DTYPES[dtype]).reshape(shape)
                if old.dtype == value.dtype and old.shape == value.shape:
                    # In place, as some of the values are arguments that the call wrote.
                    value.detach().copy_(old)
        self.count += 1


class ExchangeSession:
    """Replaces results in a run by the old environment's results. Run the program under `events`, then call `end`.

    - `results`: folder with the old results; None if there are none.
    - `keys`: keys of the calls to replace.
    """

    def __init__(self, results: str | None, keys: set[str]) -> None:
        kept = {} if results is None else read_json(os.path.join(results, "results.json"))["kept"]
        self.exchange = _Exchange(kept, os.path.join(results or "", "values.bin"), keys)
        self.events = Events(self.exchange)

    def end(self, old: list[Any]) -> dict[str, Any]:
        """Compare the run with the `old` log. Returns a dict:

        - "exchanged": number of calls whose results were replaced.
        - "has_same_calls": whether the run has the same operators in the same order.
        - "moved_again" or "other": the first call that differs (see `_first_unlike_call`).
        """
        new = self.events.log
        has_same_calls = [row["op"] for row in old] == [row["op"] for row in new]
        return {"exchanged": self.exchange.count, "has_same_calls": has_same_calls, **_first_unlike_call(old, new)}


def run_exchanged(archive: Archive, results: str | None, keys: set[str]) -> dict[str, Any]:
    """Run the archive's program here, with old results for the calls `keys`, and compare it with the old run.

    Returns a dict:

    - "equal": whether all records agree.
    - "first": the first differing record in words, or "".
    - "records", "digest": number of the old run's records, and digest of the new run's records.
    - The keys that `ExchangeSession.end` returns.
    """
    head = archive.head
    session = ExchangeSession(results, keys)
    records = run_program(head["program"], head["arguments"], head["steps"], session.events)
    # Without the fifth field, the number of calls before the record, which may differ between releases of torch.
    old, new = ([row[:4] for row in rows] for rows in (head["records"], records))
    # If all common records are equal, the first difference is where the shorter list ends.
    first = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    found: dict[str, Any] = {"equal": old == new, "records": len(old), "first": ""} | session.end(head["log"])
    found["digest"] = short_digest(json.dumps(new).encode())
    if old != new:
        step, kind, name, _ = (old if first < len(old) else new)[first]
        lost = " (on one side alone)" if first >= min(len(old), len(new)) else ""
        found["first"] = f"{kind} {name} at step {step}{lost}"
    return found


def _first_unlike_call(old: list[Any], new: list[Any]) -> dict[str, Any]:
    """Return the first call of the new log that has no equal call in the old log, as a dict with two keys.

    - "moved_again": the call, if its inputs are in the old log, but with other results.
    - "other": the call, if its inputs are not in the old log.

    A key that does not apply has the value None.
    """
    # Matched by their inputs, not by position: another torch may issue additional calls in a step.
    outputs = {row["in"]: row["out"] for row in old}
    for index, row in enumerate(new):
        if row["in"] not in outputs:
            before = old[index] if index < len(old) else None
            was = "" if before is None else f"{before['op']}({before['args']})"
            return {"other": {"call": index, "now": f"{row['op']}({row['args']})", "was": was}, "moved_again": None}
        if outputs[row["in"]] != row["out"]:
            return {"other": None, "moved_again": {"call": index, "op": row["op"], "key": row["key"], "in": row["in"]}}
    return {"other": None, "moved_again": None}


def run_each(folder: str, results: str | None, sets: list[list[str]]) -> list[dict[str, Any]]:
    archive = Archive(folder)
    # Each in a process of its own, forked before the program is loaded: so no run influences the next.
    return [_forked(archive, results, set(keys)) for keys in sets]


def _forked(archive: Archive, results: str | None, keys: set[str]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            found = run_exchanged(archive, results, keys)
            status = 0
        except BaseException:
            found = {"error": "".join(traceback.format_exc().splitlines(keepends=True)[-8:]).strip()}
        finally:
            with open(writing, "w") as pipe:
                json.dump(found, pipe)
            sys.stdout.flush()
            sys.stderr.flush()
            # The child must neither return into the parent's code nor run its exit handlers.
            os._exit(status)
    os.close(writing)
    # Read before waiting: a child whose answer fills the pipe would never end.
    with open(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise FailedProgramError(json.loads(text)["error"] if text else f"its process ended with status {status}")
    return json.loads(text)
