"""Run cases on the ranks that torchrun made, instead of starting any: how a run outgrows one machine.

Rank 0 leads: it runs the very code of `launch`, but its requests go to all ranks, through torchrun's
store, where otherwise a host would fork some. The others follow until they are told each case's
result. Recordings travel to rank 0 as the bytes of their files; what arrives is checked like any file.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.case import Case
from harness.determinism import ENVIRONMENT
from harness.devices import Placement, lease_gpus, place
from harness.errors import CaseError, RankError
from harness.failures import Failure, blame, error_of_failure, error_of_hang, failure_of_exception
from harness.process import output_to
from harness.records import CaseResult, Verdict

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from harness.host import RunRequest
    from harness.run_options import RunOptions

OnEvent = Callable[[dict[str, Any]], None]

# After a case's time is up, how long rank 0 waits for ranks to say how they failed.
_MARGIN = 15.0
# Followers outwait rank 0, which may still compare when they are done.
_PATIENCE = timedelta(hours=1)


def is_torchrun() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))


def run_cases(cases: list[Case], options: RunOptions, run_dir: Path, on_event: OnEvent) -> Iterator[CaseResult]:
    """Run cases on torchrun's ranks; every rank yields every result.

    Raises CaseError when a case has another world size than torchrun.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    for case in cases:
        if case.parallelism.world_size != world_size:
            raise CaseError(
                f"case {case.name} does not fit the ranks that torchrun started",
                expected=f"{case.parallelism.world_size} ranks",
                found=f"WORLD_SIZE={world_size}",
                fix=f"start {case.parallelism.world_size} ranks, or give --world-size {world_size}",
            )
    return _lead_or_follow(cases, options, Path(run_dir), on_event)


def _lead_or_follow(cases: list[Case], options: RunOptions, run_dir: Path, on_event: OnEvent) -> Iterator[CaseResult]:
    os.environ.update(ENVIRONMENT)
    from torch.distributed.rendezvous import rendezvous

    store, rank, _ = next(iter(rendezvous("env://")))
    team = Team(run_dir, options, store, rank)
    tempfile.tempdir, before = str(team.work), tempfile.tempdir  # also for what torch compiles
    try:
        for case in cases:
            yield team.lead(case, on_event) if rank == 0 else team.follow(case)
    finally:
        tempfile.tempdir = before
        shutil.rmtree(team.work, ignore_errors=True)


class Team:
    """One rank among torchrun's. On rank 0 it answers `launch`'s requests, as the host does elsewhere."""

    def __init__(self, run_dir: Path, options: RunOptions, store: Store, rank: int) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = Path(tempfile.mkdtemp(prefix="bitproof-"))
        self._store = store
        self._rank = rank
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._num_requests = 0
        self._lost: RankError | None = None
        self._prepared: tuple[str, Any] = ("", None)

    def lead(self, case: Case, on_event: OnEvent) -> CaseResult:
        """Rank 0's part of a case."""
        from harness.baselines import hold_against_baselines
        from harness.case_run import CaseRun

        placement = self.place(case)
        with lease_gpus(placement, case.parallelism.world_size):
            run = CaseRun(case, placement, self, self.options, on_event)
            result = hold_against_baselines(run.result(), run.recordings(), self, self.options.baseline_dir)
        told = {name: getattr(result, name) for name in ("verdict", "error", "differing_kinds", "baseline")}
        self._tell_all({"request": "result", "result": told})
        return result

    def follow(self, case: Case) -> CaseResult:
        """Any other rank's part of a case: do what rank 0 asks until it tells the result."""
        placement = self.place(case)
        while True:
            request = self._hear()
            if request["request"] != "result":
                self._store.set(self._key(f"from{self._rank}"), _pack(*self._run(request)))  # type: ignore[arg-type]
                continue
            told = request["result"]
            return CaseResult(
                case=case,
                verdict=Verdict(told["verdict"]),
                steps=case.steps,
                world_size=case.parallelism.world_size,
                device=placement.device,
                backend=placement.backend,
                error=told["error"],
                differing_kinds=tuple(told["differing_kinds"]),
                baseline=told["baseline"],
            )

    def place(self, case: Case) -> Placement:
        """Where this machine's ranks run. Raises CaseError when it asks for GPUs that are not there."""
        from harness.capture.manifest import num_gpus

        local = int(os.environ.get("LOCAL_WORLD_SIZE", case.parallelism.world_size))
        return place(self.options.device, local, num_gpus())

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        """Rank 0: have all ranks run a system, or compare two kept values. Raises what went wrong."""
        from harness.host import RunRequest, compare_bits, find_drift, measure_closeness

        if request["request"] == "bits":
            return compare_bits(request)
        if request["request"] == "closeness":
            return measure_closeness(request)
        if request["request"] == "drift":
            return find_drift(request)
        if self._lost is not None:
            raise self._lost
        run = RunRequest.from_dict(request)
        self._tell_all(request)
        own = self._run(request, on_event)
        accounts, contents = self._gather(own, run)
        return self._finish(run, accounts, contents)

    def _run(self, request: dict[str, Any], on_event: OnEvent = lambda event: None) -> tuple[dict[str, Any], bytes]:
        """This rank's run: its account, and its file's bytes. Never raises: a failure is an account too."""
        from harness.host import RunRequest

        run = RunRequest.from_dict(request)
        account: dict[str, Any] = {"place": "at its start"}
        files = [self.work / "part", self.work / "part.safetensors"]
        for file in files:
            file.unlink(missing_ok=True)
        try:
            with output_to(run.log_of(self._rank)):
                self._take_steps(run, files[0], account, on_event)
            contents = [file.read_bytes() if file.exists() else b"" for file in files]
            account["part_bytes"] = len(contents[0])
            return account, b"".join(contents)
        except Exception as error:
            failure = failure_of_exception(self._rank, error)
            # Machines agree on the time of day, not on a monotonic clock's zero.
            account["failure"] = dataclasses.asdict(dataclasses.replace(failure, time=time.time()))
        self._leave()
        return account, b""

    def _take_steps(self, run: RunRequest, file: Path, account: dict[str, Any], on_event: OnEvent) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        from harness.faults import parse_fault
        from harness.worker import Job, run_rank

        job = Job(
            case=run.case,
            system=run.system,
            placement=run.placement,
            part=str(file),
            timeout=run.timeout,
            case_timeout=run.case_timeout,
            collective_timeout=run.timeout,
            fault=parse_fault(run.inject) if run.inject else None,
            replay=run.replay,
            program=self._program(run),
            graph_options=run.graph_options,
            local_rank=self._local_rank,
            stress=run.stress,
            names=run.names,
            values=run.values_to_keep,
        )

        def report(event: dict[str, Any]) -> None:
            match event:
                case {"event": "prepared", "graph": graph}:
                    account["graph"] = graph
                case {"event": "step", "step": step}:
                    account["place"] = f"at step {step}"
                    on_event({"event": "step", "step": step, "steps": job.steps})
                case {"event": "end"}:
                    account["place"] = "at the end"
                case {"event": "done"}:
                    account["done"] = event

        run_rank(job, self._rank, PrefixStore(self._key("groups"), self._store), report)

    def _program(self, run: RunRequest) -> Any:
        import torch

        from harness.worker import needs_program, options_of_rank, prepare_program

        if not needs_program(run.system):
            return None
        name = json.dumps([run.case.to_dict(), run.graph_options.extra_passes], sort_keys=True)
        if self._prepared[0] != name:
            device = torch.device(run.placement.device_of(self._local_rank))
            options = options_of_rank(run.graph_options, self._rank)
            self._prepared = (name, prepare_program(run.case, device, options))
        return self._prepared[1]

    def _leave(self) -> None:
        """Close this rank's connections, so that no rank waits for it for long."""
        from harness.worker import leave

        gc.collect()  # a failed frame may still hold a group
        try:
            leave()
        except Exception as error:  # the groups are broken; the failure that broke them is what counts
            print(f"leaving the process groups: {error}", flush=True)

    def _gather(self, own: tuple[dict[str, Any], bytes], run: RunRequest) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Every rank's account and bytes, in rank order. Raises RankError when a rank says nothing in time."""
        answers, silent = [own], []
        limit = time.monotonic() + (_MARGIN if "failure" in own[0] else run.timeout + _MARGIN)
        for rank in range(1, run.case.parallelism.world_size):
            key = self._key(f"from{rank}")
            try:
                self._store.wait([key], timedelta(seconds=max(0.1, limit - time.monotonic())))
                answers.append(_unpack(self._store.get(key)))
                self._store.delete_key(key)
            except RuntimeError:  # torch's stores time out with subclasses of it
                silent.append(rank)
        failures = [Failure(**account["failure"]) for account, _ in answers if "failure" in account]
        primary = [failure for failure in failures if not failure.secondary]
        if silent and not primary:
            places = dict.fromkeys(silent, "silent")
            self._lost = error_of_hang(run.system, self.options.timeout, places, "")
            raise self._lost
        if failures:
            first = blame(failures)
            place = {f["failure"]["rank"]: f["place"] for f, _ in answers if "failure" in f}[first.rank]
            error = error_of_failure(first, run.system, place, run.log_of(first.rank).name)
            self._lost = error if silent else None
            raise error
        return [account for account, _ in answers], [content for _, content in answers]

    def _finish(self, run: RunRequest, accounts: list[dict[str, Any]], contents: list[bytes]) -> dict[str, Any]:
        from harness.host import answer_of, join_recording, keep_archives

        graphs = [account["graph"] for account in accounts]
        hashes = [graph and graph["code_hash"] for graph in graphs]
        for rank, code_hash in enumerate(hashes):
            if code_hash != hashes[0]:
                raise RankError(
                    f"rank {rank} prepared another graph than rank 0",
                    rank=rank,
                    found=f"code hash {code_hash}, not {hashes[0]}",
                )
        done = [account["done"] for account in accounts]
        if run.replay is not None:
            keep_archives(run.out, contents)
        else:
            parts = [self.work / f"part{rank}" for rank in range(len(contents))]
            values = [part.with_suffix(".safetensors") for part in parts if run.values_to_keep]
            for part, account, content in zip(parts, accounts, contents, strict=True):
                part.write_bytes(content[: account["part_bytes"]])
                if run.values_to_keep:
                    part.with_suffix(".safetensors").write_bytes(content[account["part_bytes"] :])
            join_recording(run, graphs[0], done, parts, values)
        return answer_of(graphs[0], done, prepare_seconds=0.0, start_seconds=0.0)

    def _tell_all(self, request: dict[str, Any]) -> None:
        self._num_requests += 1
        self._store.set(self._key("request"), json.dumps(request))

    def _hear(self) -> dict[str, Any]:
        self._num_requests += 1
        self._store.wait([self._key("request")], _PATIENCE)
        request: dict[str, Any] = json.loads(self._store.get(self._key("request")))
        return request

    def _key(self, name: str) -> str:
        return f"bitproof/{self._num_requests}/{name}"


def _pack(account: dict[str, Any], content: bytes) -> bytes:
    return json.dumps(account).encode() + b"\n" + content


def _unpack(packed: bytes) -> tuple[dict[str, Any], bytes]:
    account, _, content = packed.partition(b"\n")
    return json.loads(account), content
