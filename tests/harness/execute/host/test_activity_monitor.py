"""What a rank's steps did beside what they show, where it is counted and where it is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.commands.record import compare_recordings
from bitproof.harness.compare.vacuity import compiled_runs
from bitproof.harness.execute.host.activity_monitor import ActivityMonitor
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Manifest, TorchCompile, Verdict

LONERS = "tests.harness.execute.lonely_systems"


def monitored(step, make=lambda: None, steps=1, in_memory=dict):
    """What is monitored of a system in this process."""
    torch._dynamo.reset()
    monitor = ActivityMonitor(in_memory)
    with monitor.at_work():
        make()
        monitor.begin_steps()
        for _ in range(steps):
            step()
            monitor.end_step()
    return monitor


def double(x):
    return (x * 2).sin()


X = torch.ones(3)
WHOLE = TorchCompile(backends=["eager"], graphs=1, operators=2)


def without_frames(found):
    """What was found without the number of frames: pytest's own logging is among those that Dynamo meets here."""
    return replace(found, frames=0, captured=0)


def compiled_in(**facts):
    return monitored(lambda: torch.compile(double, backend="eager")(X), **facts).compiled


def test_code_that_nobody_compiles_is_no_matter():
    assert monitored(lambda: double(X)).compiled is None


def test_what_was_compiled_is_counted_by_frames_graphs_and_operators():
    found = compiled_in()
    assert found.frames == found.captured > 0 and found.is_any
    assert without_frames(found) == WHOLE


def test_of_code_that_is_to_be_captured_whole_torch_counts_no_frames_and_none_are_reported():
    monitor = monitored(lambda: torch.compile(double, backend="eager", fullgraph=True)(X))
    found = monitor.compiled
    assert (found, monitor.stays_whole) == (WHOLE, True)
    [reported] = compiled_runs("candidate", Manifest(case={}, system="mine", world_size=1, steps=1, compiled=[found]))
    assert reported.endswith("1 graph of 2 operators by eager, of code captured whole, no graph break")


def test_a_graph_break_is_counted_with_its_reason():
    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y.sin()

    monitor = monitored(lambda: torch.compile(broken, backend="eager")(X))
    found = monitor.compiled
    assert not monitor.stays_whole, "operator by operator it may be cut anywhere"
    assert (found.graphs, found.breaks, found.first_break) == (2, 1, "Call to `torch._dynamo.graph_break()`")


def test_a_recompile_is_counted_with_its_reason():
    def scaled(x, by):
        return x * by

    def steps():
        compiled = torch.compile(scaled, backend="eager", dynamic=False)
        for by in (2, 2, 3):
            compiled(X, by)

    found = monitored(steps).compiled
    assert (found.graphs, found.breaks, found.recompiles) == (2, 0, 1)
    assert "by == 2" in found.first_recompile
    once = monitored(lambda: torch.compile(scaled, backend="eager")(X, 2)).compiled
    assert (once.recompiles, once.first_recompile) == (0, None)


def refuse(graph, inputs):
    raise RuntimeError("no kernel")


def test_a_backend_that_fails_and_is_passed_over_compiled_nothing():
    with torch._dynamo.config.patch(suppress_errors=True):
        found = monitored(lambda: torch.compile(double, backend=refuse)(X)).compiled
    assert (found.frames, found.captured, found.is_any, found.backends) == (1, 0, False, ["refuse"])


@pytest.fixture
def off(request, monkeypatch):
    """Compilation switched off in one way, or, with None, not at all."""
    if request.param == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch._dynamo.config.patch(disable=request.param == "setting"):
        yield


@pytest.mark.parametrize("off", ["setting", "environment"], indirect=True)
def test_where_compilation_is_off_what_is_called_was_not_compiled(off):
    assert compiled_in() == TorchCompile(backends=["eager"])
    model = nn.Linear(3, 3)
    assert monitored(lambda: torch.compile(model, backend="eager")(X)).compiled == TorchCompile(backends=["eager"])
    assert monitored(lambda: model(X), make=lambda: model.compile(backend="eager")).compiled is not None


@pytest.mark.parametrize("off", ["setting", "environment", None], indirect=True)
def test_what_was_to_be_compiled_and_is_never_called_is_no_matter(off):
    assert monitored(lambda: double(X), make=lambda: torch.compile(double, backend="eager")).compiled is None
    said = monitored(lambda: torch.compile(double, backend="eager", disable=True)(X))
    assert said.compiled is None, "who says that nothing is to be compiled is not told that nothing was"


def test_a_stance_of_eager_compiles_nothing():
    with torch.compiler.set_stance("force_eager"):
        assert compiled_in() == TorchCompile(backends=["eager"])


def test_code_that_is_never_to_be_compiled_is_no_matter():
    assert monitored(lambda: torch.compiler.disable(double)(X)).compiled is None


def test_counts_that_a_user_clears_are_not_taken_for_nothing():
    def step():
        torch._dynamo.utils.counters.clear()
        torch._dynamo.reset()
        torch.compile(double, backend="eager")(X)

    assert monitored(step, steps=2).compiled.is_any


def test_collectives_of_steps_are_counted_and_those_from_before_are_not():
    posted = {"shared memory 0": 5}

    def step():
        posted["shared memory 0"] += 2

    assert monitored(lambda: None, in_memory=lambda: dict(posted)).collectives == 0
    assert monitored(step, steps=3, in_memory=lambda: dict(posted)).collectives == 6


def case_of(system):
    return Case(
        name=system,
        family="toys",
        reference=f"{LONERS}:{system}",
        candidate=f"{LONERS}:{system}",
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )


@pytest.fixture(scope="module")
def came_to(tmp_path_factory):
    """The result of each system compared with itself."""
    from tests.harness.execute.lonely_systems import SYSTEMS
    from tests.hosts import one_host

    folder = tmp_path_factory.mktemp("lonely")
    with one_host():
        options = RunOptions(device="cpu", control="never")
        results = list(run_cases([case_of(name) for name in SYSTEMS], options, folder))
    return {result.case.name: result for result in results}, folder


NOT_MET = (
    "ran no collective in its steps on every rank: each trained alone (a system whose ranks should says so: "
    "independent_ranks = True)"
)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["alone", "met_before", "group_of_one"])
def test_ranks_that_never_meet_in_a_step_are_no_evidence(came_to, name):
    result = came_to[0][name]
    assert result.verdict == Verdict.UNVERIFIED
    assert f"what agrees shows nothing, so it is no evidence\n  reference {LONERS}:{name} {NOT_MET}" in result.error


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["independent", "reduced", "by_function", "sent", "data_parallel", "own_group"])
def test_ranks_that_meet_in_any_way_or_say_that_they_need_not_are_equal(came_to, name):
    result = came_to[0][name]
    assert (result.verdict, result.error, result.remarks) == (Verdict.EQUAL, None, ())


@pytest.mark.ranks
def test_a_rank_that_alone_never_meets_the_others_is_named(came_to):
    result = came_to[0]["two_of_three"]
    assert result.verdict == Verdict.UNVERIFIED
    assert f"candidate {LONERS}:two_of_three ran no collective in its steps on rank 1 of 2" in result.error


@pytest.mark.ranks
def test_a_report_says_how_much_was_compiled(came_to):
    result = came_to[0]["compiled"]
    assert result.verdict == Verdict.EQUAL, result.error
    assert result.remarks == tuple(
        f"{side} {LONERS}:compiled was compiled: 1 graph of 2 operators by eager, from 1 of 1 frames, no graph break"
        for side in ("reference", "candidate")
    )


@pytest.mark.ranks
def test_a_candidate_that_was_to_be_compiled_and_was_not_is_no_evidence(came_to):
    result = came_to[0]["stance"]
    assert result.verdict == Verdict.UNVERIFIED
    assert (
        f"candidate {LONERS}:stance called code that torch.compile was to compile, and nothing of it was compiled, on "
        "every rank" in result.error
    )


@pytest.mark.ranks
def test_diff_does_not_take_recordings_of_ranks_that_never_met_for_equal(tmp_path, one_host):
    from bitproof.harness.commands.record import record_to

    for name in "ab":
        record_to(
            tmp_path / name, case_of("alone"), f"{LONERS}:alone", RunOptions(device="cpu"), tmp_path / f"run{name}"
        )
    assert compare_recordings(tmp_path / "a", tmp_path / "b").verdict == Verdict.UNVERIFIED
