"""All calls of both systems held against each other, on archives written by hand."""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Pipeline
from bitproof.harness.compare.verdict import Judgement
from bitproof.harness.errors import RankError
from bitproof.harness.localize.every_call import EveryCall, describe_uncompared, why_not
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.replay import StepTrace, archive_of, write_archive
from bitproof.harness.records import Key, Record, Verdict
from tests.harness.localize.test_unmatched_calls import STEP, call

CASE = replace(CASES["moe_seq"], steps=2, parallelism=replace(CASES["moe_seq"].parallelism, world_size=2, ep=1))
LOSSES = {(step, rank): Key(step, "loss", "loss", rank) for step in range(2) for rank in range(2)}
EQUAL = Judgement(
    verdict=Verdict.EQUAL,
    compared={"loss": 4},
    mismatched={"loss": 0},
    differing_kinds=(),
    first_divergence=None,
    control={},
    error=None,
)


def record(digest: str = "d") -> Record:
    return Record(digest, "float32", ())


class ByRank:
    """A recording that can be read rank by rank alone."""

    def records_of(self, rank: int) -> dict[Key, Record]:
        return {key: record() for key in LOSSES.values() if key.rank == rank}


def judged(tmp_path, candidate, again=None, *, digest="d", case=CASE, reference=None):
    """What becomes of an EQUAL whose candidate makes these calls, by step and rank; `again` when it runs once more."""

    def run_replay(role, number, folder, replay):
        known = reference or dict.fromkeys(LOSSES, STEP)
        calls = known if role == "reference" else candidate if number == 1 else again or candidate
        for rank in range(2):
            remains = StepTrace(records={LOSSES[step, rank]: record(digest) for step in range(2)})
            for step in range(2):
                remains.add_calls(step, calls[step, rank])
            write_archive(archive_of(folder, rank), remains)

    every_call = EveryCall(case, dict.fromkeys(("reference", "candidate"), ByRank()), tmp_path, run_replay)
    return every_call.judge(EQUAL), every_call.found


def test_an_equal_whose_calls_agree_stays_and_says_how_many_were_compared(tmp_path):
    found, _ = judged(tmp_path, dict.fromkeys(LOSSES, STEP))
    assert (found.verdict, found.compared, found.mismatched) == (
        Verdict.EQUAL,
        {"loss": 4, "activation": 12},
        {"loss": 0, "activation": 0},
    )
    assert found.remarks == ("--every-call: each of 12 calls of 2 steps returned values that the reference had too",)


def test_a_value_that_rounding_swallows_makes_it_different_and_the_first_call_is_to_blame(tmp_path):
    wrong = [STEP[0], call("silu a -> B"), call("sum B -> l")]
    found, _ = judged(tmp_path, dict.fromkeys(LOSSES, STEP) | {(1, 1): wrong})
    assert (found.verdict, found.differing_kinds, found.mismatched["activation"]) == (
        Verdict.DIFFERENT,
        ("activation",),
        1,
    )
    first = found.first_divergence
    assert (first.step, first.rank, first.name) == (1, 1, "silu of layers.0 (forward), call 1")
    assert (first.call.operator, first.call.how) == ("silu", "has the same inputs and a different output")
    assert found.differing == {"activation": {"silu of layers.0 (forward), call 1": {"1": [1]}}}


def test_of_two_ranks_the_call_is_to_blame_that_the_other_one_follows_from_whatever_their_indices(tmp_path):
    """Rank 1 computes a wrong summand late in its log; rank 0 has the wrong sum early in its own."""

    def summed(summand: str, total: str) -> dict[tuple[int, int], list[Call]]:
        reduced = call(f"all_reduce b -> {total}")._replace(collective=True, peers=(0, 1))
        last = reduced._replace(inputs=(summand,), producers=(2,))
        return {0: [reduced], 1: [*STEP[:2], call(f"neg b -> {summand}"), last]}

    right, wrong = summed("n", "s"), summed("N", "S")
    logs = {(step, rank): (right, wrong)[step][rank] for step, rank in LOSSES}
    found, _ = judged(tmp_path, logs, reference={(step, rank): right[rank] for step, rank in LOSSES})
    first = found.first_divergence
    assert (first.step, first.rank, first.call.operator) == (1, 1, "neg")


def test_a_call_of_another_kind_is_one_that_the_reference_does_not_make(tmp_path):
    fused = [STEP[0], call("fused a -> B"), call("sum B -> l")]
    found, _ = judged(tmp_path, dict.fromkeys(LOSSES, fused))
    assert found.first_divergence.call.how == "is an extra call that the reference does not have"
    assert found.first_divergence.call.ranks == "0, 1"


def test_what_only_packs_is_left_aside_and_named(tmp_path):
    packs = Call(CallSite("layers.0", "forward"), "cat", ("a", "b"), ("P",), node="cat_7")
    found, looked = judged(tmp_path, {key: [*STEP, packs] for key in LOSSES})
    assert found.verdict == Verdict.EQUAL and looked.packing == {"cat_7"}
    assert "16 calls of 2 steps, except 4 that only pack right values, returned" in found.remarks[0]


def test_what_varies_from_run_to_run_shows_nothing(tmp_path):
    def step(value):
        return {key: [*STEP, call(f"rand a -> {value}")] for key in LOSSES}

    found, _ = judged(tmp_path, step("X"), step("Y"))
    assert found.verdict == Verdict.UNVERIFIED
    assert found.error == "--every-call: two replays of the candidate differ in rand of layers.0 (forward), on rank 0"
    more, _ = judged(tmp_path, step("X"), dict.fromkeys(LOSSES, STEP))
    assert more.error == "--every-call: two replays of the candidate make 8 and 6 calls on rank 0"


def test_replays_that_do_not_repeat_the_recording_or_fail_show_nothing(tmp_path):
    found, _ = judged(tmp_path, dict.fromkeys(LOSSES, STEP), digest="e")
    assert (found.verdict, found.error) == (
        Verdict.UNVERIFIED,
        "--every-call: a replay of the reference did not reproduce its recording, at step 0, rank 0, loss loss",
    )

    def fails(*_):
        raise RankError("rank 1 of graph hung")

    failed = EveryCall(CASE, {}, tmp_path, fails).judge(EQUAL)
    assert failed.verdict == Verdict.UNVERIFIED
    assert failed.error == "--every-call: a replay failed:\nRankError: rank 1 of graph hung"


def test_an_equal_with_a_users_pass_says_how_many_calls_were_not_compared():
    text = "--extra-pass: no comparison covers the values of 1,230 of the 1,254 calls in the candidate's graph, "
    text += "and a wrong one may be rounded away before a record; "
    assert describe_uncompared(CASE, 1230, 1254) == text + "--every-call compares them"
    compiled = replace(CASE, pipeline=Pipeline(backend="inductor"))
    assert describe_uncompared(compiled, 1230, 1254).startswith(
        text + "they cannot be: backend inductor compiles calls"
    )


def test_compiled_calls_have_no_partners(tmp_path):
    compiled = replace(CASE, pipeline=Pipeline(backend="inductor"), expected="CLOSE", close_within=1e-3)
    reason = "backend inductor compiles calls together, so they have no partners in the reference"
    assert why_not(CASE) is None and why_not(compiled) == reason
    found, _ = judged(tmp_path, {}, case=compiled)
    assert (found.verdict, found.error) == (Verdict.UNVERIFIED, f"--every-call: {reason}")
