"""Works that a log hands on: who waits for them, by whatever method, and what is told where nobody does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

from bitproof.harness.disturb.deferred_work import DeferredWork, HandleLog, defer
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.replay import Replay, StepTrace, write_archive
from bitproof.harness.localize.noise import NoiseSearch
from bitproof.harness.records import Divergence
from tests.harness.localize.logs.test_call_log import System, calls_of, layers

WAITS: list[Callable[[Work], Any]] = [
    lambda work: work.wait(),
    lambda work: work.get_future().wait(),
    lambda work: work.is_completed(),
    lambda work: work.result(),
    lambda work: work.synchronize(),
]


@pytest.mark.parametrize("wait", WAITS)
def test_whoever_asks_a_work_for_anything_waits_for_it(wait: Callable[[Work], Any]) -> None:
    work = DeferredWork([torch.ones(2)])
    assert not work.is_asked
    wait(work)
    assert work.is_asked


def test_a_work_that_is_done_comes_in_place_of_the_backend_s_and_knows_its_call() -> None:
    waited = []

    class Slow(Work):
        def wait(self, timeout: Any = None) -> bool:
            waited.append(True)
            return True

    works, x = HandleLog(), torch.ones(2)
    result, work = works.held(torch.ops.c10d.allreduce_.default, (x, Work.boxed(slow := Slow())), [x], 7, pytest.fail)
    assert result is x and waited == [True] and slow
    assert works.abandoned() == [7]
    Work.unbox(work).get_future().wait()
    assert works.abandoned() == []


def test_what_comes_from_one_rank_is_waited_for_where_the_caller_does() -> None:
    done: list[str] = []

    class Slow(Work):
        def wait(self, timeout: Any = None) -> bool:
            done.append("waited")
            return True

    works, x = HandleLog(), torch.ones(2)
    slow = Slow()
    held = works.held(torch.ops.c10d.recv_.default, Work.boxed(slow), [x], 7, lambda: done.append("arrived"))
    assert done == [] and works.abandoned() == [7]
    work = Work.unbox(held)
    work.wait()
    work.wait()
    assert done == ["waited", "arrived"] and works.abandoned() == []


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_that_nobody_waited_for_has_no_output_and_one_whose_future_is_read_has(one_rank: Any) -> None:
    class Collectives(System):
        def step(self, x: torch.Tensor) -> None:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True)
            self.read = dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()[0])

    system, x = Collectives(layers()), torch.ones(2)
    assert [len(call.outputs) for call in calls_of(system, x)] == [1, 0, 1]
    assert system.read.value() is x


class Linear(torch.nn.Module):
    """A loss of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def test_the_reducer_of_distributed_data_parallel_reads_its_sums_while_calls_are_logged(one_rank: Any) -> None:
    """It reads futures from C++."""

    class Data(System):
        def step(self, x: torch.Tensor) -> None:
            wrapped(x).backward()

    system = Data(Linear())
    wrapped = torch.nn.parallel.DistributedDataParallel(system.model)
    calls = calls_of(system, torch.ones(2))
    assert [len(call.outputs) for call in calls if call.operator == "allreduce_"] == [1]


def test_noise_that_does_not_come_again_is_reported_as_the_collective_that_nobody_waited_for(tmp_path: Path) -> None:
    place, step_calls = CallSite(None, "update"), []
    for outputs in ((), ("b",)):
        step_calls.append([Call(place, "allreduce_", ("a",), outputs, source="loop.py:3", collective=True)])

    def search(calls: list[Call]) -> NoiseSearch:
        def run_replay(role: Any, number: int, folder: Path, replay: Replay) -> None:
            for rank in (0, 1):
                write_archive(folder / f"rank{rank}.zip", StepTrace(calls=calls * 2, steps=[(0, 1), (1, 1)]))

        bits: Any = None
        return NoiseSearch({}, tmp_path, 2, run_replay, bits, role="candidate", stressed=False)

    found, reported = search(step_calls[0]).explain_noise(Divergence(step=1, rank=1, kind="grad", name="w"))
    assert found.call is not None
    assert (found.call.operator, found.call.how, found.call.rank) == (
        "allreduce_",
        "is launched, and never waited for",
        1,
    )
    assert reported == (
        "the difference of the candidate from itself did not recur in two replays, "
        "which wait for every collective at once"
    )
    found, reported = search(step_calls[1]).explain_noise(Divergence(step=1, rank=1, kind="grad", name="w"))
    assert found.call is None
    assert reported == "the difference of the candidate from itself did not recur in two replays"


def test_under_stress_what_is_gathered_arrives_when_it_is_waited_for_and_autograd_knows_nothing_of_it(
    one_rank: Any,
) -> None:
    x, gathered = torch.ones(2), torch.zeros(2)
    held: list[DeferredWork] = []
    group = dist.distributed_c10d._get_default_group()

    class Late(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return defer(function, args, kwargs or {}, held)

    version = gathered._version
    with Late():
        work = group._allgather_base(gathered, x)
    assert not gathered.any() and not held[0].is_asked
    work.wait()
    assert gathered.equal(x) and gathered._version == version and held[0].is_asked
