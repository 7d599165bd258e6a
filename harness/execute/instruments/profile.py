"""Profiles of a run, as a trace for Perfetto and chrome://tracing.

- torch's profiler writes a file per rank, with all operators, collectives and waits.
- The entries of a file are grouped by phases: joining groups, making the system, each step, each digest, and the wait
  for the last rank.
- The files of both systems' first runs are joined. Each rank of each system is a process of the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitproof.harness.case import Kind

if TYPE_CHECKING:
    import torch

    Observe = Callable[[Kind, str, torch.Tensor], None]

NANOSECONDS = 1000  # in a microsecond, the unit of a trace's times


@contextmanager
def profiled(file: Path | None) -> Iterator[None]:
    """Context whose code is profiled. The profile is written to `file` at the end, unless an error occurs.

    Does nothing if `file` is None or its folder does not exist.
    """
    # Only profiles on rank 0's machine are joined. On other machines the folder is missing, and nothing is written.
    if file is None or not file.parent.is_dir():
        yield
        return
    from torch.profiler import profile

    with profile() as profiler:
        yield
    profiler.export_chrome_trace(str(file))


def phase(name: str) -> AbstractContextManager[Any]:
    """Context that appears in a profile under the name `name`."""
    from torch.profiler import record_function

    return record_function(name)


def showing_digests(observe: Observe) -> Observe:
    def shown(kind: Kind, name: str, tensor: torch.Tensor) -> None:
        with phase(f"digest {kind} {name}"):
            observe(kind, name, tensor)

    return shown


def join_profiles(files: Mapping[str, Path], out: Path) -> None:
    """Join several traces into the file `out`. `files` maps names to traces: each trace becomes a process with its
    name."""
    events: list[dict[str, Any]] = []
    for number, (name, file) in enumerate(files.items()):
        trace = json.loads(file.read_text(encoding="utf-8"))
        # The rank's process has the named phases. Events with other process ids are left out.
        own = {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        # Each file's times count from its own base.
        since = trace.get("baseTimeNanoseconds", 0) / NANOSECONDS
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        events += [
            event | {"pid": number, "ts": event["ts"] + since}
            for event in trace["traceEvents"]
            if event.get("ph") != "M" and event.get("pid") in own and "ts" in event
        ]
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
