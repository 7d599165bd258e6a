"""Steps replayed in one process have the bits of ranks; and errors that are seen here are seen in a run of ranks."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from bitproof.builtin_cases import CASES
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.case import Parallelism
from bitproof.harness.errors import PassError, RecordingError
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.sensitivity import measure
from bitproof.harness.powers.sensitivity.examine import Examiner
from bitproof.harness.powers.sensitivity.measure import Steps, refuse_hidden_state, why_not
from bitproof.harness.powers.sensitivity.perturb import is_safe
from bitproof.harness.powers.sensitivity.program import BUFFER
from bitproof.harness.records import Key, Manifest, Record, Recording
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import make_graph_system
from bitproof.harness.systems.step_graphs import group_table
from bitproof.reference.parallel.mesh import Mesh
from tests.harness.powers.sensitivity.toy import COUNTED, THREE, counted, program_of
from tests.ranks import on_ranks
from tests.small import small

CASE = replace(small(CASES["moe_seq"]), parallelism=Parallelism(world_size=2), steps=2)
STRIKES = 4
"""Errors of each kind that are put into runs of ranks."""


def test_what_is_not_known_as_a_graph_is_not_tried():
    assert why_not(CASE) is None
    assert why_not(replace(CASE, candidate="mine.py:make")) == "system mine.py:make is not known as a graph"
    compiled = replace(CASE, pipeline=replace(CASE.pipeline, backend="inductor"))
    assert why_not(compiled) == "backend inductor compiles the graph into code whose calls are not known"


def test_what_a_step_hands_on_must_be_compared():
    program = program_of(counted, COUNTED, THREE)
    with pytest.raises(PassError, match="that is not compared") as refusal:
        refuse_hidden_state(program)
    assert refusal.value.found == "buffer counts"
    program.compared["buffer", "counts@after_optimizer"] = program.last[BUFFER, "counts"]
    refuse_hidden_state(program)


def struck(module, node, rank, wrong):
    """The graph, in which one rank goes on from a node with another value."""
    other = GraphModule(module, copy.deepcopy(module.graph))
    found = next(x for x in other.graph.nodes if x.name == node)

    def strike(x):
        return wrong if dist.get_rank() == rank else x

    with other.graph.inserting_after(found):
        made = other.graph.call_function(strike, (found,))
    found.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    other.recompile()
    return other


def recorded(program, strikes, steps):
    """The digests of real ranks' records: of a run without an error, and of one with each of the strikes."""

    def body(mesh):
        set_determinism(CASE.seed)
        found = []
        for number, strike in enumerate([None, *strikes]):
            module = program.module if strike is None else struck(program.module, *strike)
            trainer = make_graph_system(CASE, mesh, mesh.device, replace(program, run=module), lambda f: f)
            recorder = Recorder(mesh.rank)
            for recorder.step in range(1 if number else steps):
                trainer.step(recorder.step, recorder.observe)
            found.append([[*key, record.digest] for key, record in recorder.rows.items()])
        return found

    return on_ranks(CASE.parallelism, body)


def recording_of(by_rank, number):
    rows = [row for own in by_rank for row in own[number]]
    records = {Key(*key): Record(digest, "float32", ()) for *key, digest in rows}
    return Recording(Manifest(case={}, system="graph", world_size=2, steps=2), records)


def traced_once(monkeypatch):
    """The step, traced once for the ranks and for what replays them."""
    set_determinism(CASE.seed)
    program = prepare(CASE, torch.device("cpu"))
    graph = StepGraph(program.module, program.parameter_names, program.buffer_names, 3)
    groups = GroupTable({**group_table(Mesh(0, CASE.parallelism)).groups, **program.groups})
    monkeypatch.setattr(measure, "step_graph", lambda *_, **__: (graph, groups))
    return program


@pytest.mark.slow
@pytest.mark.ranks
def test_what_is_seen_or_lost_here_is_so_in_a_run_of_ranks(monkeypatch):
    program = traced_once(monkeypatch)
    steps = Steps.of(CASE)
    start = [dict(own) for own in steps.held]
    clean = recording_of(recorded(program, [], steps=2), 0)
    steps.advance(clean)
    examiner = Examiner(steps.program, steps.ranks, "0", lambda follow: follow())
    order = [call for call in steps.program.calls if call.counts and call.node]
    random.Random(0).shuffle(order)
    seen, lost = [], []
    for call in order:
        slot, rank, wrong = examiner.error(call, 0)
        node = steps.program.makers[slot].node
        if not is_safe(wrong) or len(seen) == len(lost) == STRIKES:
            continue
        finding = examiner.examine(call.index, may_be_blind=False, formulas=())
        if finding.shown and finding.tries == 1 and len(seen) < STRIKES:
            seen.append((node, rank, wrong))
        elif not finding.shown and len(lost) < STRIKES:
            lost.append((node, rank, wrong))
    assert len(seen) == len(lost) == STRIKES
    runs = recorded(program, [*seen, *lost], steps=1)
    first = {key: record.digest for key, record in clean.records.items() if key.step == 0}
    differs = []
    for number in range(1, 1 + 2 * STRIKES):
        found = {key: record.digest for key, record in recording_of(runs, number).records.items()}
        assert found.keys() == first.keys()
        differs.append(found != first)
    assert differs == [True] * STRIKES + [False] * STRIKES

    steps.advance(clean)  # a second step, from what the first one left
    broken = copy.deepcopy(clean)
    key = Key(0, "grad", "norm.weight", 1)
    broken.records[key] = broken.records[key]._replace(digest="0" * 32)
    with pytest.raises(RecordingError, match="other bits than the ranks recorded") as refusal:
        Steps(steps.program, steps.trainers, start, []).advance(broken)
    assert "1 others, such as grad norm.weight on rank 1" in str(refusal.value)
