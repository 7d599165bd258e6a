from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bitproof.harness.compare import evidence
from bitproof.harness.compare.verdict import RACES, compare
from bitproof.harness.records import Closeness, Key, Manifest, Record, Recording, Verdict, zero_counts
from tests.harness.judged import judge

WHOLE = {"loss": 4, "grad": 8, "param": 4, "buffer": 8, "optimizer": 4}


def test_equal_needs_every_record_and_counts_them(case, record):
    comparison = compare(record(), record(), case)
    assert comparison.verdict == Verdict.EQUAL
    assert comparison.compared == WHOLE
    assert comparison.mismatched == zero_counts()
    assert (comparison.first_divergence, comparison.differing_kinds, comparison.reason) == (None, (), None)


def test_one_flipped_bit_is_blamed_on_its_step_rank_kind_and_name(case, record, flip):
    for key in record().records:
        candidate = record()
        flip(candidate, *key)
        comparison = compare(record(), candidate, case)
        first = comparison.first_divergence
        assert comparison.verdict == Verdict.DIFFERENT
        assert Key(first.step, first.kind, first.name, first.rank) == key
        assert comparison.mismatched == zero_counts() | {key.kind: 1}
        assert comparison.differing_kinds == (key.kind,)


def test_the_first_divergence_follows_the_order_of_a_step(case, record, flip):
    """Every prefix of the order differs, last first, and the newest is blamed each time."""
    order = [
        (0, "loss", "loss", 0),
        (0, "loss", "loss", 1),
        (0, "grad", "layers.0.w", 0),
        (0, "grad", "layers.0.w", 1),
        (0, "grad", "layers.0.b", 0),
        (0, "buffer", "layers.0.moe.tokens_per_expert@before_optimizer", 1),
        (0, "param", "layers.0.w", 0),
        (0, "optimizer", "layers.0.w.exp_avg", 0),
        (0, "buffer", "layers.0.moe.expert_bias@after_optimizer", 0),
        (1, "loss", "loss", 0),
    ]
    candidate = record()
    for place in reversed(order):
        key = flip(candidate, *place)
        first = compare(record(), candidate, case).first_divergence
        assert Key(first.step, first.kind, first.name, first.rank) == key


def test_activations_are_required_where_the_case_observes_them_and_come_as_a_step_computes_them(case, record):
    asking = replace(case, observe=("layers.*",))
    names = ["layers.0@forward", "layers.1@forward.chunk0", "layers.1@backward", "layers.0@backward"]

    def recorded():
        side = record()
        side.manifest.case["observe"] = ["layers.*"]
        for step, rank, name in itertools.product((0, 1), (0, 1), names):
            side.records[Key(step, "activation", name, rank)] = Record(f"{step}{rank}" * 16, "float32", ())
        return side

    bare = [record(), record()]
    for side in bare:
        side.manifest.case["observe"] = ["layers.*"]
    assert "no activation was compared at step 0, rank 0" in compare(*bare, asking).reason
    found = compare(recorded(), recorded(), asking)
    assert (found.verdict, found.compared["activation"]) == (Verdict.EQUAL, 16)
    loss, grad = Key(0, "loss", "loss", 0), Key(0, "grad", "layers.0.w", 0)
    candidate = recorded()
    order = [Key(0, "activation", name, 0) for name in names]
    for key in reversed([*order[:2], loss, *order[2:], grad]):
        candidate.records[key] = candidate.records[key]._replace(digest="ab" * 16)
        first = compare(recorded(), candidate, asking).first_divergence
        assert Key(first.step, first.kind, first.name, first.rank) == key


def test_differing_kinds_are_those_of_the_first_differing_step_on_any_rank(case, record, flip):
    candidate = record()
    flip(candidate, 0, "optimizer", "layers.0.w.exp_avg", 1)
    flip(candidate, 0, "grad", "layers.0.b", 0)
    flip(candidate, 1, "loss", "loss", 0)
    comparison = compare(record(), candidate, case)
    assert comparison.differing_kinds == ("grad", "optimizer")
    assert comparison.mismatched == zero_counts() | {"loss": 1, "grad": 1, "optimizer": 1}


def test_a_missing_record_is_never_equal(case, record):
    for key in record().records:
        candidate = record()
        del candidate.records[key]
        comparison = compare(record(), candidate, case)
        assert comparison.verdict == Verdict.UNVERIFIED
        place = f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"
        assert f"the candidate lacks 1 record: {place}" in comparison.reason


def test_the_reason_for_a_missing_record_is_whole(case, record):
    candidate = record()
    del candidate.records[Key(1, "grad", "layers.0.b", 0)]
    assert compare(record(), candidate, case).reason == (
        "the evidence is incomplete\n  the candidate lacks 1 record: step 1, rank 0, grad layers.0.b"
    )


def test_an_extra_record_is_never_equal(case, record):
    candidate = record()
    candidate.records[Key(0, "grad", "ghost", 0)] = candidate.records[Key(0, "grad", "layers.0.w", 0)]
    comparison = compare(record(), candidate, case)
    assert comparison.verdict == Verdict.UNVERIFIED
    assert comparison.reason == (
        "the evidence is incomplete\n  the reference lacks 1 record: step 0, rank 0, grad ghost"
    )


def test_an_empty_recording_is_never_equal(case, record):
    manifest = record().manifest
    assert compare(Recording(manifest), record(), case).reason == (
        "the evidence is incomplete\n  the reference recording is empty"
    )
    both = compare(Recording(manifest), Recording(manifest), case)
    assert (both.verdict, both.compared) == (Verdict.UNVERIFIED, zero_counts())


@pytest.mark.parametrize("kind", ["loss", "grad", "param", "optimizer"])
def test_a_kind_that_both_sides_lack_is_never_equal(case, record, kind):
    def without(recording):
        recording.records = {key: value for key, value in recording.records.items() if key.kind != kind}
        return recording

    comparison = compare(without(record()), without(record()), case)
    assert comparison.verdict == Verdict.UNVERIFIED
    assert comparison.reason == (
        f"the evidence is incomplete\n  no {kind} was compared at step 0, rank 0; step 0, rank 1; "
        "step 1, rank 0; step 1, rank 1"
    )


def test_the_norm_of_gradients_is_required_and_counted_where_the_case_asks_for_it_and_stands_nowhere_else(case, record):
    assert "grad_norm" not in compare(record(), record(), case).compared
    asking = replace(case, grad_norm=True)
    sides = [record(), record()]
    for side in sides:
        side.manifest.case["grad_norm"] = True
    lacking = compare(*sides, asking)
    assert lacking.verdict == Verdict.UNVERIFIED and "no grad_norm was compared at step 0, rank 0" in lacking.reason
    for side in sides:
        for step, rank in itertools.product((0, 1), (0, 1)):
            side.records[Key(step, "grad_norm", "grad_norm", rank)] = Record(f"{step}{rank}" * 16, "float32", ())
    found = compare(*sides, asking)
    assert (found.verdict, found.compared["grad_norm"], found.mismatched["grad_norm"]) == (Verdict.EQUAL, 4, 0)
    key = Key(1, "grad_norm", "grad_norm", 0)
    sides[1].records[key] = sides[1].records[key]._replace(digest="ab" * 16)
    found = compare(*sides, asking)
    assert (found.verdict, found.differing_kinds) == (Verdict.DIFFERENT, ("grad_norm",))


def test_a_rank_or_a_step_that_both_sides_lack_is_never_equal(case, record):
    for part in ("rank", "step"):
        left, right = record(), record()
        for recording in (left, right):
            recording.records = {key: value for key, value in recording.records.items() if getattr(key, part) == 0}
        comparison = compare(left, right, case)
        assert comparison.verdict == Verdict.UNVERIFIED
        assert "no loss was compared at " in comparison.reason


def test_of_two_trainers_of_a_user_one_rank_has_a_loss_at_each_step_and_every_rank_all_else(case, record):
    foreign = replace(case, reference="mine.py:a", candidate="mine.py:b")
    for steps, kind, reason in (
        ((0, 1), "loss", None),
        (
            (0,),
            "loss",
            "no loss was compared at step 1, rank 0; step 1, rank 1: return the loss from step, on one rank at least",
        ),
        ((0, 1), "grad", "no grad was compared at step 0, rank 0; step 1, rank 0"),
    ):
        sides = [record(), record()]
        for side in sides:
            side.manifest.case.update(reference="mine.py:a", candidate="mine.py:b")
            kept = {(kind, step, 1) for step in steps}
            side.records = {k: v for k, v in side.records.items() if k.kind != kind or (kind, k.step, k.rank) in kept}
        found = compare(*sides, foreign)
        assert found.verdict == (Verdict.UNVERIFIED if reason else Verdict.EQUAL)
        assert reason is None or reason in found.reason


def test_a_name_that_both_sides_drop_after_the_first_step_is_never_equal(case, record):
    left, right = record(), record()
    for recording in (left, right):
        del recording.records[Key(1, "buffer", "layers.0.moe.expert_bias@after_optimizer", 1)]
    assert compare(left, right, case).reason == (
        "the evidence is incomplete\n  neither side recorded buffer layers.0.moe.expert_bias@after_optimizer "
        "on rank 1 at step 1, though both did at others"
    )


def test_blank_digests_agree_about_nothing(case, record):
    left, right = record(), record()
    key = Key(0, "grad", "layers.0.w", 1)
    for recording in (left, right):
        recording.records[key] = recording.records[key]._replace(digest="")
    assert compare(left, right, case).reason == (
        "the evidence is incomplete\n  step 0, rank 1, grad layers.0.w has no digest of 32 hexadecimal digits"
    )


def test_records_outside_the_case_are_no_evidence(case, record):
    left, right = record(), record()
    for recording in (left, right):
        for key in [key for key in recording.records if key.step == 1]:
            recording.records[key._replace(step=2)] = recording.records[key]
    comparison = compare(left, right, case)
    assert comparison.verdict == Verdict.UNVERIFIED
    assert "step 2, rank 0, grad layers.0.w is outside the case (2 steps, 2 ranks)" in comparison.reason


def test_every_key_that_differs_is_listed_in_the_order_of_computation(case, record, flip):
    candidate = record()
    for step, kind, name, rank in [
        (1, "param", "layers.0.w", 0),
        (1, "grad", "layers.0.b", 1),
        (0, "grad", "layers.0.w", 1),
        (1, "grad", "layers.0.w", 1),
        (1, "grad", "layers.0.w", 0),
    ]:
        flip(candidate, step, kind, name, rank)
    comparison = compare(record(), candidate, case)
    assert comparison.differing == {
        "grad": {"layers.0.w": {"0": [1], "1": [0, 1]}, "layers.0.b": {"1": [1]}},
        "param": {"layers.0.w": {"1": [0]}},
    }
    assert list(comparison.differing["grad"]) == ["layers.0.w", "layers.0.b"], "the first to differ comes first"
    assert comparison.differing_left_out == 0
    judgement = judge(case, comparison)
    assert (judgement.differing, judgement.differing_left_out) == (comparison.differing, 0)
    assert compare(record(), record(), case).differing == {}


def test_of_very_many_keys_that_differ_the_first_are_listed_and_the_others_counted(case, record, flip, monkeypatch):
    monkeypatch.setattr(evidence, "MAX_DIFFERING", 3)
    candidate = record()
    for key in candidate.records:
        flip(candidate, *key)
    comparison = compare(record(), candidate, case)
    assert comparison.differing == {"loss": {"loss": {"0": [0, 1]}}, "grad": {"layers.0.w": {"0": [0]}}}
    assert comparison.differing_left_out == sum(comparison.mismatched.values()) - 3
    assert judge(case, comparison).differing_left_out == comparison.differing_left_out


def test_a_difference_outside_the_case_is_counted_and_not_listed(case, record):
    left, right = record(), record()
    inside, outside = Key(0, "loss", "loss", 0), Key(0, "loss", "loss", 7)
    left.records[outside] = left.records[inside]
    right.records[outside] = right.records[inside]._replace(digest="0" * 32)
    comparison = compare(left, right, case)
    assert (comparison.verdict, comparison.differing, comparison.differing_left_out) == (Verdict.UNVERIFIED, {}, 1)


def test_missing_evidence_outweighs_a_difference_that_is_still_named(case, record, flip):
    candidate = record()
    flip(candidate, 0, "loss", "loss", 1)
    del candidate.records[Key(1, "grad", "layers.0.b", 0)]
    comparison = compare(record(), candidate, case)
    assert comparison.verdict == Verdict.UNVERIFIED
    assert comparison.first_divergence.rank == 1


def test_dtype_and_shape_mismatches_are_reported_before_values(case, record, flip):
    candidate = record()
    flip(candidate, 0, "loss", "loss", 0)
    key = flip(candidate, 1, "param", "layers.0.w", 1)
    candidate.records[key] = candidate.records[key]._replace(dtype="bfloat16", shape=(8, 4))
    comparison = compare(record(), candidate, case)
    sentence = "step 1, rank 1, param layers.0.w: float32[4, 8] in the reference, bfloat16[8, 4] in the candidate"
    assert comparison.layout_mismatches == (sentence,)
    assert judge(case, comparison).error == f"dtypes or shapes differ\n  {sentence}"
    assert comparison.first_divergence.kind == "loss"


def test_a_dtype_that_differs_under_one_digest_is_a_difference(case, record):
    candidate = record()
    key = Key(0, "grad", "layers.0.w", 0)
    candidate.records[key] = candidate.records[key]._replace(dtype="bfloat16")
    comparison = compare(record(), candidate, case)
    assert comparison.verdict == Verdict.DIFFERENT
    first = comparison.first_divergence
    assert (first.tensor.reference_type, first.tensor.candidate_type) == ("float32[4, 8]", "bfloat16[4, 8]")


def test_recordings_of_another_case_are_not_comparable(case, record):
    other = replace(case, seed=1, batch=replace(case.batch, seq_len=64))
    candidate = record()
    candidate.manifest = replace(candidate.manifest, case=other.to_dict())
    comparison = compare(record(), candidate, case)
    assert (comparison.verdict, comparison.compared) == (Verdict.UNVERIFIED, zero_counts())
    assert comparison.reason == (
        "the recordings are not comparable\n"
        "  the candidate was recorded with case.seed=1, the case says 0\n"
        "  the candidate was recorded with case.batch.seq_len=64, the case says 32"
    )


@pytest.mark.parametrize("kind", ["md5", None], ids=["another kind", "recorded before kinds had names"])
def test_digests_of_two_kinds_are_not_comparable_and_not_different(case, record, flip, kind):
    reference, candidate = record(), record()
    reference.manifest = replace(reference.manifest, digest="xxh3-128-tree-16KiB")
    candidate.manifest = replace(candidate.manifest, digest=kind)
    flip(candidate, 0, "loss", "loss", 0)
    comparison = compare(reference, candidate, case)
    assert (comparison.verdict, comparison.compared) == (Verdict.UNVERIFIED, zero_counts())
    assert comparison.reason == (
        "the recordings are not comparable\n"
        "  the reference has digests of kind xxh3-128-tree-16KiB, "
        f"the candidate of kind {kind or 'unnamed'}: record both again"
    )
    candidate.manifest = replace(candidate.manifest, digest="xxh3-128-tree-16KiB")
    assert compare(reference, candidate, case).verdict == Verdict.DIFFERENT


def test_a_case_of_another_name_or_expectation_is_comparable(case, record):
    candidate = record()
    renamed = replace(case, name="other", family="x", candidate="mine", expected="DIFFERENT", differs=("grad",))
    candidate.manifest = replace(candidate.manifest, case=renamed.to_dict())
    assert compare(record(), candidate, case).verdict == Verdict.EQUAL


@pytest.mark.parametrize(("field", "value"), [("steps", 3), ("world_size", 16)])
def test_another_number_of_steps_or_ranks_is_not_comparable(case, record, field, value):
    reference = record()
    reference.manifest = replace(reference.manifest, **{field: value})
    assert compare(reference, record(), case).reason == (
        f"the recordings are not comparable\n  the reference was recorded with {field}={value}, the case says 2"
    )


def test_a_manifest_without_a_case_is_not_comparable(case, record):
    reference = Recording(replace(record().manifest, case={}), record().records)
    assert compare(reference, record(), case).reason == (
        "the recordings are not comparable\n  the reference manifest does not say which case it recorded"
    )


def test_the_case_survives_json_in_a_manifest(case, record):
    import json

    candidate = record()
    candidate.manifest = Manifest.of(json.loads(json.dumps(candidate.manifest.to_dict())))
    assert compare(record(), candidate, case).verdict == Verdict.EQUAL


def test_without_controls_the_comparison_is_the_judgement(case, record):
    judgement = judge(case, compare(record(), record(), case))
    assert judgement.verdict == Verdict.EQUAL
    assert judgement.control == {"reference": None, "candidate": None}
    assert judgement.error is None


def test_agreement_of_a_graph_that_races_with_its_collectives_is_withdrawn_and_a_difference_stands(case, record, flip):
    race = "`neg` reads what `all_gather` brings, before anything waits for it"
    candidate = record()
    found = judge(case, compare(record(), candidate, case), races=[race])
    assert found.verdict == Verdict.UNVERIFIED
    assert found.error == f"{RACES}\n  {race}"
    flip(candidate, 0, "grad", "layers.0.b", 1)
    found = judge(case, compare(record(), candidate, case), races=[race])
    assert (found.verdict, found.error) == (Verdict.DIFFERENT, None)


def test_equal_controls_leave_the_verdict_alone(case, record, flip):
    candidate = record()
    flip(candidate, 0, "grad", "layers.0.b", 1)
    same = compare(record(), record(), case)
    judgement = judge(case, compare(record(), candidate, case), reference_control=same, candidate_control=same)
    assert judgement.verdict == Verdict.DIFFERENT
    assert judgement.control == {"reference": "EQUAL", "candidate": "EQUAL"}


@pytest.mark.parametrize("main_differs", [False, True])
def test_a_system_that_differs_from_itself_is_neither_equal_nor_different(case, record, flip, main_differs):
    noisy = record()
    flip(noisy, 1, "grad", "layers.0.b", 1)
    control = compare(record(), noisy, case)
    main = control if main_differs else compare(record(), record(), case)
    judgement = judge(case, main, reference_control=compare(record(), record(), case), candidate_control=control)
    assert judgement.verdict == Verdict.NONDETERMINISTIC
    assert judgement.control == {"reference": "EQUAL", "candidate": "DIFFERENT"}
    assert judgement.error == (
        "control of candidate graph: two runs of one system differ, first at step 1, rank 1, grad layers.0.b"
    )
    first = judgement.first_divergence
    assert (first.between, first.step, first.rank, first.name) == ("candidate against itself", 1, 1, "layers.0.b")


def test_of_two_systems_that_differ_from_themselves_the_reference_is_reported_first_and_plain_runs_before_stressed_ones(
    case, record, flip
):
    first, second, same = record(), record(), compare(record(), record(), case)
    flip(first, 1, "grad", "layers.0.b", 1)
    flip(second, 0, "grad", "layers.0.b", 1)
    differs, earlier = compare(record(), first, case), compare(record(), second, case)
    both = judge(case, same, reference_control=differs, candidate_control=earlier)
    assert (both.first_divergence.between, both.first_divergence.step) == ("reference against itself", 1)
    assert both.stress is None
    mixed = judge(case, same, reference_control=same, candidate_control=differs, reference_stress=earlier)
    assert (mixed.first_divergence.between, mixed.first_divergence.step) == ("candidate against itself", 1)
    assert mixed.stress == {"reference": "DIFFERENT", "candidate": "EQUAL"}
    assert mixed.error == (
        "control of candidate graph: two runs of one system differ, first at step 1, rank 1, grad layers.0.b\n"
        "control of reference eager_chunked under stress: a plain and a stressed run of one system differ, "
        "first at step 0, rank 1, grad layers.0.b"
    )


def test_a_system_that_differs_from_itself_under_stress_alone_is_nondeterministic(case, record, flip):
    stressed = record()
    flip(stressed, 1, "grad", "layers.0.b", 1)
    same = compare(record(), record(), case)
    judgement = judge(
        case,
        same,
        reference_control=same,
        candidate_control=same,
        reference_stress=same,
        candidate_stress=compare(record(), stressed, case),
    )
    assert judgement.verdict == Verdict.NONDETERMINISTIC
    assert judgement.control == {"reference": "EQUAL", "candidate": "EQUAL"}
    assert judgement.stress == {"reference": "EQUAL", "candidate": "DIFFERENT"}
    assert judgement.first_divergence.between == "candidate against itself under stress"


def test_a_stressed_run_without_evidence_makes_the_case_unverified(case, record):
    same = compare(record(), record(), case)
    empty = compare(record(), Recording(record().manifest), case)
    judgement = judge(case, same, reference_control=same, candidate_control=same, reference_stress=empty)
    assert (judgement.verdict, judgement.first_divergence) == (Verdict.UNVERIFIED, None)
    assert judgement.error == (
        "control of reference eager_chunked under stress: the evidence is incomplete\n"
        "  the candidate recording is empty"
    )


def test_a_control_without_evidence_makes_the_case_unverified(case, record, flip):
    noisy = record()
    flip(noisy, 1, "grad", "layers.0.b", 1)
    judgement = judge(
        case,
        compare(record(), record(), case),
        reference_control=compare(record(), noisy, case),
        candidate_control=compare(record(), Recording(record().manifest), case),
    )
    assert judgement.verdict == Verdict.UNVERIFIED
    assert judgement.control == {"reference": "DIFFERENT", "candidate": "UNVERIFIED"}
    assert judgement.error == (
        "control of candidate graph: the evidence is incomplete\n  the candidate recording is empty\n"
        "control of reference eager_chunked: two runs of one system differ, first at step 1, rank 1, grad layers.0.b"
    )


def test_an_unverified_comparison_stays_so_whatever_the_controls_say(case, record, flip):
    noisy = record()
    flip(noisy, 0, "loss", "loss", 0)
    main = compare(record(), Recording(record().manifest), case)
    judgement = judge(case, main, reference_control=compare(record(), noisy, case))
    assert judgement.verdict == Verdict.UNVERIFIED


NEAR = Closeness(
    bound=0.01, largest_error=0.002, largest=Key(0, "grad", "w", 0), tensors_beyond=0, histogram={"grad": {"1": 4}}
)
FAR = replace(
    NEAR, largest_error=0.5, tensors_beyond=3, first_beyond=Key(0, "param", "w", 1), first_beyond_error=0.0123456
)


@pytest.fixture
def bounded(case):
    return replace(case, expected="CLOSE", close_within=0.01)


@pytest.fixture
def differing(bounded, record, flip):
    """A comparison of two whole recordings, one gradient apart."""
    candidate = record()
    flip(candidate, 0, "grad", "layers.0.w", 0)
    return compare(record(), candidate, bounded)


def test_bits_that_differ_within_the_bound_are_close(bounded, differing):
    judgement = judge(bounded, differing, closeness=NEAR)
    assert (judgement.verdict, judgement.error, judgement.closeness) == (Verdict.CLOSE, None, NEAR)
    assert judgement.differing_kinds == ("grad",)


def test_bits_that_differ_beyond_the_bound_are_different_and_the_text_says_how_far(bounded, differing):
    judgement = judge(bounded, differing, closeness=FAR)
    assert judgement.verdict == Verdict.DIFFERENT
    assert judgement.error == (
        "the relative error of step 0, rank 1, param w is 0.0123, beyond the case's bound of 0.01; "
        "3 tensors are beyond it, and this is the first"
    )


def test_equal_bits_are_equal_even_where_the_case_states_a_bound(bounded, record):
    assert judge(bounded, compare(record(), record(), bounded)).verdict == Verdict.EQUAL


def test_without_a_bound_nothing_is_close(case, record, flip):
    candidate = record()
    flip(candidate, 0, "grad", "layers.0.w", 0)
    assert judge(case, compare(record(), candidate, case), closeness=NEAR).verdict == Verdict.DIFFERENT


@pytest.mark.parametrize("closeness", [None, replace(NEAR, bound=0.02)])
def test_without_values_measured_against_this_bound_the_case_is_unverified(bounded, differing, closeness):
    judgement = judge(bounded, differing, closeness=closeness)
    assert judgement.verdict == Verdict.UNVERIFIED
    assert judgement.error == "bits differ, and no values were measured against the case's bound of 0.01"


def test_an_error_without_a_finite_size_is_never_within(bounded, differing):
    endless = replace(FAR, largest_error=None, first_beyond_error=None)
    judgement = judge(bounded, differing, closeness=endless)
    assert judgement.verdict == Verdict.DIFFERENT
    assert "is infinite, beyond the case's bound" in judgement.error
    assert not replace(NEAR, largest_error=None).is_within


def test_a_control_that_differs_or_lacks_evidence_leaves_nothing_close(bounded, differing, record):
    unstable = judge(bounded, differing, candidate_control=differing, closeness=NEAR)
    assert unstable.verdict == Verdict.NONDETERMINISTIC
    partial = record()
    partial.records.popitem()
    lacking = compare(record(), partial, bounded)
    assert judge(bounded, differing, reference_control=lacking, closeness=NEAR).verdict == Verdict.UNVERIFIED


def test_incomplete_evidence_is_unverified_whatever_the_values(bounded, record, flip):
    candidate = record()
    flip(candidate, 0, "grad", "layers.0.w", 0)
    candidate.records.popitem()
    assert judge(bounded, compare(record(), candidate, bounded), closeness=NEAR).verdict == Verdict.UNVERIFIED


def test_the_bound_is_a_label_that_moves_no_bit(case, bounded, record):
    assert compare(record(), record(), bounded).verdict == Verdict.EQUAL  # recorded without one
