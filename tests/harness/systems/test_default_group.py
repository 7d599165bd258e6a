"""A trainer may make torch's default process group, destroy it, and parse options, as it does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bitproof
from bitproof.harness.systems.default_group import as_lent, lent
from tests.harness.systems import group_trainers

FILE = group_trainers.__file__


def judged(candidate: str, folder: Path, reference: str = "plain", **options: object) -> bitproof.Run:
    case = bitproof.Case(
        name="groups",
        family="own",
        reference=f"{FILE}:{reference}",
        candidate=f"{FILE}:{candidate}",
        steps=2,
        parallelism=bitproof.Parallelism(world_size=2),
        options=options,
    )
    return bitproof.run(case, control="never", report_dir=folder)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"backend": "gloo"},
        {"backend": "GLOO", "init_method": "env://"},
        {"backend": "cpu:gloo,cuda:nccl", "timeout": 2},
        {"own_numbers": True},
        {"backend": "gloo", "init_method": "tcp://127.0.0.1:29512", "own_numbers": True},
        {"device_id": "cpu"},
        {"backend": "gloo", "group_name": "all"},
    ],
)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_trainer_may_make_the_group_that_is_there(given, tmp_path):
    run = judged("made_by_itself", tmp_path, given=given)
    assert run.verdict == "EQUAL", run


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ({"backend": "nccl"}, {}, "backend='nccl'"),
        ({"backend": "cuda:nccl"}, {}, "backend='cuda:nccl'"),
        ({"backend": "fake"}, {}, "backend='fake'"),
        ({"world_size": 1}, {}, "world_size=1"),
        ({"rank": 7}, {}, "rank=7"),
        ({}, {"WORLD_SIZE": "1"}, "world_size=1"),
        ({"init_method": "tcp://127.0.0.1:29512", "world_size": 4, "rank": 0}, {}, "world_size=4"),
        ({"device_id": "cuda:0"}, {}, "device_id='cuda:0'"),
        ({"pg_options": [1]}, {}, "pg_options=[1]"),
    ],
)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_trainer_that_asks_for_another_group_is_refused_by_the_argument(given, environment, found, tmp_path):
    run = judged("made_by_itself", tmp_path, given=given, environment=environment)
    assert run.verdict == "ERROR"
    assert f"init_process_group was called with {found}" in run.result.error
    assert "expected: backend='gloo', rank=" in run.result.error


@pytest.mark.parametrize(
    "candidate",
    [
        "made_by_position",
        "made_twice",
        "destroyed_in_the_last_step",
        "destroyed_by_name",
        "made_and_destroyed_in_each_step",
        "destroyed_in_the_factory",
    ],
)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_trainer_may_destroy_the_group_and_make_it_again(candidate, tmp_path):
    run = judged(candidate, tmp_path)
    assert run.verdict == "EQUAL", run


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_single_rank_and_a_sharded_model_may_destroy_it(tmp_path):
    assert judged("destroyed_in_the_last_step", tmp_path, on=[1]).verdict == "EQUAL"
    assert judged("destroyed_in_the_last_step", tmp_path, shards=True).verdict == "EQUAL"


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_whole_loop_may_destroy_it_as_it_is_left_and_when_python_ends(tmp_path):
    run = judged("destroyed_after_the_loop", tmp_path, reference="plain_loop")
    assert run.verdict == "EQUAL", run


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_group_that_is_destroyed_too_early_is_gone_as_it_is_alone(tmp_path):
    run = judged("destroyed_too_early", tmp_path)
    assert run.verdict == "DIFFERENT"
    assert (run.result.first_divergence.step, run.result.first_divergence.kind) == (1, "grad")


@pytest.mark.parametrize("below", ["", "deep/er/"])
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_resumed_case_saves_into_a_folder_that_is_there(below, tmp_path):
    case = bitproof.Case(
        name="saves",
        family="own",
        reference=f"{FILE}:saving",
        candidate=f"{FILE}:saving",
        steps=2,
        resume_at=1,
        parallelism=bitproof.Parallelism(world_size=2),
        options={"below": below},
    )
    run = bitproof.run(case, control="always", report_dir=tmp_path)
    assert run.verdict == "EQUAL", run


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_factory_may_parse_its_options_as_no_words_of_ours_are_among_them(tmp_path):
    run = judged("parsing", tmp_path)
    assert run.verdict == "EQUAL", run


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_factory_whose_options_are_missing_is_an_error_that_says_what_to_do(tmp_path):
    error = judged("parsing", tmp_path, needs_data=True).result.error
    assert f"system {FILE}:parsing called sys.exit(2)" in error
    assert "case's `options`" in error


@pytest.mark.parametrize("status", [0, 3, "enough"])
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_step_that_ends_its_process_is_an_error(status, tmp_path):
    run = judged("leaving", tmp_path, status=status)
    assert run.verdict == "ERROR" and f"called sys.exit({status!r})" in run.result.error


def test_our_code_has_the_group_that_user_code_destroyed_and_user_code_has_its_own(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with lent(torch.device("cpu")):
            first = dist.group.WORLD
            dist.destroy_process_group()
            with as_lent():
                assert dist.group.WORLD is first
            assert not dist.is_initialized()
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            assert dist.group.WORLD is first
            with pytest.raises(ValueError, match="twice"):
                dist.init_process_group("gloo")
            dist.destroy_process_group()
        assert dist.group.WORLD is first
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
