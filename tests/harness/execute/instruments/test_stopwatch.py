from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bitproof.harness.case import Batch, Case, Parallelism
from bitproof.harness.execute.instruments.stopwatch import (
    Stopwatch,
    counts_flops,
    measured_peak,
    peak_flops,
    throughput_of,
    tokens_of,
)
from bitproof.harness.execute.status_messages import Done
from bitproof.harness.records.throughput import NOT_KNOWN, Throughput, throughput_rows
from bitproof.harness.torch_operators import FlopCount

CASE = Case(name="toy", family="x", reference="eager", steps=4, parallelism=Parallelism(world_size=2, ep=1))
CPU = torch.device("cpu")


def step(model: torch.nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss = model(torch.linspace(0, 1, 15).reshape(5, 3)).square().sum()
    loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def test_operations_are_those_that_torchs_counter_counts_and_bits_stay():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    plain = step(model)
    with FlopCount() as own:
        counted = step(model)
    with FlopCounterMode(display=False) as theirs:
        step(model)
    assert own.flops == theirs.get_total_flops() > 0
    assert torch.equal(plain, counted)


def test_a_formula_that_cannot_read_a_call_leaves_operations_unknown(monkeypatch):
    def broken(*args, **kwargs):
        raise TypeError

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.mm, broken)
    with FlopCount() as counter:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.flops is None and product.tolist() == [[2, 2], [2, 2]]


def test_what_recording_takes_is_no_part_of_a_steps_time_and_one_that_is_not_timed_has_none():
    recorder = SimpleNamespace(seconds=0.0)
    watch = Stopwatch(recorder, CPU, is_on=True, counts=True)
    for _ in range(2):
        with watch.running():
            torch.ones(2, 2) @ torch.ones(2, 2)
            time.sleep(0.03)
            recorder.seconds += 0.03
    assert len(watch.seconds) == 2 and max(watch.seconds) < 0.03
    assert watch.flops == 16, "of the first step alone"
    off = Stopwatch(recorder, CPU, is_on=False, counts=True)
    with off.running():
        pass
    assert (off.seconds, off.flops) == ([], None)


def done(*seconds, **facts):
    return Done(step_seconds=seconds, process_mib=100.0, **facts)


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_first_one_warms_up():
    found = throughput_of(CASE, "eager", "cpu", [done(9.0, 1.0, 2.0, 3.0, flops=10), done(9.0, 2.0, 1.0, 5.0)])
    assert (found.steps, found.step_seconds, found.flops) == (3, 2.0, 10)
    assert (found.tokens, found.tokens_per_second) == (256, 128.0)
    assert (found.peak_mib, found.peak_of) == (100.0, "process")
    assert found.mfu == pytest.approx(10 / 2.0 / found.peak_flops)
    [alone] = [throughput_of(CASE, "eager", "cpu", [done(4.0)])]
    assert (alone.steps, alone.step_seconds, alone.spread_seconds) == (1, 4.0, 0.0)
    assert throughput_of(CASE, "eager", "cpu", [done()]) is None


def test_of_a_users_system_neither_tokens_nor_operations_are_known_and_nothing_is_guessed():
    found = throughput_of(CASE, "mine.py:make", "cpu", [done(1.0, 1.0)])
    assert (found.tokens, found.flops, found.tokens_per_second, found.mfu) == (None, None, None, None)
    reported = dict(found.table_rows())
    assert [reported[name] for name in ("tokens a second", "operations a step of rank 0", "MFU")] == [NOT_KNOWN] * 3
    assert not counts_flops("mine.py:make", 0) and not counts_flops("eager", 1) and counts_flops("graph", 0)


def test_ranks_that_share_a_text_share_its_tokens():
    spread = replace(CASE, parallelism=Parallelism(world_size=8, tp=2, ep=1), batch=Batch(sequences=2, seq_len=16))
    assert tokens_of(spread) == 2 * 16 * 4


def test_a_peak_is_a_data_sheets_or_measured_and_ranks_share_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    eight = replace(CASE, parallelism=Parallelism(world_size=8, ep=1))
    peak, source = peak_flops(eight, "cpu", done(1.0))
    assert peak == measured_peak("bfloat16") / 4 > 1e8
    assert source == "measured by products of 512 in bfloat16 on a core, 2 for 8 ranks"
    gpu = done(1.0, gpu={"gpu": "NVIDIA H100 80GB HBM3, 132 multiprocessors, compute capability 9.0"})
    assert peak_flops(CASE, "cuda", gpu) == (989.4e12, "NVIDIA H100 80GB HBM3's data sheet, bfloat16")
    assert peak_flops(CASE, "cuda", done(1.0, gpu={"gpu": "NVIDIA Other, 1"})) == (None, None)


def test_a_table_has_a_row_a_figure_and_a_column_a_side():
    some = Throughput(steps=2, step_seconds=0.5, spread_seconds=0.1, tokens=100, flops=10**9, peak_flops=1e10)
    rows = throughput_rows({"reference": some, "candidate": replace(some, tokens=None)})
    assert rows[0] == ("tokens a second", "200", NOT_KNOWN)
    assert ("MFU", "20.0%", "20.0%") in rows
    assert ("operations a step of rank 0", "1 GFLOP", "1 GFLOP") in rows
