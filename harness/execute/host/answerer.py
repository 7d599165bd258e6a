"""Answers every kind of request, in a host process.

Ranks are forked from this process, or from a stage: a forked process that traces a step (`execute/host/runners.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, assert_never, cast

from bitproof.harness.capture.manifest import build_manifest
from bitproof.harness.capture.rank_fingerprint import facts_of_process
from bitproof.harness.capture.recording_files import join_parts
from bitproof.harness.compare.bits import ComparedBits
from bitproof.harness.compare.chunked import agreed_by_ranks
from bitproof.harness.errors import RankError, RecordingError
from bitproof.harness.execute.host.programs import precompile_step, read_precompiled
from bitproof.harness.execute.host.runners import Runner
from bitproof.harness.execute.host.stage import Send, Stage, StagePlace
from bitproof.harness.execute.instruments.stopwatch import throughput_of
from bitproof.harness.execute.requests import (
    ARCHIVE,
    VALUES,
    AnyRequest,
    BitsRequest,
    CallAnswer,
    CallRequest,
    ClosenessRequest,
    FingerprintRequest,
    LocalRunRequest,
    Machine,
    MachineRequest,
    PlaceAnswer,
    PlaceRequest,
    PrecompileRequest,
    RankFingerprint,
    RankSlots,
    Request,
    RunAnswer,
    RunRequest,
    StepAnswer,
    StepRequest,
)
from bitproof.harness.execute.save_and_resume import join_halves
from bitproof.harness.execute.status_messages import Done, End, PreparedGraph, RunSeconds
from bitproof.harness.localize.logs.replay import archive_of, read_value
from bitproof.harness.machine.determinism import describe_changes, first_changed, set_determinism
from bitproof.harness.machine.gpus import num_gpus, visible_gpus
from bitproof.harness.operators.crossings import find_deadlocks
from bitproof.harness.options import OnEvent
from bitproof.harness.records import Closeness, GraphIdentity, Meeting, PassSettings
from bitproof.harness.runtime.sources import Installation

A = TypeVar("A")

_PLACEMENT_HASH = "placement_sha256"
"""The key under which a system's facts in the manifest have the hash of its parameters' placements."""


class Answerer:
    """Answers requests in the host process, and passes events to `send`.

    - `hangup`: a file descriptor that hangs up when the sender of the requests stops waiting.
    - `fingerprint`: the identity of this process's code. If None, no graph is cached on disk.
    """

    def __init__(self, send: OnEvent, hangup: int | None = None, fingerprint: Installation | None = None) -> None:
        self._send = send
        self._hangup = hangup
        self._runner = Runner(send, hangup, fingerprint)

    def answer(self, request: Request[A]) -> A:
        return cast(A, self._answer(cast(AnyRequest, request)))

    def close(self) -> None:
        self._runner.close()

    def _answer(self, request: AnyRequest) -> object:
        match request:
            case MachineRequest():
                return Machine(gpus=num_gpus())
            case FingerprintRequest():
                return RankFingerprint(facts=facts_of_process(), gpus=visible_gpus() if request.names_gpus else ())
            case RunRequest():
                return self._run(request)
            case LocalRunRequest():
                return self._runner.run(request.run, request.rank_slots)
            case BitsRequest():
                return compare_bits(request)
            case ClosenessRequest():
                return measure_closeness(request)
            # The remaining requests trace, or may run a user's or compiled code, so each gets a process of its own.
            case CallRequest():
                return self._in_stage(request, "the answer", lambda send: _call(request))
            case PrecompileRequest():
                what = f"the precompiled step of {request.case.name}"
                return self._in_stage(
                    request,
                    what,
                    lambda send: precompile_step(request, lambda at: send(StagePlace(at))),
                    request.timeout,
                )
            case StepRequest():
                return self._in_stage(
                    request, "the precompiled step", lambda send: _read_step(request), request.timeout
                )
            case PlaceRequest():
                log = request.logs / "placements.log"
                return self._in_stage(request, "the plan", lambda send: _place(request), request.timeout, log)
        assert_never(request)

    def _run(self, request: RunRequest) -> RunAnswer:
        try:
            # A run that is resumed has two halves, any other a single one.
            *before, (end, parts) = [self._run_ranks(half, at) for at, half in enumerate(request.halves)]
            return finish_run(request, [end], parts, [part for _, earlier in before for part in earlier])
        finally:
            shutil.rmtree(request.work, ignore_errors=True)

    def _run_ranks(self, request: RunRequest, number: int) -> tuple[End, list[Path]]:
        # `number` keeps the files of the two halves of a resumed run apart.
        part, ranks = (
            str(request.work / f"parts{number}" / "rank{rank}.parquet"),
            range(request.case.parallelism.world_size),
        )
        rank_slots = RankSlots(ranks=tuple(ranks), part=part, store=str(request.work / f"store{number}"))
        end = self._runner.run(request, rank_slots)
        if error := end.error(request.system, request.case_timeout):
            raise error
        return end, [Path(part.format(rank=rank)) for rank in ranks]

    def _in_stage(
        self,
        request: Request[A],
        what: str,
        work: Callable[[Send], A],
        limit: float = float("inf"),
        log: Path | None = None,
    ) -> A:
        stage = Stage(lambda asked, send, hangup: work(send), log=log)
        try:
            return stage.ask(request, self._send, what=what, timeout=limit, case_timeout=limit, hangup=self._hangup)
        finally:
            stage.close()


def _call(request: CallRequest) -> CallAnswer:
    # Imported here: only a command that asks for the standalone files of a shrunk case, for example, loads the code
    # that writes them.
    module, _, name = request.function.partition(":")
    return CallAnswer(values=getattr(importlib.import_module(module), name)(request.case, **request.values))


def _read_step(request: StepRequest) -> StepAnswer:
    import torch

    set_determinism(request.case.seed)
    found = read_precompiled(request.case, torch.device(request.device), request.step, request.system)
    return StepAnswer(artifact=found.artifact)


def _place(request: PlaceRequest) -> PlaceAnswer:
    from bitproof.harness.systems.autoplace import place

    set_determinism(request.case.seed)
    plan, placed = place(request.case)
    return PlaceAnswer(plan=plan, placed=placed)


def finish_run(request: RunRequest, ends: list[End], parts: list[Path], before: Sequence[Path] = ()) -> RunAnswer:
    """Join the files of the ranks into the requested recording or replay, and return facts about the run.

    - `ends`: for each host process, how the run ended on its ranks, in rank order. No rank has failed.
    - `parts`: the ranks' files, in rank order.
    - `before`: the ranks' files from the first half of a run that was killed and resumed; else empty.

    Raises RankError if ranks prepared different graphs, or placed parameters differently.
    """
    # Under torchrun every host traced its own graph.
    for rank, end in enumerate(ends):
        if end.graph and ends[0].graph and end.graph.code_hash != ends[0].graph.code_hash:
            raise RankError(
                f"rank {rank} prepared another graph than rank 0",
                rank=rank,
                found=f"code hash {end.graph.code_hash}, not {ends[0].graph.code_hash}",
            )
    done = [account for end in ends for account in end.done]
    # The graph was prepared before the steps, or torch.compile captured it during the steps.
    graph = ends[0].graph or done[0].graph
    refuse_other_placements([account.system.get(_PLACEMENT_HASH) for account in done])
    if request.replay is None:
        # With a first step, records begin there: the first half was the reference's, and its records are not needed.
        if before and not request.case.first_step:
            for first, second in zip(before, parts, strict=True):
                join_halves(first, second)
        values = [part.with_suffix(VALUES) for part in parts if request.values_to_keep]
        join_recording(request, graph, done, parts, values)
        if request.watch is not None:
            keep_archives(request.watch.folder, [part.with_suffix(ARCHIVE) for part in parts])
    else:
        keep_archives(request.out, parts)
    # Two ranks that launch collectives in different orders may deadlock: only all ranks' launches show that.
    stuck = map(
        str, find_deadlocks({rank: account.queue_entries for rank, account in enumerate(done) if account.queue_entries})
    )
    races = [*(graph.races if graph else ()), *(race for rank in done for race in rank.races), *stuck]
    return RunAnswer(
        graph=graph,
        peak_mib=max((rank.peak_mib for rank in done if rank.peak_mib is not None), default=None),
        kept=next((rank.kept for rank in done if rank.kept), None),
        switches_changed=tuple(describe_changes(first_changed([rank.switches for rank in done]))),
        races=tuple(dict.fromkeys(races)),
        narrow=next((rank.narrow for rank in done if rank.narrow), None),
        # Each part of a run takes as long as its slowest rank.
        seconds=RunSeconds(
            prepare=max(end.prepare_seconds for end in ends),
            start_ranks=max(end.start_seconds for end in ends),
            steps=max(rank.seconds for rank in done),
            record=max(rank.record_seconds for rank in done),
        ),
        throughput=throughput_of(request.case, request.system, request.placement.device, done),
    )


def refuse_other_placements(hashes: Sequence[object]) -> None:
    # Sums over ranks that hold different parts of a parameter would be meaningless.
    for rank, found in enumerate(hashes):
        if found != hashes[0]:
            raise RankError(
                f"rank {rank} placed parameters otherwise than rank 0",
                rank=rank,
                expected=f"{_PLACEMENT_HASH} {hashes[0]}",
                found=str(found),
            )


def join_recording(
    request: RunRequest,
    graph: PreparedGraph | None,
    done: list[Done],
    parts: list[Path],
    values: list[Path],
) -> None:
    """Join the ranks' files into a recording: records from `parts`, kept values from `values`.

    `done` has the ranks' last reports, in rank order. Raises RecordingError if a rule for names matched no tensor on
    any rank.
    """
    # A rule is used if any rank shows its name: a stage of a pipeline, for example, has only its own layers.
    by_rank = [rank.unused_names for rank in done]
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
        determinism=done[0].determinism,
        switches=first_changed([rank.switches for rank in done]),
        graph=_identity_of(graph) if graph else None,
        fault=request.options.inject,
        systems=[rank.system for rank in done],
        stress=dataclasses.asdict(request.options.stress) if request.options.stress else None,
        values=request.values_to_keep,
        gpus=[rank.gpu for rank in done],
        gpu_environments=[rank.gpu_environment for rank in done],
        chunked=agreed_by_ranks(request.system, [rank.chunked for rank in done], request.case.parallelism.stage_ranks),
        alone=[rank for rank, account in enumerate(done) if account.is_alone],
        compiled=[rank.compiled for rank in done],
        unshown=list(dict.fromkeys(each for rank in done for each in rank.unshown)),
        shows_every_buffer=all(rank.shows_every_buffer for rank in done),
        meetings=None if request.across is None else _meetings_of(done),
    )
    join_parts(request.out, manifest, parts, values)


def _meetings_of(done: Sequence[Done]) -> list[Meeting]:
    return list(dict.fromkeys(meeting for rank in done for meeting in rank.meetings or ()))


def _identity_of(graph: PreparedGraph) -> GraphIdentity:
    passes = [PassSettings(name=entry.name, settings=entry.settings) for entry in graph.passes]
    return GraphIdentity(code_hash=graph.code_hash, generated_hash=graph.generated_hash, passes=passes)


def keep_archives(folder: Path, archives: list[Path]) -> None:
    folder.mkdir(parents=True)
    for rank, file in enumerate(archives):
        shutil.copyfile(file, archive_of(folder, rank))


def measure_closeness(request: ClosenessRequest) -> Closeness:
    from bitproof.harness.compare.closeness import measure

    return measure(request.reference, request.candidate, request.bound, step=request.step)


def compare_bits(request: BitsRequest) -> ComparedBits:
    """Compare two values bit by bit. The result's `difference` is None if the values' dtypes or shapes differ."""
    from bitproof.harness.capture.digest import digest
    from bitproof.harness.compare.bits import bit_difference, tensor_type

    reference, candidate = (read_value(file, request.name) for file in (request.reference, request.candidate))
    same_type = tensor_type(reference) == tensor_type(candidate)
    return ComparedBits(
        difference=bit_difference(reference, candidate) if same_type else None,
        digests=(digest(reference), digest(candidate)),
    )
