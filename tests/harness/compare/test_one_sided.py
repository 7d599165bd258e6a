"""Buffers that one side alone registers: a remark, a reason to say nothing, or a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.verdict import compare, demand_substance
from bitproof.harness.records import Key, Manifest, Record, Recording, Verdict
from tests.harness.judged import judge

RANKS, STEPS = 2, 2
CASE = Case(
    name="mine",
    family="mine",
    reference="a:b",
    candidate="a:c",
    steps=STEPS,
    parallelism=Parallelism(world_size=RANKS, ep=1),
)
MOMENTS = ("before_optimizer", "after_optimizer")


def digest_of(value: object) -> str:
    return f"{abs(hash(str(value))) % 16**12:032x}"


def recorded(system: str = "a:b", *, shows: bool | None = True, loss: object = 1, **buffers) -> Recording:
    """Each buffer is a function of rank, step and moment, whose value it has; None stands for no record."""
    rows = {}
    for rank in range(RANKS):
        for step in range(STEPS):
            for kind in ("loss", "grad", "param", "optimizer"):
                value = loss if kind == "loss" else (kind, step)
                shape, number = ((), (1.0).hex()) if kind == "loss" else ((3,), None)
                rows[Key(step, kind, kind, rank)] = Record(digest_of(value), "float32", shape, number)
            for name, value_of in buffers.items():
                for moment in MOMENTS:
                    if (value := value_of(rank, step, moment)) is not None:
                        rows[Key(step, "buffer", f"{name}@{moment}", rank)] = Record(digest_of(value), "int64", (4,))
    manifest = {"case": CASE.to_dict(), "system": system, "world_size": RANKS, "steps": STEPS}
    return Recording(Manifest.of(manifest | {"shows_every_buffer": shows}), rows)


def constant(rank: int, step: int, moment: str) -> object:
    return "always"


def counted(rank: int, step: int, moment: str) -> object:
    return step, moment == "after_optimizer"


def found(reference: Recording, candidate: Recording):
    return demand_substance(compare(reference, candidate, CASE))


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_constant_that_one_side_registers_is_a_remark_and_all_else_decides(side):
    for loss, verdict in ((1, Verdict.EQUAL), (2, Verdict.DIFFERENT)):
        sides = {"reference": recorded(), "candidate": recorded("a:c", loss=loss)}
        sides[side] = recorded(sides[side].manifest.system, loss=1 if side == "reference" else loss, p=constant)
        comparison = found(sides["reference"], sides["candidate"])
        assert (comparison.verdict, comparison.reason) == (verdict, None)
        text = f"only the {side} has buffer `p`; it stays the same in all steps, and what it changes is compared"
        assert text in comparison.remarks
        assert comparison.compared["buffer"] == 0


def test_a_constant_may_be_another_one_on_each_rank():
    comparison = found(recorded(), recorded("a:c", p=lambda rank, step, moment: rank))
    assert comparison.verdict == Verdict.EQUAL


@pytest.mark.parametrize(
    "value",
    [
        counted,
        lambda rank, step, moment: (step, moment) == (1, "after_optimizer"),
        lambda rank, step, moment: rank == 1 and step,
        lambda rank, step, moment: "always" if step else None,
        lambda rank, step, moment: "always" if moment == "after_optimizer" or step else None,
    ],
    ids=["counted", "changed at the end", "changed on one rank", "registered later", "registered in the first step"],
)
def test_state_that_one_side_keeps_leaves_equal_and_close_unverified_and_different_as_it_is(value):
    comparison = compare(recorded(), recorded("a:c", p=value), CASE)
    judged = judge(CASE, comparison)
    assert judged.verdict == Verdict.UNVERIFIED
    expected = (
        "state of one system has nothing to be compared with\n  only the candidate has buffer `p`, and steps change it"
    )
    assert judged.error == expected
    assert found(recorded(), recorded("a:c", p=value)).verdict == Verdict.UNVERIFIED
    different = judge(CASE, compare(recorded(), recorded("a:c", p=value, loss=2), CASE))
    assert (different.verdict, different.error) == (Verdict.DIFFERENT, None)
    assert any("only the candidate has buffer `p`" in remark for remark in different.remarks)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (recorded(shows=None), recorded("a:c", p=constant)),
        (recorded(q=constant), recorded("a:c", p=constant)),
        (recorded(p=lambda rank, step, moment: 1 if rank else None), recorded("a:c", p=constant)),
        (recorded(p=lambda rank, step, moment: 1 if step else None), recorded("a:c", p=constant)),
        (recorded(p=lambda rank, step, moment: 1 if moment == MOMENTS[0] else None), recorded("a:c", p=constant)),
        (recorded(), recorded(p=constant)),
    ],
    ids=["does not show all", "two names", "on one rank", "at one step", "at one moment", "one system twice"],
)
def test_what_may_be_an_observation_that_was_skipped_is_a_gap(reference, candidate):
    comparison = compare(reference, candidate, CASE)
    assert comparison.verdict == Verdict.UNVERIFIED and "the evidence is incomplete" in comparison.reason


@pytest.mark.parametrize("kind", ["param", "grad", "optimizer", "activation"])
def test_only_buffers_may_be_of_one_side_alone(kind):
    candidate = recorded("a:c")
    for rank in range(RANKS):
        for step in range(STEPS):
            candidate.records[Key(step, kind, "p", rank)] = Record(digest_of("always"), "float32", (4,))
    assert compare(recorded(), candidate, CASE).verdict == Verdict.UNVERIFIED


def test_it_is_the_same_of_recordings_that_are_read_rank_by_rank(tmp_path):
    for value in (constant, counted):
        sides = recorded(q=constant), recorded("a:c", q=constant, p=value, loss=1)
        stored = []
        for number, side in enumerate(sides):
            parts = [tmp_path / f"{value.__name__}.{number}.{rank}" for rank in range(RANKS)]
            for rank, part in enumerate(parts):
                write_part(part, side.records_of(rank).items())
            join_parts(tmp_path / f"{value.__name__}.{number}", side.manifest, parts)
            stored.append(read_recording(tmp_path / f"{value.__name__}.{number}"))
        assert compare(*stored, CASE) == compare(*sides, CASE)
        assert compare(*stored, CASE).remarks


def test_a_manifest_without_the_field_counts_as_one_that_does_not_show_all():
    older = replace(recorded().manifest, shows_every_buffer=None)
    assert compare(recorded().with_manifest(older), recorded("a:c", p=constant), CASE).verdict == Verdict.UNVERIFIED


def with_setting(recording: Recording, steps: tuple[int, ...]) -> Recording:
    """The recording, with a learning rate that these steps change."""
    more = {
        Key(step, "optimizer", "weight.lr@changed", rank): Record(digest_of(step), "float64", ())
        for step in steps
        for rank in range(RANKS)
    }
    return Recording(recording.manifest, recording.records | more)


def test_a_setting_that_steps_of_one_side_alone_change_withholds_equal_and_leaves_different():
    changed = with_setting(recorded("a:c"), (1,))
    assert found(recorded(), changed).verdict == Verdict.UNVERIFIED
    assert "only the candidate's steps change `weight.lr`" in str(found(recorded(), changed).reason)
    assert found(recorded(loss=2), changed).verdict == Verdict.DIFFERENT


def test_a_setting_that_both_change_may_come_and_go_between_steps():
    assert found(with_setting(recorded(), (1,)), with_setting(recorded("a:c"), (1,))).verdict == Verdict.EQUAL
