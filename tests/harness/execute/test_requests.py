"""What a request keeps, and which requests may share a program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bitproof.builtin_cases.chunking import moe_batch, transformer_batch
from bitproof.builtin_cases.layouts.resume import fsdp_four_then_two
from bitproof.harness.execute.requests import (
    REQUESTS,
    CallRequest,
    LocalRunRequest,
    MachineRequest,
    PlaceRequest,
    PrecompileRequest,
    RankSlots,
    RunAnswer,
    RunRequest,
    StepFolder,
    StepRequest,
)
from bitproof.harness.execute.save_and_resume import Resume
from bitproof.harness.execute.status_messages import End
from bitproof.harness.localize.logs.replay import Replay
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions, Stress


def request(tmp_path: Path, **values: Any) -> RunRequest:
    return RunRequest(
        **{
            "case": transformer_batch,
            "system": "graph",
            "arm": "first",
            "placement": Placement(),
            "out": tmp_path / "out",
            "logs": tmp_path / "logs",
            "work": tmp_path / "work",
            "timeout": 1.0,
            "case_timeout": 1.0,
            **values,
        }
    )


def test_values_are_kept_once_as_chosen_or_all_where_the_case_states_a_bound(tmp_path: Path) -> None:
    chosen = request(tmp_path, options=RunOptions(values=("0/*",)))
    assert chosen.values_to_keep == ("0/*",)
    assert request(tmp_path).values_to_keep == ()
    close = replace(transformer_batch, expected="CLOSE", close_within=0.1)
    assert request(tmp_path, case=close, options=RunOptions(values=("0/*",))).values_to_keep == ("*",)
    assert replace(chosen, arm="control").values_to_keep == ()
    assert replace(chosen, replay=Replay(step=0)).values_to_keep == ()


def test_a_program_is_another_for_other_passes_or_another_case_and_not_for_another_folder(tmp_path: Path) -> None:
    first = request(tmp_path)
    assert replace(first, arm="control", dump_dir=tmp_path).program == first.program
    assert replace(first, options=RunOptions(extra_passes=("a:b",))).program != first.program
    assert replace(first, case=moe_batch).program != first.program


def test_a_run_follows_of_the_options_what_is_about_its_system() -> None:
    options = RunOptions(inject="rank:1", extra_passes=("a:b",), names={"a": "b"}, values=("0/*",), stress=Stress())
    of_candidate = options.of_run("candidate", is_stressed=True)
    assert of_candidate == options
    of_reference = options.of_run("reference", is_stressed=False)
    assert of_reference == RunOptions(values=("0/*",))


def test_logs_of_the_first_run_have_plain_names(tmp_path: Path) -> None:
    first = request(tmp_path)
    assert (first.trace_log.name, first.log_of(3).name) == ("trace.log", "rank3.log")
    control = replace(first, arm="control")
    assert (control.trace_log.name, control.log_of(3).name) == ("trace.control.log", "rank3.control.log")


def test_every_kind_of_request_names_its_answer_and_what_fails_with_it(tmp_path: Path) -> None:
    run = request(tmp_path)
    assert (run.answer, run.about) == (RunAnswer, "graph")
    local_run = LocalRunRequest(run=run, rank_slots=RankSlots(ranks=(1,), part="part{rank}", store="groups"))
    assert (local_run.answer, local_run.about) == (End, "graph")
    assert (CallRequest(case=transformer_batch, function="m:f").about, MachineRequest().about) == (
        "the host",
        "the host",
    )
    precompile = PrecompileRequest(case=transformer_batch, system="graph", out=tmp_path)
    read = StepRequest(case=transformer_batch, system="graph", step=StepFolder(tmp_path))
    place = PlaceRequest(case=transformer_batch, logs=tmp_path, timeout=1.0)
    assert place.about == "autoplace"
    assert precompile.about == "precompiling transformer_batch"
    assert read.about == "the precompiled step for transformer_batch"
    assert all(isinstance(kind.answer, type) for kind in REQUESTS)


def test_a_run_that_goes_on_is_two_of_which_the_reference_may_take_the_first_and_an_early_replay_is_one(tmp_path):
    case = fsdp_four_then_two
    whole = request(tmp_path, case=case, system=case.candidate, resume=Resume(at=2, folder="saved"))
    first, second = whole.halves
    assert (first.system, first.case.parallelism.world_size, first.resume.goes_on) == (case.reference, 4, False)
    assert (second.system, second.case.parallelism.world_size, second.resume.goes_on) == (case.candidate, 2, True)
    assert second.halves == (second,) and request(tmp_path).halves == (request(tmp_path),)
    assert [half.resume for half in replace(whole, replay=Replay(step=1)).halves] == [None]
    first, second = replace(whole, replay=Replay(step=2)).halves
    assert (first.replay, second.replay) == (None, Replay(step=2))
