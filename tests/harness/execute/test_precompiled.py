"""Runs meet precompiled steps: made once where nobody made one, read in place of tracing, refused where they misfit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import PRECOMPILED, Case, Parallelism
from bitproof.harness.errors import ArtifactError, CaseError, RankError, UsageError
from bitproof.harness.execute import precompiled
from bitproof.harness.execute.host import runners
from bitproof.harness.execute.host.answerer import Answerer
from bitproof.harness.execute.precompiled import PrecompiledStep, check_precompiled
from bitproof.harness.execute.requests import PrecompileRequest, StepFolder, StepRequest
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from bitproof.harness.systems import graph as graph_system
from tests.harness.execute.host.test_runners import runner
from tests.harness.execute.test_requests import request
from tests.small import small

CASE = CASES["precompiled_experts_seq"]


class ToyClient:
    """A client that is only asked."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.asked: list[PrecompileRequest] = []

    def ask(self, request: Any, timeout: float, on_event: Any) -> None:
        self.asked.append(request)


def folder(case: Case, options: RunOptions, client: Any, role: Any = "candidate") -> StepFolder | None:
    step = PrecompiledStep(case, options, Placement(), client)
    found = step.folder_for(role, 7.0, lambda event: None)
    assert step.folder_for(role, 7.0, lambda event: None) == found
    return found


def test_the_system_precompiled_has_its_step_made_once_a_case(tmp_path: Path) -> None:
    client = ToyClient(tmp_path)
    out = tmp_path / f"{CASE.name}-precompiled"
    assert folder(CASE, RunOptions(), client) == StepFolder(out)
    assert client.asked == [PrecompileRequest(case=CASE, system=PRECOMPILED, out=out, timeout=7.0)]
    assert folder(CASE, RunOptions(), client, "reference") is None, "it traces where it runs"


def test_a_folder_that_is_named_is_the_candidates_and_nothing_is_made(tmp_path: Path) -> None:
    client, options = ToyClient(tmp_path), RunOptions(precompiled=tmp_path / "step")
    assert folder(CASES["moe_seq"], options, client) == folder(CASE, options, client) == StepFolder(tmp_path / "step")
    trusting = replace(options, trust_compiled=True)
    assert folder(CASE, trusting, client) == StepFolder(tmp_path / "step", trust_compiled=True)
    assert folder(CASES["moe_seq"], options, client, "reference") is None
    assert folder(CASES["moe_seq"], RunOptions(), client) is None and client.asked == []


def test_a_step_that_is_named_is_read_before_anything_runs_and_one_that_is_made_is_not(tmp_path: Path) -> None:
    client = ToyClient(tmp_path)
    PrecompiledStep(CASE, RunOptions(), Placement(), client).check(7.0, lambda event: None)  # type: ignore[arg-type]
    assert client.asked == []
    options = RunOptions(precompiled=tmp_path / "step")
    PrecompiledStep(CASE, options, Placement(), client).check(7.0, lambda event: None)  # type: ignore[arg-type]
    step = StepFolder(tmp_path / "step")
    assert client.asked == [StepRequest(case=CASE, system=PRECOMPILED, step=step, timeout=7.0)]


def test_compiled_code_is_refused_unless_the_call_trusts_it(tmp_path: Path) -> None:
    options, compiled = RunOptions(precompiled=tmp_path), CASES["inductor_moe"]
    for case, given in ((compiled, options), (replace(compiled, candidate=PRECOMPILED), RunOptions())):
        with pytest.raises(CaseError) as error:
            check_precompiled(case, given)
        assert str(error.value) == (
            "CaseError: the precompiled step of case inductor_moe is code that inductor compiled, and nothing says "
            "that it may run\n"
            "  expected: --trust-compiled: a hash shows that code is what was written, never what it does\n"
            "  found: pipeline.backend inductor\n"
            "  fix: add --trust-compiled, if you trust everyone who can write the folder; or run without --precompiled"
        )
        check_precompiled(case, replace(given, trust_compiled=True))
    with pytest.raises(UsageError, match="needs a precompiled step, and case inductor_moe loads none"):
        check_precompiled(compiled, RunOptions(trust_compiled=True))
    check_precompiled(compiled, RunOptions())


def test_what_does_not_go_with_a_precompiled_step_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(precompiled=tmp_path)
    for case in (CASE, CASES["moe_seq"], CASES["joint_deepseek_ep2"]):
        check_precompiled(case, options)
    with pytest.raises(CaseError, match="runs no graph, so it cannot load one"):
        check_precompiled(replace(CASE, reference="graph", candidate="eager_chunked"), options)
    for given, name in (({"extra_passes": ("a:b",)}, "--extra-pass"), ({"dump_graphs": True}, "--dump-graphs")):
        with pytest.raises(UsageError, match=f"{name} is about passes"):
            check_precompiled(CASES["moe_seq"], replace(options, **given))
        with pytest.raises(UsageError, match=f"{name} is about passes"):
            check_precompiled(CASE, RunOptions(**given))
        check_precompiled(CASES["moe_seq"], RunOptions(**given))
    monkeypatch.setattr(
        precompiled, "refuse_torchrun", lambda command, reason: (_ for _ in ()).throw(UsageError(reason))
    )
    with pytest.raises(UsageError, match="give --precompiled DIR"):
        check_precompiled(CASE, RunOptions())
    check_precompiled(CASE, options)
    check_precompiled(CASES["moe_seq"], RunOptions())


@pytest.mark.ranks
def test_a_stage_reads_the_step_and_never_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*arguments: Any) -> None:
        raise AssertionError("nothing is traced")

    monkeypatch.setattr(runners, "read_precompiled", lambda case, device, step, system: f"{system} in {step.path.name}")
    step = StepFolder(tmp_path / "step")
    asked = request(
        tmp_path, timeout=60.0, system="precompiled", precompiled=step, options=RunOptions(kept_graphs=tmp_path)
    )
    with runner(monkeypatch, trace=trace, prepare=trace) as run:
        assert run(asked)["program"] == "precompiled in step"
        assert run(replace(asked, system="graph"))["program"] == "graph in step"
        other = replace(asked, arm="control", precompiled=StepFolder(tmp_path / "other"))
        assert run(other)["program"] == "precompiled in other"


@pytest.mark.ranks
def test_a_step_that_is_refused_ends_the_run_and_nothing_is_traced_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ArtifactError("the precompiled step is damaged")

    monkeypatch.setattr(runners, "read_precompiled", refuse)
    asked = request(tmp_path, timeout=60.0, precompiled=StepFolder(tmp_path))
    with runner(monkeypatch) as run, pytest.raises(ArtifactError, match="is damaged"):
        run(asked)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_run_a_step_that_was_made_before_where_tracing_and_passes_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(small(CASES["moe_seq"]), parallelism=Parallelism(world_size=2, ep=2), steps=1)
    step = StepFolder(tmp_path / "step")
    asked = request(tmp_path, case=case, timeout=300.0, case_timeout=300.0, precompiled=step)

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing is traced, and no pass runs")

    # A stage sends descriptors 1 and 2 to its log; pytest would have what Python prints go elsewhere.
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as errors:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", errors)
        answerer = Answerer(lambda event: None)
        try:
            made = answerer.answer(PrecompileRequest(case=case, system="graph", out=tmp_path / "step"))
            for name in ("trace", "finish", "prepare", "run_pipeline", "trace_joint_step"):
                monkeypatch.setattr(graph_system, name, fail)
            found = answerer.answer(asked)
            with pytest.raises(RankError, match="nothing is traced"):
                answerer.answer(replace(asked, precompiled=None))
        finally:
            answerer.close()
            monkeypatch.undo()
    assert found.graph is not None and found.graph.artifact == made.artifact
    assert (tmp_path / "out" / "manifest.json").is_file()
