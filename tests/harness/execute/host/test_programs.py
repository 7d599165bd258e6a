"""When a graph may be traced for a rank, who writes it down, what a fault makes of it, and of what no file is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitproof.builtin_cases.chunking import moe_batch
from bitproof.harness.disturb.faults import parse_fault
from bitproof.harness.execute.host.programs import (
    needs_program,
    options_of_rank,
    prepare_program,
    with_fault,
)
from bitproof.harness.graph.graph_options import GraphOptions


def test_no_program_is_traced_before_determinism_switches_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose among kernels, and so among operators: on CUDA another attention would be traced."""
    traced: list[torch.device] = []
    monkeypatch.setattr("bitproof.harness.systems.graph.prepare", lambda case, device, *others: traced.append(device))
    cpu, before = torch.device("cpu"), torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        with pytest.raises(AssertionError, match="a program is traced under determinism switches"):
            prepare_program(moe_batch, cpu, GraphOptions())
        torch.use_deterministic_algorithms(True)
        prepare_program(moe_batch, cpu, GraphOptions())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        with pytest.raises(AssertionError, match="and on the current device"):
            prepare_program(moe_batch, torch.device("cuda", 1), GraphOptions())
        prepare_program(moe_batch, torch.device("cuda", 0), GraphOptions())
    finally:
        torch.use_deterministic_algorithms(before)
    assert traced == [cpu, torch.device("cuda", 0)]


def test_of_ranks_that_make_their_own_graph_the_first_alone_writes_it_down() -> None:
    options = GraphOptions(extra_passes=("a:b",), dump_dir=Path("graphs"))
    assert options_of_rank(options, 0) is options
    assert options_of_rank(options, 1) == GraphOptions(extra_passes=("a:b",))


def test_systems_of_graphs_need_a_program_and_others_do_not() -> None:
    systems = ("graph", "joint", "autoplace", "precompiled", "eager", "eager_chunked", "mine:graph")
    assert [needs_program(system) for system in systems] == [True] * 4 + [False] * 3


def test_only_a_fault_of_the_catalogue_that_edits_graphs_is_struck_and_only_into_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "bitproof.harness.systems.graph.mutate_program", lambda program, entry, case: (program, entry.name)
    )
    edits, calls, flips = "tokens-not-counted", "counts-not-reset", "flip-bit:grad=w,rank=0,step=0"
    assert with_fault("program", parse_fault(edits), moe_batch) == ("program", edits)
    assert with_fault(None, parse_fault(edits), moe_batch) is None, "an eager step has no graph"
    for fault in (None, parse_fault(calls), parse_fault(flips)):
        assert with_fault("program", fault, moe_batch) == "program"
