import json
import math
from dataclasses import replace

import pytest

from bitproof.builtin_cases import all_cases
from bitproof.harness.case import Batch, Case, Chunking, Memory, Model, Parallelism, Pipeline, Precision, Schedule
from bitproof.harness.errors import CaseError

BATCH = Chunking(dim="batch", modules="layers.*")


def refusal(call):
    with pytest.raises(CaseError) as caught:
        call()
    return str(caught.value)


def test_a_case_survives_the_trip_through_json():
    case = Case(
        name="some_case",
        family="test",
        chunking=Chunking(dim="seq", modules="layers.*.moe", early_grad_accumulation=True, only=("layers.1.moe",)),
        expected="DIFFERENT",
        differs=("grad", "param"),
        parallelism=Parallelism(world_size=4, ep=4),
        precision=Precision(compute="float32"),
        pipeline=Pipeline(overlap=True, overlap_costs="costs.json", until="chunk"),
    )
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_a_case_from_json_with_a_field_nobody_knows_is_refused():
    values = Case(name="a", family="b", chunking=BATCH).to_dict()
    values["batch"]["sequence"] = 3
    assert refusal(lambda: Case.from_dict(values)) == (
        "CaseError: case.batch.sequence is not a field\n  expected: sequences, seq_len, data\n  found: 3\n"
        "  fix: did you mean sequences?"
    )


def test_a_case_from_json_without_a_required_field_is_refused():
    values = Case(name="a", family="b", chunking=BATCH).to_dict()
    del values["name"]
    assert refusal(lambda: Case.from_dict(values)) == (
        "CaseError: case.name is missing\n  expected: a value\n  found: nothing"
    )


def test_a_whole_number_that_no_float_can_hold_is_refused():
    values = Case(name="a", family="b", chunking=BATCH).to_dict()
    values["optimizer"]["lr"] = 10**400
    assert refusal(lambda: Case.from_dict(values)).startswith("CaseError: case.optimizer.lr has the wrong value\n")


@pytest.mark.parametrize("steps", ["3", 3.0, True, None])
def test_a_case_from_json_with_a_value_of_another_type_is_refused(steps):
    values = Case(name="a", family="b", chunking=BATCH).to_dict() | {"steps": steps}
    assert refusal(lambda: Case.from_dict(values)) == (
        f"CaseError: case.steps has the wrong type\n  expected: an integer\n  found: {steps!r}"
    )


def test_an_even_batch_can_be_chunked_and_an_odd_one_is_refused():
    Case(name="even", family="test", chunking=BATCH, batch=Batch(sequences=6))
    assert refusal(lambda: Case(name="odd", family="test", chunking=BATCH, batch=Batch(sequences=5))) == (
        "CaseError: case odd cannot be split in two along batch\n"
        "  expected: an even batch.sequences\n"
        "  found: batch.sequences=5\n"
        "  fix: choose 6"
    )


def test_an_odd_sequence_is_refused_only_where_it_is_chunked():
    odd = Batch(seq_len=33)
    Case(name="fine", family="test", chunking=BATCH, batch=odd)
    by_sequence = Chunking(dim="seq", modules="layers.*.moe")
    assert "found: batch.seq_len=33" in refusal(
        lambda: Case(name="odd", family="test", chunking=by_sequence, batch=odd)
    )


FOLDED = Model(attention="flex", folded=True)


def folded(dim, sequences, seq_len=32, **changes):
    chunking = Chunking(dim=dim, modules="layers.*.moe")
    batch = Batch(sequences=sequences, seq_len=seq_len)
    return Case(name="folded", family="test", model=FOLDED, chunking=chunking, batch=batch, **changes)


def test_folded_tokens_are_in_one_dim_which_both_chunkings_cut():
    whole = replace(folded("batch", 4), model=Model())
    assert (whole.input_shape, whole.chunk_dim) == ((4, 32), 0)
    assert replace(whole, chunking=Chunking(dim="seq", modules="layers.*.moe")).chunk_dim == 1
    for dim in ("batch", "seq"):
        assert (folded(dim, 4).input_shape, folded(dim, 4).chunk_dim) == ((128,), 0)


def test_a_micro_batch_has_its_part_of_the_folded_tokens_and_its_parts_are_chunks():
    in_two = Schedule(micro_batches=2)
    assert folded("batch", 4, schedule=in_two).input_shape == (64,)
    assert "batch.sequences a multiple of 4" in refusal(lambda: folded("batch", 6, schedule=in_two))


def test_folded_tokens_are_cut_between_sequences_and_inside_one_only_along_seq():
    folded("batch", 4)
    assert refusal(lambda: folded("batch", 3)) == (
        "CaseError: case folded cannot be split in two between its sequences\n"
        "  expected: an even batch.sequences, so that chunk 1 begins with a sequence of 32 tokens\n"
        "  found: batch.sequences=3: chunk 1 would begin inside a sequence, and inside a document\n"
        "  fix: choose 4, or dim='seq' for modules that treat each token alone"
    )
    folded("seq", 3)


def test_an_even_number_of_folded_tokens_can_be_chunked_and_an_odd_one_is_refused():
    folded("seq", 4, seq_len=33)
    assert refusal(lambda: folded("seq", 3, seq_len=33)) == (
        "CaseError: case folded cannot be split in two along its tokens\n"
        "  expected: an even number of tokens\n"
        "  found: 99: batch.sequences=3, batch.seq_len=33\n"
        "  fix: choose an even number of sequences, or of tokens in a sequence"
    )
    assert "expected: an even number of tokens in a micro-batch\n  found: 33: " in refusal(
        lambda: folded("seq", 4, seq_len=33, schedule=Schedule(micro_batches=4))
    )


def test_a_folded_model_needs_a_mask_of_documents():
    assert refusal(lambda: Model(folded=True)) == (
        "CaseError: a folded model has the tokens of all sequences in a single dim, and only a mask keeps them apart\n"
        "  expected: model.attention='flex' with model.folded=True\n"
        "  found: model.attention='sdpa'"
    )


def test_folded_tokens_may_be_on_tensor_ranks_but_not_divided_along_a_sequence():
    folded("batch", 4, parallelism=Parallelism(tp=2))
    assert refusal(lambda: folded("batch", 4, parallelism=Parallelism(tp=2, sequence=True))) == (
        "CaseError: case folded divides a sequence dim over ranks that its folded model does not have\n"
        "  expected: model.folded=False with parallelism.sequence=True\n"
        "  found: model.folded=True\n"
        "  fix: leave one of them out"
    )


def in_pieces(pieces, **changes):
    batch = Batch(sequences=4, seq_len=6)
    return Case(name="a", family="t", chunking=BATCH, batch=batch, model=Model(loss_pieces=pieces), **changes)


def test_a_loss_is_taken_in_equal_pieces_and_pieces_that_do_not_divide_the_tokens_are_refused():
    in_pieces(8)
    assert refusal(lambda: in_pieces(16)) == (
        "CaseError: case a cannot take its loss in pieces of equal size\n"
        "  expected: a multiple of model.loss_pieces=16 as the number of tokens\n"
        "  found: 24 tokens\n"
        "  fix: choose a number of pieces that divides them"
    )


def test_pieces_are_of_the_tokens_of_a_micro_batch():
    in_pieces(12, schedule=Schedule(micro_batches=2))
    assert "number of tokens in a micro-batch\n  found: 12 tokens" in refusal(
        lambda: in_pieces(24, schedule=Schedule(micro_batches=2))
    )


def test_a_loss_in_pieces_is_refused_in_the_stages_of_a_pipeline():
    staged = {"schedule": Schedule(micro_batches=2), "parallelism": Parallelism(pp=2)}
    in_pieces(1, **staged)
    assert "found: model.loss_pieces" in refusal(lambda: in_pieces(4, **staged))


@pytest.mark.parametrize("pieces", [0, -1, 4097, 2.0, True])
def test_a_number_of_pieces_out_of_range_is_refused(pieces):
    Model(loss_pieces=4096)
    assert "CaseError: model.loss_pieces is out of range" in refusal(lambda: Model(loss_pieces=pieces))


@pytest.mark.parametrize("save", [("mm",), ("mm/2", "attention", "all_to_all_single"), ()])
@pytest.mark.parametrize("policy", ["selective", "offload"])
def test_operators_to_save_are_listed_for_a_policy_that_chooses_by_operator(policy, save):
    assert Memory(policy=policy, save=save).save == save


@pytest.mark.parametrize("policy", ["none", "full"])
def test_operators_are_not_listed_for_another_policy(policy):
    assert refusal(lambda: Memory(policy=policy, save=("mm",))) == (
        "CaseError: operators are listed for a memory policy that does not choose by operators\n"
        "  expected: policy='selective' or policy='offload' with save=(...), or save=None\n"
        f"  found: policy='{policy}', save=('mm',)"
    )


@pytest.mark.parametrize(
    "entry", ["aten.mm", "mm/0", "mm/", "mm/02", "mm/10000", "mm/2/3", "/2", "", "mm ", "2mm", "\u00b5mm"]
)
def test_an_entry_that_is_no_operators_name_is_refused(entry):
    assert refusal(lambda: Memory(policy="selective", save=("mm", entry))) == (
        "CaseError: memory.save lists operators by their names, without namespace and overload\n"
        "  expected: mm, mm/2 for every second call, attention, ...\n"
        f"  found: {entry!r}"
    )


def test_an_operator_is_listed_once():
    assert refusal(lambda: Memory(policy="selective", save=("mm/2", "attention", "mm"))) == (
        "CaseError: memory.save lists an operator twice\n  expected: each operator once\n  found: mm/2, mm"
    )


@pytest.mark.parametrize("name", ["prefetch", "defer"])
def test_a_depth_of_copies_is_for_activations_in_host_memory(name):
    Memory(policy="offload", **{name: 0})
    Memory(policy="full", **{name: 1})
    assert refusal(lambda: Memory(policy="full", **{name: 2})) == (
        f"CaseError: memory.{name} is for activations in host memory\n"
        "  expected: policy='offload', or the default of 1\n"
        f"  found: policy='full', {name}=2"
    )


def test_a_case_that_expects_a_difference_must_say_which():
    Case(name="a", family="t", chunking=BATCH, expected="DIFFERENT", differs=("grad",))
    assert "must list the kinds that differ" in refusal(
        lambda: Case(name="a", family="t", chunking=BATCH, expected="DIFFERENT")
    )
    assert "must list the kinds that differ" in refusal(
        lambda: Case(name="a", family="t", chunking=BATCH, differs=("grad",))
    )
    assert "lists unknown kinds" in refusal(
        lambda: Case(name="a", family="t", chunking=BATCH, expected="DIFFERENT", differs=("gradient",))
    )


@pytest.mark.parametrize("bound", [0.01, 1.0, 1e30])
def test_a_case_that_expects_close_states_a_bound(bound):
    Case(name="a", family="t", chunking=BATCH, expected="CLOSE", close_within=bound)


@pytest.mark.parametrize("expected, bound", [("CLOSE", None), ("CLOSE", 0.0), ("CLOSE", -1.0), ("EQUAL", 0.01)])
def test_a_bound_that_is_missing_or_says_nothing_or_belongs_to_another_verdict_is_refused(expected, bound):
    assert refusal(lambda: Case(name="a", family="t", chunking=BATCH, expected=expected, close_within=bound)) == (
        "CaseError: case a must state how close is close exactly when it expects CLOSE\n"
        "  expected: expected='CLOSE' with a finite close_within > 0, or another verdict with close_within=None\n"
        f"  found: expected={expected!r}, close_within={bound!r}"
    )


@pytest.mark.parametrize("bound", [float("inf"), float("nan")])
def test_a_bound_that_is_no_number_is_refused(bound):
    assert "must state how close is close" in refusal(
        lambda: Case(name="a", family="t", chunking=BATCH, expected="CLOSE", close_within=bound)
    )


def test_a_chunked_reference_needs_to_know_how_to_chunk():
    Case(name="a", family="t", reference="eager")
    assert refusal(lambda: Case(name="a", family="t")) == (
        "CaseError: case a runs eager_chunked but does not say how to chunk\n"
        "  expected: chunking=Chunking(dim=..., modules=...)\n"
        "  found: chunking=None"
    )


@pytest.mark.parametrize("name", ["", "Upper", "with space", "../escape", "9lives", "a-b", "a" * 101])
def test_a_name_that_is_no_safe_folder_name_is_refused(name):
    assert "a case name serves as a folder name" in refusal(lambda: Case(name=name, family="t", chunking=BATCH))


@pytest.mark.parametrize("modules", ["", "layers..moe", "layers.*.", "layers.[0-9]", "layers. *"])
def test_a_pattern_that_is_no_dotted_name_is_refused(modules):
    assert "a chunking pattern is a dotted module name" in refusal(lambda: Chunking(dim="batch", modules=modules))


@pytest.mark.parametrize(
    "module, root",
    [
        ("layers.3", "layers.3"),
        ("layers.3.moe.router", "layers.3"),
        ("layers", None),
        ("", None),
        ("norm", None),
        ("blocks.3", None),
    ],
)
def test_a_star_stands_for_one_component(module, root):
    assert BATCH.root_of(module) == root


def test_experts_must_divide_the_ranks():
    assert Parallelism(world_size=8, ep=4).expert_fsdp == 2
    assert "ep=3" in refusal(lambda: Parallelism(world_size=8, ep=3))


def test_tensor_parallelism_goes_with_a_step_in_chunks_and_with_one_that_is_whole():
    split = Parallelism(ep=1, tp=2)
    Case(name="a", family="b", reference="eager", parallelism=split)
    Case(name="a", family="b", chunking=BATCH, parallelism=split)
    Case(name="a", family="b", candidate="eager", chunking=BATCH, parallelism=split)


def test_tensor_parallelism_must_divide_the_ranks():
    assert Parallelism(ep=1, tp=4).data_ranks == 2
    for tp in (3, 5):
        assert refusal(lambda tp=tp: Parallelism(ep=1, tp=tp)) == (
            "CaseError: tensor parallelism must divide the world size\n"
            "  expected: world_size a multiple of tp\n"
            f"  found: world_size=8, tp={tp}"
        )


def test_experts_may_be_spread_over_the_ranks_of_several_tensor_groups():
    both = Parallelism(world_size=8, tp=2, ep=4)
    assert (both.data_ranks, both.expert_fsdp) == (4, 2)
    assert "ep=3" in refusal(lambda: Parallelism(tp=2, ep=3))


def test_only_the_named_modules_are_roots_of_a_chunking_that_names_some():
    chunking = Chunking(dim="batch", modules="layers.*.moe", only=("layers.1.moe",))
    assert chunking.root_of("layers.1.moe.router") == "layers.1.moe"
    assert chunking.root_of("layers.2.moe.router") is None


def test_a_module_that_the_pattern_does_not_match_cannot_be_chunked():
    assert refusal(lambda: Chunking(dim="batch", modules="layers.*", only=("layers.0", "layers.0.moe", "norm"))) == (
        "CaseError: only modules that the chunking pattern matches can be chunked\n"
        "  expected: names that layers.* matches\n"
        "  found: layers.0.moe, norm"
    )


def test_a_case_that_expects_a_difference_may_say_how_far():
    facts = {"name": "a", "family": "b", "reference": "eager", "differs_within": 0.02}
    case = Case(**facts, expected="DIFFERENT", differs=("grad",))
    assert (case.bound, Case.from_dict(case.to_dict())) == (0.02, case)
    assert refusal(lambda: Case(**facts)) == (
        "CaseError: case a may state how far its systems differ only when it expects DIFFERENT\n"
        "  expected: expected='DIFFERENT' with a finite differs_within > 0, or differs_within=None\n"
        "  found: expected='EQUAL', differs_within=0.02"
    )
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(CaseError):
            Case(**facts | {"differs_within": bound}, expected="DIFFERENT", differs=("grad",))


def test_every_case_of_ours_that_expects_a_difference_says_how_far():
    expected = [case for case in all_cases() if case.expected == "DIFFERENT"]
    assert len(expected) == 3 and all(case.differs_within for case in expected)
