from __future__ import annotations

import pytest

from bitproof.harness.options import RunOptions, Stress


def test_a_plain_run_has_nothing_to_remark() -> None:
    assert RunOptions().remarks() == ()


def test_a_run_without_controls_says_what_it_cannot_decide() -> None:
    [plain] = RunOptions(control="never").remarks()
    assert plain == "--no-control: no system ran twice, so noise was not distinguished from defects"
    without, stressed = RunOptions(control="never", stress=Stress()).remarks()
    assert "no system ran twice but under stress" in without
    assert stressed.startswith("--stress: each system ran once more with random sleeps of up to 2 ms ")


def test_stress_warns_of_threads_only_where_there_are_several() -> None:
    assert "threads" not in str(Stress())
    assert "; 4 threads an operator, which by itself may move bits" in str(Stress(num_threads=4))


def test_sharing_gpus_is_reported_with_what_joined_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    [shared] = RunOptions(share_gpus=True).remarks()
    assert shared == "--share-gpus: where GPUs were fewer than ranks, ranks shared them over gloo, and NCCL did not run"
    monkeypatch.setenv("BITPROOF_SHARED_NCCL", "1")
    [shared] = RunOptions(share_gpus=True).remarks()
    assert shared.endswith("ranks shared them over NCCL, as if each were on a host of its own")
