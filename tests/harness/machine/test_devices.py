import threading
from dataclasses import replace

import pytest

from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.errors import CaseError
from bitproof.harness.machine import devices
from bitproof.harness.machine.devices import Placement, lease_gpus, place, unmet_requirement


def test_auto_takes_gpus_only_when_every_rank_gets_one():
    assert place("auto", 8, 8) == Placement("cuda", "nccl", 8)
    assert place("auto", 8, 7) == Placement("cpu", "gloo")
    assert place("cpu", 8, 8) == Placement("cpu", "gloo")


def test_fewer_gpus_than_ranks_are_refused_unless_sharing_is_asked_for():
    assert place("cuda", 8, 8, share_gpus=True) == place("cuda", 8, 8) == Placement("cuda", "nccl", 8)
    with pytest.raises(CaseError) as error:
        place("cuda", 8, 7)
    assert str(error.value) == (
        "CaseError: there are fewer GPUs than ranks, and NCCL gives each rank one of its own\n"
        "  expected: 8 GPUs for 8 ranks\n"
        "  found: 7 that torch can use\n"
        "  fix: choose --world-size 7, or let ranks share them over gloo, which tests no NCCL: --share-gpus"
    )


def test_fewer_gpus_than_ranks_are_shared_over_gloo(monkeypatch):
    monkeypatch.delenv("BITPROOF_SHARED_NCCL", raising=False)
    shared = place("cuda", 3, 2, share_gpus=True)
    assert shared == Placement("cuda", "gloo", 2, shared=True)
    assert [shared.device_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_ranks_of_one_machine_share_memory_unless_they_are_asked_not_to():
    assert place("cpu", 8, 0, "auto") == place("cpu", 8, 0, "shared") == Placement("cpu", "gloo", in_memory=True)
    assert place("cpu", 8, 0, "gloo") == Placement("cpu", "gloo")
    assert place("cuda", 3, 2, "auto", share_gpus=True) == Placement("cuda", "gloo", 2, shared=True, in_memory=True)


def test_ranks_that_each_have_a_gpu_meet_over_nccl():
    assert place("auto", 8, 8, "auto").collectives == "nccl"
    with pytest.raises(CaseError) as error:
        place("auto", 8, 8, "shared")
    assert str(error.value) == (
        "CaseError: ranks that each have a GPU do not meet in shared memory\n"
        "  expected: collectives over NCCL\n"
        "  found: --collectives shared\n"
        "  fix: leave --collectives out, or run with --device cpu"
    )


def test_where_the_kernel_cannot_count_arrivals_ranks_meet_over_gloo(monkeypatch):
    monkeypatch.setattr(devices, "is_supported", lambda: False)
    monkeypatch.setattr(devices.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    assert place("cpu", 8, 0, "auto").collectives == "gloo"
    with pytest.raises(CaseError) as error:
        place("cpu", 8, 0, "shared")
    assert str(error.value) == (
        "CaseError: ranks cannot meet in shared memory on this machine\n"
        "  expected: Linux on x86_64 or aarch64, whose kernel has futex\n"
        "  found: Darwin on arm64\n"
        "  fix: leave --collectives out, or give --collectives gloo"
    )


def test_sharing_tries_nccl_only_when_asked(monkeypatch):
    monkeypatch.setenv("BITPROOF_SHARED_NCCL", "1")
    assert place("cuda", 3, 2, share_gpus=True).backend == "nccl"


def test_on_nccl_sums_are_in_rank_order_unless_its_own_are_asked_for():
    ordered, native, gloo = (place("cuda", 2, 2, collectives) for collectives in ("auto", "native", "gloo"))
    assert ordered == place("cuda", 2, 2) == Placement("cuda", "nccl", 2)
    assert native == Placement("cuda", "nccl", 2, native=True)
    assert [placement.collectives for placement in (ordered, native, gloo)] == ["nccl", "native", "gloo"]


@pytest.mark.parametrize("where", [("cpu", 2, 0), ("auto", 8, 7), ("cuda", 3, 2)])
def test_nccls_own_sums_are_refused_where_ranks_do_not_meet_over_nccl(where, monkeypatch):
    monkeypatch.delenv("BITPROOF_SHARED_NCCL", raising=False)
    with pytest.raises(CaseError, match="native collectives are NCCL's own, and these ranks do not meet over NCCL"):
        place(*where, "native", share_gpus=True)


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(CaseError) as error:
        place("cuda", 8, 0)
    assert str(error.value) == (
        "CaseError: the case asks for CUDA, and this machine offers none\n"
        "  expected: at least 1 GPU that torch can use\n"
        "  found: 0 GPUs\n"
        "  fix: run with --device cpu, or see `bitproof doctor`"
    )


@pytest.mark.parametrize(
    ("request_", "num_gpus", "is_met"),
    [
        ("auto", 8, True),
        ("auto", 7, False),
        ("cuda", 1, True),
        ("cuda", 0, False),
        ("cpu", 8, False),
        ("auto", 0, False),
    ],
)
def test_a_case_that_requires_cuda_is_met_where_its_ranks_would_run_on_gpus(monkeypatch, request_, num_gpus, is_met):
    monkeypatch.setattr(devices, "gpu_models", lambda: ["H200"] * num_gpus)
    reason = unmet_requirement(replace(unchunked, requires="cuda"), request_)
    text = f"it needs CUDA; its 8 ranks run on the CPU here ({num_gpus} GPUs, --device {request_})"
    assert reason == (None if is_met else text)
    assert unmet_requirement(unchunked, request_) is None


def test_a_case_that_requires_scipy_is_met_where_that_is_installed(monkeypatch):
    needs_scipy = replace(unchunked, requires="scipy")
    assert unmet_requirement(needs_scipy, "cpu") is None
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert unmet_requirement(needs_scipy, "cpu") == "it needs scipy, the extra `placement`"


def test_a_case_waits_for_gpus_that_another_holds(tmp_path):
    placement = Placement("cuda", "nccl", 2)
    entered = threading.Event()

    def other():
        with lease_gpus(placement, 1, tmp_path):
            entered.set()

    thread = threading.Thread(target=other)
    with lease_gpus(placement, 2, tmp_path):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(5)
    thread.join()


def test_a_lease_ends_with_an_error(tmp_path):
    placement = Placement("cuda", "nccl", 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"), lease_gpus(placement, 1, tmp_path):
            raise ValueError("boom")


def test_the_cpu_needs_no_lease(tmp_path):
    with lease_gpus(Placement(), 8, tmp_path), lease_gpus(Placement(), 8, tmp_path):
        assert list(tmp_path.iterdir()) == []
