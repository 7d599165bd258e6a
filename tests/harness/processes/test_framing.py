"""What travels between processes arrives as what it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import all_cases
from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Failure, Problem
from bitproof.harness.execute.requests import (
    REQUESTS,
    LocalRunRequest,
    MachineRequest,
    RankSlots,
    RunAnswer,
    RunSeconds,
)
from bitproof.harness.execute.status_messages import (
    STATUS_MESSAGES,
    Done,
    End,
    Prepared,
    PreparedGraph,
    Ready,
    StepBegan,
    StepsEnded,
)
from bitproof.harness.localize.logs.replay import Replay, ValueSite
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions, Stress
from bitproof.harness.processes import framing
from bitproof.harness.records import CaseResult, Closeness, Divergence, Event, Key, PassReport, Verdict
from tests.harness.execute.test_requests import request

CHUNKED = PassReport("chunk", 0.5, 1, 2, {"dim": "seq"}, {"calls": {"layers.0": 1}}, {"cat": [0, 1]})


def test_a_run_of_every_case_arrives_as_it_was_requested(tmp_path: Path) -> None:
    cases = all_cases()
    asked = request(
        tmp_path,
        case=cases[0],
        placement=Placement("cuda", "gloo", 1, shared=True),
        replay=Replay(
            step=1, log=True, record=Key(1, "grad", "weight", 0), values=(ValueSite(0, 3, 1), ValueSite(1, 4, 0))
        ),
        options=RunOptions(
            inject="bf16@layer=1",
            extra_passes=("a:b",),
            stress=Stress(seed=3),
            names={"mine": "weight"},
            values=("0/*",),
            kept_graphs=tmp_path,
            jobs="auto",
        ),
        dump_dir=tmp_path,
        later=request(tmp_path, case=cases[0]),
    )
    for case in cases:
        of_case = replace(asked, case=case, later=replace(asked.later, case=case))
        assert framing.read(framing.write(of_case), *REQUESTS) == of_case


@pytest.mark.parametrize(
    "message",
    [
        MachineRequest(),
        RunAnswer(
            graph=PreparedGraph(
                code_hash="c",
                passes=[CHUNKED],
            ),
            seconds=RunSeconds(steps=1.5),
        ),
        Closeness(
            bound=0.1,
            largest_error=float("inf"),
            largest=Key(0, "grad", "weight", 1),
            tensors_beyond=1,
            histogram={"grad": {"1": 2}},
        ),
        Event(event="step", case="moe_seq", system="graph", step=1, steps=2),
        Problem.of(RankError("it failed", rank=3, found="a file named caf\udce9"), "graph"),
        Prepared(graph=None),
        Ready(),
        StepBegan(step=3),
        StepsEnded(),
        Done(determinism={"seed": 1}, switches={"set": {"tf32": False}}, chunked={"layers.0": 2}, unused_names=("a",)),
        Failure(rank=1, time=2.5, what="raised"),
        End(unfinished={0: "at step 1", 10: "silent"}, done=[Done(seconds=1.0)], failure=None),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message) -> None:
    assert framing.read(framing.write(message), Event, *STATUS_MESSAGES, type(message)) == message


def test_seats_keep_who_serves_the_store(tmp_path: Path) -> None:
    for server in (None, ("localhost", 29500)):
        rank_slots = RankSlots(ranks=(1,), part="part{rank}", store="groups", server=server, local_rank=1)
        asked = LocalRunRequest(run=request(tmp_path), rank_slots=rank_slots)
        assert framing.read(framing.write(asked), LocalRunRequest) == asked


def test_a_result_arrives_as_it_was_reported(tmp_path: Path) -> None:
    case = all_cases()[0]
    result = CaseResult(
        case=case, verdict=Verdict.DIFFERENT, steps=1, world_size=2, device="cpu", backend="gloo", error="why"
    )
    key = Key(0, "grad", "weight", 1)
    result = replace(result, first_divergence=Divergence(**key._asdict()), differing_kinds=("grad",))
    assert framing.read(framing.write(result), CaseResult) == result


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a message of kind Ready, not StepBegan or Done"):
        framing.read(framing.write(Ready()), StepBegan, Done)


def test_a_field_that_no_message_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no message of ours"):
        framing.read(json.dumps({"kind": "StepBegan", "step": 1, "more": 2}), StepBegan)


@pytest.mark.parametrize(
    "line", [b"\xff{", b"[1]", b"{}", b"12", b"[" * 100_000], ids=["bytes", "list", "nothing", "number", "deep"]
)
def test_what_is_no_message_is_refused_with_its_beginning(line):
    with pytest.raises(ValueError, match="no message of ours: b'") as refusal:
        framing.read(line, StepBegan, Done)
    assert len(str(refusal.value)) < 150
