from __future__ import annotations

import pytest

from bitproof.harness.compare.align import Unpaired, align, name_keys
from bitproof.harness.records import Key, Record

W = Key(0, "grad", "w", 1)
B = Key(0, "grad", "b", 1)
LEFT = Record("0" * 32, "float32", (2,))
RIGHT = Record("1" * 32, "float32", (2,))


def gaps_of(reference, candidate):
    unpaired = Unpaired()
    unpaired.add(align(reference, candidate))
    return unpaired.gaps


def test_records_of_one_key_pair_whatever_their_order():
    alignment = align([(W, LEFT), (B, LEFT)], [(B, RIGHT), (W, RIGHT)])
    assert alignment.pairs == {W: (LEFT, RIGHT), B: (LEFT, RIGHT)}
    assert list(alignment.pairs) == [W, B]
    assert gaps_of([(W, LEFT), (B, LEFT)], [(B, RIGHT), (W, RIGHT)]) == []


@pytest.mark.parametrize("other", [W._replace(step=1), W._replace(rank=0), W._replace(kind="param"), B])
def test_every_part_of_the_key_counts(other):
    alignment = align([(W, LEFT)], [(other, LEFT)])
    assert alignment.pairs == {}
    assert (alignment.missing, alignment.extra) == ((W,), (other,))


def test_a_missing_and_an_extra_record_are_named():
    assert gaps_of([(W, LEFT), (B, LEFT)], [(W, LEFT)]) == ["the candidate lacks 1 record: step 0, rank 1, grad b"]
    assert gaps_of([(W, LEFT)], [(W, LEFT), (B, LEFT)]) == ["the reference lacks 1 record: step 0, rank 1, grad b"]


def test_names_that_only_one_side_has_are_reported_with_how_to_declare_them():
    theirs = [Key(0, "grad", f"model.{name}", 1) for name in "abcdef"]
    candidate = [(key, LEFT) for key in (W, *theirs)]
    gaps = gaps_of([(W, LEFT), (B, LEFT)], candidate)
    assert len(gaps) == 3
    assert gaps[-1] == (
        "only the reference has grad b; only the candidate has grad model.a, model.b, model.c, model.d, model.e, ...; "
        "names are never guessed: if these are the same, say so as `names` of the system, or with --names FILE"
    )
    for other in (B._replace(kind="param"), W._replace(step=1), W._replace(rank=0)):
        assert len(gaps_of([(W, LEFT), (B, LEFT)], [(W, LEFT), (other, LEFT)])) == 2, "no names to pair"


def test_a_key_recorded_twice_is_named_even_when_both_records_agree():
    assert gaps_of([(W, LEFT), (W, LEFT)], [(W, LEFT)]) == [
        "the reference recorded twice 1 record: step 0, rank 1, grad w"
    ]


def test_an_empty_side_is_named_once():
    assert gaps_of([], [(W, LEFT)]) == ["the reference recording is empty"]
    assert gaps_of([], []) == ["the reference recording is empty", "the candidate recording is empty"]


def test_what_several_ranks_lack_is_reported_in_one_sentence_for_all():
    unpaired, other = Unpaired(), (B._replace(rank=0), LEFT)
    unpaired.add(align([(W, LEFT), (B, LEFT)], [(W, LEFT)]))
    unpaired.add(align([other], []))
    assert unpaired.gaps == ["the candidate lacks 2 records: step 0, rank 1, grad b; step 0, rank 0, grad b"]


def test_long_lists_of_keys_are_cut():
    keys = [W._replace(step=step) for step in range(7)]
    assert name_keys(keys).startswith("7 records: step 0, rank 1, grad w; ")
    assert name_keys(keys).endswith("; and 2 more")
