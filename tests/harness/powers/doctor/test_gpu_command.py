from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.cli import main
from bitproof.harness.execute import launch
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.doctor import gpu_command, run
from bitproof.harness.powers.doctor.command import MAIN_CASES, Torch
from bitproof.harness.powers.doctor.gpu_command import (
    ALONE,
    CASES_TRIED,
    HUNG,
    KILLED,
    NAMES,
    TOGETHER,
    CheckLine,
    examine_gpus,
    run_checks,
    status_of,
)
from bitproof.harness.powers.doctor.setting import Setting
from bitproof.harness.records import CaseResult, Verdict
from tests.small import small

WRONG_REGIONS = Path(__file__).with_name("wrong_regions.py")
TWO = Torch(version="2.13.0+cu128", gloo=True, nccl=True, gpus=["H200"] * 2)


def test_the_checks_that_are_named_are_those_that_there_are():
    assert ((*run.ALONE, *run.PROCESSES), tuple(run.TOGETHER)) == (ALONE, TOGETHER)


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        (replace(TWO, gpus=[]), "no GPU that this torch can use"),
        ("ModuleNotFoundError: No module named 'torch'", "ModuleNotFoundError: No module named 'torch'"),
    ],
)
def test_without_a_gpu_nothing_is_run_and_every_line_says_so(tmp_path, torch, why):
    lines = list(examine_gpus(tmp_path, torch))
    assert [line.name for line in lines] == [*NAMES, KILLED, HUNG, *CASES_TRIED]
    assert {(line.outcome, line.found) for line in lines} == {("NOT RUN", why)}
    assert status_of(lines) == 3
    assert str(lines[0]) == f"NOT RUN  topology                       {why}"


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        (
            replace(TWO, gpus=["H200"]),
            "one GPU: there is nothing that NCCL could join; --share-gpus has ranks share it",
        ),
        (replace(TWO, nccl=False), "this torch has no NCCL"),
    ],
)
def test_without_gpus_that_nccl_could_join_what_needs_one_device_is_run_and_no_more(monkeypatch, tmp_path, torch, why):
    checked = [CheckLine(name="digests", outcome="pass", found="cuda")]
    monkeypatch.setattr(gpu_command, "run_checks", lambda device, ranks, names, **others: checked)
    first, *others = examine_gpus(tmp_path, torch)
    assert (first.found, first.outcome) == ("cuda", "pass")
    assert [line.name for line in others] == [*TOGETHER, KILLED, HUNG, *CASES_TRIED]
    assert {(line.outcome, line.found) for line in others} == {("NOT RUN", why)}
    assert status_of([first, *others]) == 3


def test_eight_ranks_share_one_gpu_where_they_are_configured_to(monkeypatch, tmp_path):
    """Over NCCL where a check is of it, and over gloo in cases; on eight GPUs there is nothing to share."""
    ran = []

    def run_checks(device, ranks, names, *, shared_gpus=None):
        ran.append((ranks, shared_gpus))
        return [CheckLine(name=name, outcome="pass", found="") for name in names]

    def run_cases(cases, options, folder):
        ran.append((cases[0].parallelism.world_size, options.share_gpus))
        about = {"steps": 2, "world_size": 8, "device": "cuda", "control": EQUAL["control"]}
        backend = "gloo" if options.share_gpus else "nccl"
        return [CaseResult(case=cases[0], verdict=Verdict(cases[0].expected), backend=backend, **about)]

    monkeypatch.setenv("BITPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_command, "run_checks", run_checks)
    monkeypatch.setattr(launch, "run_cases", run_cases)
    for num_gpus, share in ((1, True), (8, False)):
        ran.clear()
        lines = list(examine_gpus(tmp_path, replace(TWO, gpus=["H200"] * num_gpus), share_gpus=True))
        assert ran[0] == (8, num_gpus if share else None)
        assert set(ran[1:]) == {(8, share), (2, share)}
        assert [x.name for x in lines if x.outcome != "pass"] == [KILLED, HUNG], "nobody was killed, nobody hung"


def test_ranks_that_share_have_a_device_each_that_there_is():
    setting = Setting(ranks=8, shared_gpus=2)
    assert [setting.device_of(rank).index for rank in range(8)] == [0, 1] * 4
    assert [Setting().device_of(rank).index for rank in range(8)] == [*range(8)]


def test_the_command_ends_with_3_where_nothing_was_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_command, "probe_torch", lambda: replace(TWO, gpus=[]))
    assert main(["doctor", "--gpu", "--report-dir", str(tmp_path)]) == 3
    assert capsys.readouterr().out.count("NOT RUN") == len(NAMES) + 2 + len(CASES_TRIED)


@pytest.mark.parametrize(
    ("outcomes", "status"), [(["pass", "pass"], 0), (["pass", "NOT RUN"], 3), (["NOT RUN", "FAIL"], 1), ([], 3)]
)
def test_a_failure_is_1_and_what_was_not_run_is_3(outcomes, status):
    assert status_of([CheckLine(name="x", outcome=outcome, found="") for outcome in outcomes]) == status


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "names"), [(2, NAMES), (1, ALONE)])
def test_a_check_that_was_never_reported_has_failed(ranks, names):
    """There are no GPUs of the kind `none`, so each check raises; and where the process ends, none is told."""
    lines = list(run_checks("none", ranks, names))
    assert [(line.name, line.outcome) for line in lines] == [(name, "FAIL") for name in names]


@pytest.fixture
def cases_come_to(monkeypatch, tmp_path):
    """The lines of all cases, where each comes to `result`; the options that they were run with."""

    def lines(ranks=2, **facts):
        ran = []

        def run_cases(cases, options, folder):
            ran.append((cases[0].parallelism.world_size, options))
            about = {"steps": 2, "world_size": ranks, "device": "cuda", "backend": "nccl"} | facts
            is_equal = facts.get("verdict") == Verdict.EQUAL
            about |= {"verdict": Verdict(cases[0].expected)} if is_equal else {}
            return [CaseResult(case=cases[0], **about)]

        monkeypatch.setattr(launch, "run_cases", run_cases)
        return list(gpu_command.run_cases_on(ranks, tmp_path)), ran

    return lines


EQUAL = {"verdict": Verdict.EQUAL, "control": {"reference": "EQUAL", "candidate": "EQUAL"}}


def test_main_cases_pass_where_they_are_equal_over_nccl_on_all_gpus(cases_come_to):
    lines, ran = cases_come_to(ranks=8, **EQUAL)
    assert [(line.name, line.outcome) for line in lines[2:]] == [(name, "pass") for name in CASES_TRIED]
    assert {(ranks, options.device) for ranks, options in ran} == {(8, "cuda"), (2, "cuda")}
    assert [ranks for ranks, _ in ran].count(2) == 1, "one case has two ranks"
    assert {options.control for _, options in ran[2:]} == {"always"}
    assert lines[2].found.startswith("EQUAL on 8 ranks, cuda, nccl: 0 of 0 records differ, logs in ")


@pytest.mark.parametrize(
    "facts",
    [EQUAL | {"backend": "gloo"}, EQUAL | {"verdict": Verdict.DIFFERENT}, EQUAL | {"control": {"reference": None}}],
)
def test_main_cases_fail_over_another_transport_or_where_they_differ_or_had_no_control(cases_come_to, facts):
    assert {line.outcome for line in cases_come_to(ranks=8, **facts)[0]} == {"FAIL"}


def test_a_case_that_ran_elsewhere_than_it_was_to_has_failed(cases_come_to):
    lines, _ = cases_come_to(ranks=8, **EQUAL | {"device": "cpu", "backend": "gloo"})
    assert {line.outcome for line in lines} == {"FAIL"} and "which is not cuda" in lines[-1].found


def test_a_case_that_is_to_be_close_has_failed_where_it_is_equal_or_different(cases_come_to):
    lines, _ = cases_come_to(**EQUAL)
    assert lines[-1].name == "regional_inductor" and lines[-1].found.startswith("CLOSE on 2 ranks")
    case = CASES["regional_inductor"]
    about = EQUAL | {"steps": 2, "world_size": 2, "device": "cuda", "backend": "nccl"}
    for verdict in Verdict:
        result = CaseResult(case=case, **about | {"verdict": verdict})
        assert gpu_command.judge_equal_run(result, 1)[0] is (verdict == Verdict.CLOSE)


def test_a_case_that_cannot_run_on_so_few_gpus_is_not_run_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "run_cases", lambda cases, options, folder: 1 / 0)
    lines = {line.name: line for line in gpu_command.run_cases_on(3, tmp_path)}
    assert [line.outcome for name, line in lines.items() if name != "experts_seq_regional"] == ["NOT RUN"] * 16
    assert lines["experts_seq_regional"].outcome == "FAIL", "it was run, on two"
    assert lines[KILLED].found == (
        "no run on 3 GPUs: CaseError: expert parallelism must divide the world size expected: world_size a multiple of "
        "ep found: world_size=3, ep=2"
    )


def test_a_rank_that_is_killed_or_hangs_must_be_named(cases_come_to):
    error = "RankError: rank 1 was killed by SIGKILL"
    killed, hung, *_ = cases_come_to(verdict=Verdict.ERROR, error=error)[0]
    assert (killed.name, killed.outcome, hung.name, hung.outcome) == (KILLED, "pass", HUNG, "FAIL")
    killed, hung, *_ = cases_come_to(verdict=Verdict.ERROR, error=reported_hang())[0]
    assert (killed.outcome, hung.outcome) == ("FAIL", "pass")


def reported_hang(
    found="ranks 0, 1 at step 1, unfinished", first="waits for all_gather 9", second="has waited for all_gather 8"
):
    """The text of a hang in which each of two ranks did something last."""
    return (
        "RankError: graph did not finish: the case ran longer than 60 s\n"
        f"  expected: every rank to finish\n  found: {found}\n  fix: none\n\n"
        f"rank 0, logs/a/rank0.log:\n  {first} of group fsdp, 24 bytes of float32\n  File a.py, line 3 in wait\n\n"
        f"rank 1, logs/a/rank1.log:\n  {second} of group fsdp, 24 bytes of float32\n  File b.py, line 4 in hang"
    )


@pytest.mark.parametrize(
    ("text", "rank", "is_seen"),
    [
        (reported_hang(), 1, True),
        (reported_hang(first="has waited for all_gather 9"), 1, True),  # as on CUDA, whose hosts run ahead
        (reported_hang(found="rank 0 at the start; ranks 0, 1 at step 1, unfinished"), 1, True),
        (reported_hang(first="has waited for all_gather 8"), 1, False),
        (reported_hang(first="has waited for all_gather 7"), 1, False),
        (reported_hang(second="waits for all_gather 8"), 1, False),
        (reported_hang(), 0, False),
        (reported_hang(found="ranks 0, 1 at step 10, unfinished"), 1, False),
        (reported_hang(found="ranks 0, 11 at step 1, unfinished"), 1, False),
        (reported_hang(found="rank 1 at step 1, unfinished"), 1, False),
        (reported_hang(found="rank 0 at step 1, unfinished"), 1, False),
        (reported_hang().replace("longer than", "for"), 1, False),
        ("1 at step 1, longer than", 1, False),
    ],
)
def test_a_rank_that_hangs_must_be_distinguished_from_those_that_it_holds_up(text, rank, is_seen):
    result = CaseResult(
        case=CASES["moe_batch"], verdict=Verdict.ERROR, error=text, steps=2, world_size=2, device="cuda", backend="nccl"
    )
    assert gpu_command.judge_hung(result, rank)[0] is is_seen
    assert not gpu_command.judge_hung(replace(result, verdict=Verdict.UNVERIFIED), rank)[0]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "inject", "judge", "outcome", "found"),
    [
        (KILLED, "kill-rank:rank=1,step=0", gpu_command.judge_killed, "pass", "killed by signal 9 (SIGKILL) at step 0"),
        (KILLED, "raise:rank=1,step=0", gpu_command.judge_killed, "FAIL", "where rank 1 and SIGKILL should be named"),
        (HUNG, "hang-rank:rank=1,step=1", gpu_command.judge_hung, "pass", "ranks 0, 1 at step 1, unfinished"),
        (
            HUNG,
            "kill-rank:rank=1,step=1",
            gpu_command.judge_hung,
            "FAIL",
            "where rank 1 should be seen to hold up others at step 1",
        ),
        ("moe_batch", None, gpu_command.judge_equal_run, "pass", "EQUAL on 2 ranks, cpu, shared: 0 of "),
        *(
            (name, fault, gpu_command.judge_equal_run, "FAIL", "DIFFERENT on ")
            for name, fault in {
                "experts_seq_idle_experts": "expert-ends-off-by-one",
                "isolate_distinct": "rows-sent-in-reverse",
                "blocks_batch_bucketed_float32": "bucket-packed-in-reverse",
                "experts_seq_overlap": "rows-not-put-back",
                "blocks_batch_offload": "another-activation-reloaded",
                "experts_seq_flex": "rows-not-put-back",
                "joint_llama3_fsdp4_tp2": "tensor-gradient-not-summed",
            }.items()
        ),
        *(
            (name, None, gpu_command.judge_equal_run, "pass", " ranks, cpu, shared: 0 of ")
            for name in CASES_TRIED[3:-1]
        ),
    ],
)
def test_ranks_and_cases_are_run_and_reported_on_a_cpu_as_they_would_be_on_gpus(
    tmp_path, name, inject, judge, outcome, found
):
    """What is killed and hangs is named there too, and a case fails with a defect of what it is there for."""
    case = small(CASES[name if name in CASES else "moe_batch"], layers=2 if name == "blocks_batch_offload" else 1)
    ranks = 8 if case.parallelism.ep == 8 else 2
    case = replace(case, parallelism=replace(case.parallelism, world_size=ranks), steps=2)
    line = gpu_command.try_case(case, name, inject, 45.0, tmp_path, judge, device="cpu")
    assert line.outcome == outcome and found in line.found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "stands_in", "wrong", "outcome", "found"),
    [
        ("experts_seq_regional", None, "attend_to_later_positions", "FAIL", "DIFFERENT on 2 ranks, cpu, shared: "),
        ("regional_inductor", "experts_seq_flex_marked", None, "pass", "CLOSE on 2 ranks, cpu, shared: "),
        ("regional_inductor", "experts_seq_flex_marked", "add_too_much_in_a_norm", "FAIL", "beyond the case's bound"),
    ],
)
def test_a_check_of_regions_fails_where_a_region_is_wrong(
    tmp_path, monkeypatch, name, stands_in, wrong, outcome, found
):
    """A fault is put into graphs that run as they are. For FlexAttention, which Inductor compiles on GPUs alone, a step
    stands in whose regions it compiles here.
    """
    passes = (f"{WRONG_REGIONS}:{wrong}@after=concretize_symbols",) if wrong else ()
    monkeypatch.setattr(gpu_command, "RunOptions", partial(RunOptions, extra_passes=passes))
    case = small(CASES[stands_in or name])
    case = replace(case, parallelism=replace(case.parallelism, world_size=2), steps=2)
    line = gpu_command.try_case(case, name, None, 240.0, tmp_path, gpu_command.judge_equal_run, device="cpu")
    assert line.outcome == outcome and found in line.found, line


def test_a_case_that_cannot_be_run_has_failed(monkeypatch, tmp_path):
    def fail(cases, options, folder):
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(launch, "run_cases", fail)
    lines = list(gpu_command.run_cases_on(8, tmp_path))
    assert {(line.outcome, line.found) for line in lines} == {("FAIL", "RuntimeError: no driver")}
    assert CASES[MAIN_CASES[0]].parallelism.world_size == 8
