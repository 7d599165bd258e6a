"""What scheduling stress disturbs, what it finds that plain runs hide, and what it leaves alone."""

import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitproof.harness.disturb.stress import CYCLES_A_SECOND, stressed
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.graph import offload_operators
from bitproof.harness.options import RunOptions, Stress
from bitproof.harness.records import CaseResult, Verdict
from tests.harness.execute.test_launch import TOYS, nothing_left_behind, toy, toy_folder
from tests.harness.toy_systems import SLEEPY


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory) -> dict[str, CaseResult]:
    cases = [toy("reads_fresh_memory", name="fresh", reference="reads_fresh_memory"), toy("racing", name="race")]
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")):
        options = RunOptions(device="cpu", timeout=60.0, control="never", stress=SLEEPY)
        found = list(run_cases(cases, options, folder))
    return {result.case.name: result for result in found}


@pytest.mark.ranks
def test_a_system_that_synchronizes_and_writes_what_it_reads_stands_stress(results):
    assert results["race"].stress == {"reference": "EQUAL", "candidate": "DIFFERENT"}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fresh", "race"])
def test_plain_runs_hide_what_stress_shows(results, name):
    result = results[name]
    assert result.compared["grad"] == 8 and not any(result.mismatched.values())
    assert result.control == {"reference": None, "candidate": None}
    assert result.verdict == Verdict.NONDETERMINISTIC


@pytest.mark.ranks
def test_a_race_is_reported_as_seen_under_stress_alone(results):
    assert results["race"].error == (
        f"control of candidate {TOYS}racing under stress: a plain and a stressed run of one system differ, "
        "first at step 2, rank 1, loss loss"
    )
    first = results["race"].first_divergence
    assert (first.between, first.step, first.rank) == ("candidate against itself under stress", 2, 1)
    assert (first.call.operator, first.call.ranks) == ("add.Tensor", "1"), (
        "the sleeps of a stressed replay are the same"
    )


@pytest.mark.ranks
def test_of_two_systems_that_fail_under_stress_the_reference_is_looked_at(results):
    assert results["fresh"].stress == {"reference": "DIFFERENT", "candidate": "DIFFERENT"}
    assert [line.split(" under stress: ")[0] for line in results["fresh"].error.splitlines()] == [
        f"control of {role} {TOYS}reads_fresh_memory" for role in ("reference", "candidate")
    ]
    assert results["fresh"].first_divergence.between == "reference against itself under stress"


@pytest.mark.ranks
def test_a_stressed_replay_blames_the_reader_of_memory_that_nobody_wrote(results):
    first = results["fresh"].first_divergence
    assert (first.call.operator, first.call.ranks) == ("add.Tensor", "1")
    assert first.call.how == "reads uninitialized memory, which no call has written"
    assert first.call.source.startswith("tests/harness/toy_systems.py:")


@pytest.mark.ranks
def test_a_stressed_recording_says_so_and_a_plain_one_too(results, folder):
    recordings = folder / "recordings" / "race"
    plain, stress = (
        json.loads((recordings / f"{toy_folder('steady')}{arm}" / "manifest.json").read_text())
        for arm in ("", ".stress")
    )
    assert (plain["stress"], stress["stress"]) == (None, asdict(SLEEPY))
    assert (plain["determinism"]["num_threads"], stress["determinism"]["num_threads"]) == (1, 2)
    filled = [manifest["determinism"]["fill_uninitialized_memory"] for manifest in (plain, stress)]
    assert filled == [True, False]


def slept(monkeypatch, rank: int, seed: int = 0) -> list[float]:
    """How long a rank sleeps before each of two calls of a collective's namespace."""
    times: list[float] = []
    monkeypatch.setattr("bitproof.harness.disturb.stress.time.sleep", times.append)
    with stressed(Stress(seed=seed), rank):
        for _ in range(2):
            torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        torch.ones(1) + 1
    return times


def test_ranks_sleep_before_collectives_and_waits_alone_each_in_its_own_way_and_again_the_same(monkeypatch):
    first = slept(monkeypatch, 0)
    assert len(set(first)) == 2 and all(0 <= time <= 0.002 for time in first)
    assert slept(monkeypatch, 0) == first
    assert len({*first, *slept(monkeypatch, 1), *slept(monkeypatch, 0, seed=1)}) == 6


def test_on_cuda_streams_sleep_and_the_host_does_not(monkeypatch):
    """Calls alone are seen: before collectives the stream that computes sleeps, before copies the copies' own."""
    slept_on, stream = [], ["compute"]

    @contextmanager
    def switched(name):
        stream.append(name)
        yield
        stream.pop()

    monkeypatch.setattr("bitproof.harness.disturb.stress.time.sleep", lambda seconds: pytest.fail("the host sleeps"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept_on.append((stream[-1], cycles)))
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(offload_operators, "copy_stream", lambda device: f"copies of {device}")
    with stressed(Stress(), 0, torch.device("cuda", 3)):
        torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        host = offload_operators.OFFLOAD(torch.ones(1))
        offload_operators.WAIT_RELOAD(offload_operators.RELOAD(host, "cpu"))
        torch.ones(1) + 1
    assert [where for where, _ in slept_on] == ["compute", "copies of cuda:3", "copies of cuda:3"]
    assert all(0 < cycles <= 0.002 * CYCLES_A_SECOND for _, cycles in slept_on)
    assert len({cycles for _, cycles in slept_on}) == 3


def test_on_a_cpu_copies_are_not_delayed(monkeypatch):
    monkeypatch.setattr("bitproof.harness.disturb.stress.time.sleep", lambda seconds: pytest.fail("it sleeps"))
    with stressed(Stress(), 0, torch.device("cpu")):
        offload_operators.OFFLOAD(torch.ones(1))


FRESH = [
    lambda like: torch.empty(3, 2),
    lambda like: torch.empty_like(like),
    lambda like: torch.empty_strided((3, 2), (1, 3)),
    lambda like: like.new_empty(3, 2),
    lambda like: like.new_empty_strided((3, 2), (1, 3)),
    lambda like: torch.empty_permuted((3, 2), (1, 0)),
    lambda like: torch.empty(0).resize_(3, 2),
]


@pytest.mark.parametrize("make", FRESH)
def test_fresh_memory_holds_zeros_under_stress(make):
    def dirty() -> Tensor:
        return make(torch.ones(3, 2)).fill_(7)

    with stressed(Stress(), 0):
        for _ in range(20):
            dirty()  # leaves sevens where the next one is likely to lie
            assert make(torch.ones(3, 2)).eq(0).all()
            assert torch.full((2,), 3.0).eq(3).all(), "what is written stays"


def test_what_a_resized_tensor_held_stays_under_stress():
    with stressed(Stress(), 0):
        for _ in range(20):
            torch.full((64,), 7.0)
            x = torch.full((8,), 3.0)
            assert x.resize_(64)[:8].eq(3).all()
            assert x[8:].eq(0).all()
            assert torch.ops.aten.resize(torch.full((8,), 3.0), [64]).tolist() == [3.0] * 8 + [0.0] * 56
            part = torch.full((8,), 3.0)[2:4]
            assert part.resize_(6).eq(3).all(), "there was room for them, behind the part"


def test_without_stress_nothing_is_disturbed(monkeypatch):
    monkeypatch.setattr("bitproof.harness.disturb.stress.time.sleep", lambda seconds: pytest.fail("it sleeps"))
    with stressed(None, 0):
        torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
