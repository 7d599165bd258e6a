"""The host: the one process that imports torch, prepares graphs, and forks ranks. `python -m harness.host`.

It reads one JSON request a line from standard input and answers through a pipe of its own, so that a
stray print of a library cannot damage an answer. Every answer but the last of a request is an event.

    {"request": "environment"}    versions, hardware, GPUs
    {"request": "run", ...}       one run of one system: a recording, or a replay up to one step
    {"request": "bits", ...}      how two values differ that replays left behind
    {"request": "closeness", ...} how close two recordings are in value
    {"request": "sizes", ...}     the sizes of a case's model
    {"request": "standalone", ...} a file of plain Python that shows what differs
    {"request": "drift", ...}     which tensors of two recordings differ, and by how much

It ends when standard input does, and, on Linux, when the process that started it dies.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.capture.manifest import build_manifest, environment_variables, machine
from harness.capture.selection import ALL
from harness.capture.store import join_parts, warm_up
from harness.case import Case
from harness.determinism import set_determinism
from harness.devices import Placement
from harness.errors import BitproofError, RankError, RecordingError
from harness.faults import parse_fault
from harness.graph.options import GraphOptions
from harness.localize.replay import Replay, archive_of, read_value
from harness.process import die_with_parent, output_to
from harness.ranks import Ranks
from harness.stress import Stress
from harness.worker import (
    Job,
    describe_program,
    model_sizes,
    needs_program,
    preload,
    prepare_program,
    write_standalone,
)

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run of one system. Paths are of this machine; `out` is the recording, or the folder of a replay's archives.

    `timeout` is what is left of `case_timeout`, in seconds.
    """

    case: Case
    system: str
    arm: str
    placement: Placement
    out: Path
    logs: Path
    work: Path
    timeout: float
    case_timeout: float
    inject: str | None = None
    replay: Replay | None = None
    graph_options: GraphOptions = field(default_factory=GraphOptions)
    stress: Stress | None = None
    names: dict[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RunRequest:
        """Read the request that `launch` wrote."""
        values = {name: value for name, value in values.items() if name != "request"}
        replay, stress = values.get("replay"), values.get("stress")
        return RunRequest(
            **values
            | {
                "case": Case.from_dict(values["case"]),
                "placement": Placement(**values["placement"]),
                "out": Path(values["out"]),
                "logs": Path(values["logs"]),
                "work": Path(values["work"]),
                "replay": None if replay is None else Replay.from_dict(replay),
                "graph_options": GraphOptions.from_dict(values["graph_options"]),
                "stress": None if stress is None else Stress(**stress),
                "values": tuple(values["values"]),
            }
        )

    @property
    def values_to_keep(self) -> tuple[str, ...]:
        """Patterns for the values that ranks keep: all where the case states a bound, and once is enough."""
        if self.arm != "first" or self.replay is not None:
            return ()
        return ALL if self.case.close_within is not None else self.values

    def log_of(self, rank: int) -> Path:
        """A rank's log; the first run's has the plain name."""
        suffix = "" if self.arm == "first" else f".{self.arm}"
        return self.logs / f"rank{rank}{suffix}.log"


class Host:
    """Answers requests, and keeps the last prepared graph for the same case's other runs."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self._prepared: tuple[str, Any] = ("", None)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request's answer."""
        match request["request"]:
            case "environment":
                return machine() | {"environment": environment_variables()}
            case "run":
                return self._run(RunRequest.from_dict(request))
            case "bits":
                return compare_bits(request)
            case "closeness":
                return measure_closeness(request)
            case "sizes":
                return model_sizes(Case.from_dict(request["case"]))
            case "standalone":
                options = GraphOptions(extra_passes=tuple(request["extra_passes"]))
                return write_standalone(Case.from_dict(request["case"]), options, request["step"], request["head"])
            case "drift":
                return find_drift(request)
        raise ValueError(f"unknown request {request['request']!r}")

    def _run(self, request: RunRequest) -> dict[str, Any]:
        began = time.monotonic()
        program = self._prepare(request)
        prepare_seconds = time.monotonic() - began
        parts = request.work / "parts"
        job = Job(
            case=request.case,
            system=request.system,
            placement=request.placement,
            part=str(parts / "rank{rank}.parquet"),
            timeout=max(0.0, request.timeout - prepare_seconds),
            case_timeout=request.case_timeout,
            collective_timeout=request.timeout + 60,
            fault=parse_fault(request.inject) if request.inject else None,
            replay=request.replay,
            program=program,
            graph_options=request.graph_options,
            stress=request.stress,
            names=request.names,
            values=request.values_to_keep,
        )
        self.send({"event": "start"})
        ranks = Ranks(job, request.log_of, self.send)
        try:
            done = ranks.run(request.work / "store", hangup=0)
            graph = ranks.ranks[0].graph
            files = [job.part_of(rank) for rank in range(len(done))]
            if request.replay is None:
                values = [job.values_of(rank) for rank in range(len(done)) if job.values]
                join_recording(request, graph, done, files, values)
            else:
                keep_archives(request.out, [file.read_bytes() for file in files])
        finally:
            shutil.rmtree(request.work, ignore_errors=True)
        return answer_of(graph, done, prepare_seconds=prepare_seconds, start_seconds=ranks.start_seconds)

    def _prepare(self, request: RunRequest) -> Any:
        """The graph that all ranks will run, made once. Never on CUDA: a forked rank could not use the context."""
        if not needs_program(request.system) or request.placement.device == "cuda":
            return None
        import torch

        name = json.dumps([request.case.to_dict(), request.system, request.graph_options.extra_passes], sort_keys=True)
        if self._prepared[0] != name:
            self.send({"event": "prepare"})
            self._prepared = ("", None)
            with output_to(request.logs / "trace.log"):
                try:
                    set_determinism(request.case.seed)
                    program = prepare_program(request.case, torch.device("cpu"), request.graph_options)
                except Exception:
                    traceback.print_exc()
                    raise
            self._prepared = (name, program)
            self.send({"event": "prepared", "graph": describe_program(program)})
        return self._prepared[1]


def main() -> None:
    """Answer requests until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, required=True, help="file descriptor to answer through")
    parser.add_argument("--parent", type=int, help="pid of a parent to die with")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.parent:
        die_with_parent(options.parent)
    os.set_inheritable(options.answers, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("harness").setLevel(logging.DEBUG if options.verbose else logging.INFO)

    def send(message: dict[str, Any]) -> None:
        content = memoryview(json.dumps(message).encode() + b"\n")
        while content:
            content = content[os.write(options.answers, content) :]

    preload()

    set_determinism(0)  # imports 800 modules of torch, 0.7 s; forked ranks find them there
    warm_up()

    host = Host(send)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = host.answer(request)
        except Exception as error:
            traceback.print_exc()
            send({"error": error_to_dict(error, request)})
        else:
            send({"answer": answer})


def error_to_dict(error: Exception, request: dict[str, Any]) -> dict[str, Any]:
    """An error as plain values. One of another class becomes a RankError with its traceback."""
    if not isinstance(error, BitproofError):
        error = RankError(
            f"{request.get('system', 'the host')} failed before its ranks started",
            found=f"{type(error).__name__}: {error}",
            where=", ".join(note.strip() for note in getattr(error, "__notes__", ())) or None,
            traceback="".join(traceback.format_exception(error)).rstrip(),
        )
    facts = {name: getattr(error, name) for name in ("what", "expected", "found", "where", "fix", "replay")}
    if isinstance(error, RankError):
        facts |= {"rank": error.rank, "traceback": error.traceback}
    return {"class": type(error).__name__, "facts": facts}


def join_recording(
    request: RunRequest,
    graph: dict[str, Any] | None,
    done: list[dict[str, Any]],
    parts: list[Path],
    values: list[Path],
) -> None:
    """Make one recording of the ranks' parts and, if kept, their values.

    `done` are the ranks' accounts of their end, in rank order. Raises RecordingError when names were declared that
    appeared on no rank: such a rule is stale, and may hide a gap.
    """
    by_rank = [rank.get("unused_names", ()) for rank in done]
    unused = [name for name in by_rank[0] if all(name in names for names in by_rank)]
    if unused:
        raise RecordingError(
            f"names that system {request.system} declares never appeared",
            expected="each rule to translate a name that some rank shows",
            found=", ".join(map(repr, unused)),
            fix="take the rules out, or mend them",
        )
    manifest = build_manifest(
        request.case,
        request.system,
        request.arm,
        request.placement,
        determinism=done[0]["determinism"],
        graph=_decisive(graph) if graph else None,
        fault=request.inject,
        systems=[rank["system"] for rank in done],
        stress=dataclasses.asdict(request.stress) if request.stress else None,
        values=request.values_to_keep,
    )
    join_parts(request.out, manifest, parts, values)


def _decisive(graph: dict[str, Any]) -> dict[str, Any]:
    """What decides a graph's bits: its code, and the ordered passes with their settings. No times, no counts."""
    passes = [{name: entry[name] for name in ("name", "settings")} for entry in graph["passes"]]
    return {"code_hash": graph["code_hash"], "passes": passes}


def keep_archives(folder: Path, archives: list[bytes]) -> None:
    """Put what a replay left behind, rank by rank, into its folder."""
    folder.mkdir(parents=True)
    for rank, content in enumerate(archives):
        archive_of(folder, rank).write_bytes(content)


def answer_of(
    graph: dict[str, Any] | None, done: list[dict[str, Any]], *, prepare_seconds: float, start_seconds: float
) -> dict[str, Any]:
    """What a run request is answered with."""
    return {
        "graph": graph,
        "peak_mib": max((rank["peak_mib"] for rank in done if rank.get("peak_mib") is not None), default=None),
        "kept": next((rank["kept"] for rank in done if rank["kept"]), None),
        "seconds": {
            "prepare": prepare_seconds,
            "start_ranks": start_seconds,
            "steps": max(rank["seconds"] for rank in done),
            "record": max(rank["record_seconds"] for rank in done),
        },
    }


def measure_closeness(request: dict[str, Any]) -> dict[str, Any]:
    """How close the values of two recordings are."""
    from harness.compare.closeness import measure

    return dataclasses.asdict(measure(Path(request["reference"]), Path(request["candidate"]), request["bound"]))


def find_drift(request: dict[str, Any]) -> dict[str, Any]:
    """The tensors in which two recordings differ, as `harness.compare.drift` tells them."""
    from harness.compare.drift import measure_drift

    return {"drift": measure_drift(Path(request["reference"]), Path(request["candidate"]))}


def compare_bits(request: dict[str, Any]) -> dict[str, Any]:
    """How two values differ that the replays of both systems left under `name`: None for other dtypes or shapes."""
    from harness.capture.digest import digest
    from harness.compare.bits import bit_difference, tensor_type

    values = [read_value(Path(request[role]), request["name"]) for role in ("reference", "candidate")]
    same_type = tensor_type(values[0]) == tensor_type(values[1])
    return {
        "bits": dataclasses.asdict(bit_difference(*values)) if same_type else None,
        "digests": [digest(value) for value in values],
    }


if __name__ == "__main__":
    main()
