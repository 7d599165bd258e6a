from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.records import BlamedCall, Divergence, TensorDifference, Verification
from bitproof.harness.report import text
from tests.harness.report.results import CLOSENESS


@pytest.mark.parametrize(
    ("bits", "dtype", "value"),
    [
        ("0x3f800001", "float32", "1.00000012"),
        ("0xbf80", "bfloat16", "-1"),
        ("0x3c00", "float16", "1"),
        ("0x3ff0000000000000", "float64", "1"),
        ("0x7fc00000", "float32", "nan"),
        ("0x0000000000000001", "int64", ""),
        ("0x3f80", "float32", ""),
        ("nonsense", "float32", ""),
    ],
)
def test_bits_are_shown_as_numbers_where_the_dtype_has_them(bits, dtype, value):
    assert text.value_of(bits, dtype) == value


def test_ranks_are_reported_as_ranges():
    assert text.rank_ranges([3, 0, 1, 2, 6, 8, 9]) == "0-3, 6, 8-9"
    assert text.rank_ranges([]) == ""


def test_how_much_differs_is_reported_as_far_as_it_is_known():
    found = TensorDifference(elements_differing=2, elements=1000, max_ulp=1)
    assert text.extent(found) == "2 of 1,000 elements differ, by 1 ULP at most"
    assert text.extent(replace(found, max_ulp=None)) == "2 of 1,000 elements differ"
    assert text.extent(replace(found, elements_differing=None)) == text.extent(None) == ""


def test_the_chain_from_the_blamed_call_to_the_tensor_says_what_changed_and_what_is_left_out(localized):
    assert text.chain_rows(localized.first_divergence.call) == [
        ("3", "gate<b>", "layers.1.moe", "backward, chunk 1, micro-batch 2", "", "", ""),
        ("3", "all_reduce", "the step itself", "backward, |", "", "moe.py:70", "4 calls"),
        (
            "0",
            "all_reduce",
            "the step itself",
            "backward",
            "3 of 8 elements differ, by 2 ULPs at most",
            "moe.py:70",
            "",
        ),
    ]


def test_differing_tensors_are_listed_with_their_first_step_and_ranks_up_to_a_limit(localized):
    rows, left_out = text.tensor_rows(localized, 1)
    assert (rows, left_out) == ([("grad", "layers.1.moe.gate|w", "2", "0", "0-7")], 1)


def test_an_expected_difference_is_reported_with_its_bound_and_held_to_it(make_result):
    result = make_result(verdict="DIFFERENT", expected="DIFFERENT")
    assert (text.expectation(result), result.as_expected) == ("DIFFERENT (grad, param), no bound stated", True)
    result.case = replace(result.case, differs_within=0.01)
    assert (text.outcome(result), result.as_expected) == ("DIFFERENT (grad, param) beyond the bound", False)
    result.closeness = CLOSENESS
    assert (text.expectation(result), text.outcome(result)) == (
        "DIFFERENT (grad, param) within 0.01",
        "DIFFERENT (grad, param)",
    )
    assert result.as_expected
    for closeness in (
        replace(CLOSENESS, bound=1000.0),
        replace(CLOSENESS, largest_error=999.0, tensors_beyond=1),
        replace(CLOSENESS, largest_error=None),
    ):
        result.closeness = closeness
        assert not result.as_expected


def test_a_tensor_that_is_another_one_of_the_references_is_reported_with_and_without_a_call_to_blame(localized):
    first = replace(localized.first_divergence, holds="grad b")
    message = "the tensor holds what the reference has as grad b"
    assert text.blame(first) == f"{text.blame(localized.first_divergence)}; {message}"
    assert text.blame(replace(first, call=None)) == message
    assert text.blame(replace(first, call=None, holds=None)) == ""


def test_a_cause_that_no_exchange_verified_is_one_line_with_its_reason() -> None:
    shown = Verification(status="not verified", tensors=4, differing=2, remaining=2, reason="it has no counterpart")
    call = BlamedCall(operator="mm", rank=0, how="gives another output", expected="a", found="b", verification=shown)
    first = Divergence(step=0, kind="grad", name="w", rank=0, call=call)
    assert text.evidence(call) == []
    assert text.blame_label(first) == "best candidate"
    assert text.blame(first).endswith("gives another output; not verified: it has no counterpart")


def test_a_verified_cause_shows_what_was_expected_what_was_found_and_the_evidence() -> None:
    shown = Verification(status="verified", tensors=34_240, differing=2, remaining=0, accounts=2, reverse=True, runs=2)
    call = BlamedCall(operator="mm", rank=0, expected="scale 0.125", found="scale 0.25", verification=shown)
    assert text.evidence(call)[:2] == [("expected", "scale 0.125"), ("found", "scale 0.25")]
    assert text.evidence(call)[2][1].startswith(
        "with the reference's value here, all 34,240 tensors of the step are equal"
    )
    assert text.evidence(replace(call, verification=None)) == []
