"""Where a program is made and its ranks are forked: never in the host, and after a user's pass nowhere else again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bitproof.builtin_cases.chunking import moe_seq
from bitproof.harness.case import Batch, Pipeline
from bitproof.harness.errors import RankError, TraceError
from bitproof.harness.execute.host import runners, stage
from bitproof.harness.execute.host.runners import Runner, graph_cache_of_run
from bitproof.harness.execute.requests import Machine, MachineRequest, RankSlots, RunRequest
from bitproof.harness.execute.status_messages import End, PreparedGraph
from bitproof.harness.options import RunOptions
from bitproof.harness.processes.watching import Watch
from bitproof.harness.records import PassReport
from bitproof.harness.runtime.sources import Installation, Sources
from bitproof.harness.systems import cached_graph
from bitproof.harness.systems.graph_key import GraphCache
from tests.harness.execute.test_requests import request
from tests.hosts import SharedHost

pytestmark = pytest.mark.ranks

RANK_SLOTS = RankSlots(ranks=(0,), part="part{rank}", store="store")
Prepare = Callable[..., Any]


@contextmanager
def runner(
    monkeypatch: pytest.MonkeyPatch,
    prepare: Prepare | None = None,
    fingerprint: Installation | None = None,
    trace: Prepare | None = None,
) -> Iterator[Callable[[RunRequest], Any]]:
    """A runner whose ranks only tell which process forks them; a program is the process that finishes it."""

    def run_ranks(
        run: RunRequest,
        rank_slots: RankSlots,
        send: Any,
        hangup: Any,
        program: Any = None,
        seconds: Any = 0.0,
        graph_cache: Any = None,
    ) -> End:
        reported = {"forked_from": os.getpid(), "program": program}
        return End(graph=PreparedGraph(code_hash="", passes=[PassReport("toy", 0.0, 0, 0, facts=reported)]))

    def finish(traced: Any, *arguments: Any) -> Any:
        assert traced == "traced"
        return prepare(*arguments) if prepare else os.getpid()

    monkeypatch.setattr(runners, "trace_step", trace or (lambda case, system, enter: "traced"))
    monkeypatch.setattr(runners, "finish_program", finish)
    monkeypatch.setattr(
        runners, "set_determinism", lambda seed: None
    )  # a host has imported what that takes a second for
    monkeypatch.setattr(runners, "run_ranks", run_ranks)
    own = Runner(lambda event: None, fingerprint=fingerprint)

    def run(asked: RunRequest) -> Any:
        graph = own.run(asked, RANK_SLOTS).graph
        assert graph is not None
        return graph.passes[0].facts

    # A stage sends descriptors 1 and 2 to its log; pytest would have what Python prints go elsewhere.
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as errors:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", errors)
        try:
            yield run
        finally:
            own.close()
            monkeypatch.undo()


def test_a_program_is_made_and_run_in_a_stage_and_everything_else_in_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = request(tmp_path, timeout=60.0)
    with runner(monkeypatch) as run:
        first = run(graph)
        eager = run(replace(graph, system="eager"))
        control = run(replace(graph, arm="control"))
    assert eager == {"forked_from": os.getpid(), "program": None}
    assert first["program"] == first["forked_from"] != os.getpid()
    assert control == first, "one stage serves a case's runs of one program"


def test_a_stage_ends_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = request(tmp_path, timeout=60.0)
    with runner(monkeypatch) as run:
        first = run(graph)["forked_from"]
        run(replace(graph, case=moe_seq, system="eager"))
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        last = run(graph)["forked_from"]
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def test_a_stage_serves_one_system_as_each_has_a_trace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = request(tmp_path, timeout=60.0)
    with runner(monkeypatch) as run:
        first = run(graph)["forked_from"]
        assert run(replace(graph, system="eager"))["program"] is None
        assert run(graph)["forked_from"] == first, "a run that needs no program leaves the stage alone"
        assert run(replace(graph, system="joint"))["forked_from"] != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)


def test_no_run_descends_from_a_process_in_which_a_users_pass_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass counts how often it ran in this process: always once."""
    ran: list[int] = []

    def prepare(case: Any, options: Any, enter: Any) -> int:
        ran.append(0)
        return len(ran)

    extra = request(tmp_path, timeout=60.0, options=RunOptions(extra_passes=("a:b",)))
    with runner(monkeypatch, prepare) as run:
        asked = [replace(extra, arm=arm) for arm in ("first", "control", "stress", "replay1")]
        found = [run(each) for each in asked]
        plain = run(replace(extra, system="eager"))
    assert [each["program"] for each in found] == [1, 1, 1, 1]
    assert len({each["forked_from"] for each in found}) == 4
    assert plain["forked_from"] == os.getpid()
    assert ran == []


def test_a_kept_graph_is_read_in_place_of_being_traced_and_one_that_was_traced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = Installation(Sources("files", ()), "others")

    def trace(*arguments: Any) -> str:
        (tmp_path / "traced").touch()
        return "traced"

    def keep(graph_cache: GraphCache, program: int, case: object) -> bool:
        (tmp_path / "kept").write_text(graph_cache.key)
        return True

    monkeypatch.setattr(cached_graph, "keep_program", keep)
    for found in (None, 8):
        monkeypatch.setattr(cached_graph, "read_program", lambda graph_cache, found=found: found)
        asked = request(tmp_path, timeout=60.0, options=RunOptions(kept_graphs=tmp_path))
        with runner(monkeypatch, lambda *arguments: 7, fingerprint, trace) as run:
            assert run(asked)["program"] == (found or 7)
            reported = {name: (tmp_path / name).exists() for name in ("traced", "kept")}
            assert reported == dict.fromkeys(reported, found is None)
            if found is None:
                assert '"source' in (tmp_path / "kept").read_text()
                (tmp_path / "traced").unlink()
                (tmp_path / "kept").unlink()


@pytest.mark.parametrize(
    ("options", "dump_dir"),
    [({"kept_graphs": None}, None), ({"extra_passes": ("a:b",)}, None), ({}, Path("graphs"))],
    ids=["not asked for", "a user's pass", "graphs are written down"],
)
def test_every_graph_is_traced_anew_where_others_code_makes_it_or_passes_are_to_be_seen(
    options: dict[str, Any], dump_dir: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_graph, "read_program", lambda graph_cache: 8)
    monkeypatch.setattr(cached_graph, "keep_program", lambda graph_cache, program, case: (tmp_path / "kept").touch())
    fingerprint = Installation(Sources("files", ()), "others")
    followed = RunOptions(**{"kept_graphs": tmp_path} | options)
    asked = request(tmp_path, timeout=60.0, options=followed, dump_dir=dump_dir)
    with runner(monkeypatch, lambda *arguments: 7, fingerprint) as run:
        assert run(asked)["program"] == 7
    assert not (tmp_path / "kept").exists()


def test_a_fault_that_is_struck_into_the_graph_needs_one_that_was_traced_anew(tmp_path: Path) -> None:
    fingerprint = Installation(Sources("files", ()), "others")
    for fault, is_kept in (
        (None, True),
        ("flip-bit:rank=0,step=0,grad=norm.weight", True),
        ("gradients-exchanged", False),
    ):
        asked = request(tmp_path, timeout=60.0, options=RunOptions(kept_graphs=tmp_path, inject=fault))
        assert (graph_cache_of_run(asked, fingerprint) is not None) == is_kept


def test_no_graph_is_kept_of_a_process_that_preloaded_others_modules_which_may_have_changed_torch(tmp_path) -> None:
    fingerprint = Installation(Sources("files", ()), "others")
    asked = request(tmp_path, timeout=60.0, options=RunOptions(kept_graphs=tmp_path))
    asked = replace(asked, case=replace(asked.case, preload=("framework",)))
    assert graph_cache_of_run(asked, fingerprint) is None


def killed(case: Any, options: Any, enter: Callable[[str], None]) -> None:
    enter("in extra pass mine")
    print("a last word", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(case: Any, options: Any, enter: Callable[[str], None]) -> None:
    enter("in extra pass mine")
    os._exit(0)


def closes(case: Any, options: Any, enter: Callable[[str], None]) -> None:
    enter("in extra pass mine")
    os.closerange(3, 4096)
    time.sleep(60)


@pytest.mark.parametrize(
    ("prepare", "how"),
    [
        (killed, "was killed by signal 9 (SIGKILL)"),
        (leaves, "exited with status 0 before it finished"),
        (closes, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_stage_that_dies_is_named_with_its_place_and_its_last_words(
    prepare: Prepare, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner(monkeypatch, prepare) as run:
        with pytest.raises(RankError) as error:
            run(request(tmp_path, timeout=60.0))
        assert error.value.what == f"the process that makes the program of graph {how}, in extra pass mine"
        assert error.value.traceback == ("a last word" if prepare is killed else None)
        monkeypatch.setattr(runners, "finish_program", lambda *arguments: 7)
        assert run(request(tmp_path, timeout=60.0))["program"] == 7, "the next run has a stage of its own"


def test_what_a_stage_raises_is_raised_as_it_is_and_an_exit_is_no_end_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any) -> None:
        raise TraceError("no", found="this")

    def exits(*arguments: Any) -> None:
        sys.exit(3)

    with runner(monkeypatch, refuses) as run, pytest.raises(TraceError) as refusal:
        run(request(tmp_path, timeout=60.0))
    assert str(refusal.value) == "TraceError: no\n  found: this"
    assert "TraceError: no" in (tmp_path / "logs" / "trace.log").read_text()
    with runner(monkeypatch, exits) as run, pytest.raises(RankError) as error:
        run(request(tmp_path, timeout=60.0))
    assert (error.value.what, error.value.found) == ("graph failed before its ranks started", "SystemExit: 3")


def test_a_pass_that_loops_is_ended_in_time_and_named_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loops_forever(case: Any, options: Any, enter: Callable[[str], None]) -> None:
        enter("in extra pass loops_forever")
        while True:
            time.sleep(0.01)

    with runner(monkeypatch, loops_forever) as run:
        began = time.monotonic()
        with pytest.raises(RankError) as error:
            run(request(tmp_path, timeout=2.0, case_timeout=12.0))
        assert time.monotonic() - began < 10
    head, stack = str(error.value), error.value.traceback or ""
    assert head == (
        "RankError: the program of graph was not finished: the case ran longer than 12 s\n"
        "  expected: the step to be traced, and every pass to finish\n"
        "  found: the passes had not finished: in extra pass loops_forever\n"
        f"  came from: {tmp_path / 'logs' / 'trace.log'}\n"
        "  fix: see below where it was; if it was only slow, give a longer --timeout"
    )
    assert "in loops_forever" in stack
    assert "_answer_all" not in stack, "what it was forked in is nobody's business"


def test_a_caller_that_hangs_up_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(runners, "trace_step", lambda *arguments: time.sleep(60))
    monkeypatch.setattr(runners, "set_determinism", lambda seed: None)
    own = Runner(lambda event: None, hangup=reader)
    os.close(writer)
    asked = request(tmp_path, timeout=60.0)
    with pytest.raises(SystemExit):
        own.run(asked, RANK_SLOTS)
    os.close(reader)
    assert not has_children()


def has_children() -> bool:
    """Whether this process has any, but the host that tests share."""
    own = {child.pid for child in psutil.Process().children()}
    return bool(own - SharedHost.pids())


def test_the_next_runs_program_is_made_while_this_ones_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"

    def prepare(*arguments: Any) -> int:
        (tmp_path / "making").write_text(str(os.getpid()))
        (tmp_path / "making").rename(made)
        return os.getpid()

    graph = request(tmp_path, timeout=60.0)
    monkeypatch.setattr(runners, "num_cores", lambda: 2)
    with runner(monkeypatch, prepare) as run:
        assert run(replace(graph, system="eager", later=graph)) == {"forked_from": os.getpid(), "program": None}
        limit = time.monotonic() + 60
        while not made.exists():
            assert time.monotonic() < limit, "it is made before it is asked for"
            time.sleep(0.01)
        first = run(graph)
    assert first["program"] == first["forked_from"] == int(made.read_text()) != os.getpid()


def test_what_goes_wrong_ahead_of_a_run_is_reported_by_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any) -> None:
        raise TraceError("no", found="this")

    graph = request(tmp_path, timeout=60.0)
    monkeypatch.setattr(runners, "num_cores", lambda: 2)
    with runner(monkeypatch, refuses) as run:
        run(replace(graph, system="eager", later=graph))
        with pytest.raises(TraceError) as refusal:
            run(graph)
    assert str(refusal.value) == "TraceError: no\n  found: this"
    assert "TraceError: no" in (tmp_path / "logs" / "trace.log").read_text()


def test_nothing_is_made_ahead_on_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = request(tmp_path, timeout=60.0)
    monkeypatch.setattr(runners, "num_cores", lambda: 1)
    with runner(monkeypatch) as run:
        run(replace(graph, system="eager", later=graph))
        assert not has_children()
        assert run(graph)["program"]


def test_ahead_of_a_users_pass_the_step_is_traced_and_the_pass_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*arguments: Any) -> str:
        (tmp_path / "traced").touch()
        return "traced"

    def prepare(*arguments: Any) -> int:
        (tmp_path / "ran").touch()
        return 7

    plain = request(tmp_path, timeout=60.0)
    mine = replace(plain, options=RunOptions(extra_passes=("a:b",)))
    monkeypatch.setattr(runners, "num_cores", lambda: 2)
    with runner(monkeypatch, prepare, trace=trace) as run:
        run(replace(plain, system="eager", later=mine))
        limit = time.monotonic() + 60
        while not (tmp_path / "traced").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert not (tmp_path / "ran").exists()
        assert run(mine)["program"] == 7


def test_a_pass_that_loops_behind_a_step_that_was_traced_ahead_is_named_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing takes of the run's time, also where it began before the run was asked for."""

    def trace(*arguments: Any) -> str:
        time.sleep(2.5)
        return "traced"

    def loops(case: Any, options: Any, enter: Callable[[str], None]) -> None:
        enter("in extra pass loops")
        time.sleep(60)

    plain = request(tmp_path, timeout=60.0)
    mine = replace(plain, options=RunOptions(extra_passes=("a:b",)), timeout=4.0, case_timeout=4.0)
    monkeypatch.setattr(runners, "num_cores", lambda: 2)
    monkeypatch.setattr("bitproof.harness.execute.host.stage._MARGIN", 1.5)
    with runner(monkeypatch, loops, trace=trace) as run:
        run(replace(plain, system="eager", later=mine))
        with pytest.raises(RankError) as error:
            run(mine)
    assert error.value.found == "the passes had not finished: in extra pass loops"


def test_a_step_is_traced_once_for_all_programs_of_it_and_anew_for_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*arguments: Any) -> str:
        with (tmp_path / "traced").open("a") as reported:
            reported.write("once ")
        return "traced"

    graph = request(tmp_path, timeout=60.0)
    until = replace(graph, case=replace(graph.case, name="another", pipeline=Pipeline(until="clean_up"), steps=1))
    mine = replace(graph, options=RunOptions(extra_passes=("a:b",)))
    wide = replace(graph, case=replace(graph.case, batch=Batch(sequences=8)))
    with runner(monkeypatch, trace=trace) as run:
        found = [run(asked)["program"] for asked in (graph, until, mine, mine, graph)]
        assert len(set(found)) == 5, "passes write into what was traced, so each program has a process"
        assert (tmp_path / "traced").read_text() == "once "
        run(wide)
        assert (tmp_path / "traced").read_text() == "once once "


def test_what_is_made_for_a_run_that_never_comes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = request(tmp_path, timeout=60.0)
    monkeypatch.setattr(runners, "num_cores", lambda: 2)
    with runner(monkeypatch, lambda *arguments: time.sleep(60)) as run:
        run(replace(graph, system="eager", later=graph))
        assert has_children()
        began = time.monotonic()
        run(replace(graph, case=moe_seq, system="eager"))
        assert time.monotonic() - began < 1.5, "an idle stage is given two seconds to end by itself"
        assert not has_children()


def test_an_answer_that_comes_between_two_looks_counts_though_its_process_has_ended_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []

    class Late(Watch):
        def look(self, seconds: float) -> Any:
            looks.append(seconds)
            if len(looks) > 1:
                return super().look(seconds)
            time.sleep(0.5)
            return iter(())

    def answer(asked: Any, send: Any, hangup: int) -> None:
        send(Machine(gpus=3))
        os._exit(0)

    monkeypatch.setattr(stage, "Watch", Late)
    made = stage.Stage(answer)
    assert made.ask(MachineRequest(), print, what="an answer") == Machine(gpus=3)
    made.close()
