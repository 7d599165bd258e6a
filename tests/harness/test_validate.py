"""JSON that is read into dataclasses, and its nearest neighbours, which are refused by the field's path."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from bitproof.builtin_cases import all_cases
from bitproof.harness import validate
from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError, RecordingError, UsageError
from bitproof.harness.validate import GROWING, STRICT, That, Whole, json_schema, parse, read

Count = Annotated[int, That("an integer, zero or more", lambda number: number >= 0, {"minimum": 0})]


@dataclass(frozen=True)
class Pass:
    __pydantic_config__ = STRICT

    name: str
    seconds: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass
class Run:
    __pydantic_config__ = GROWING

    passes: list[Pass]
    nodes: Count = 0
    spot: tuple[Count, str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    case: Annotated[Case, Whole("a case", CaseError)] | None = None


def refusal(**values: Any) -> str:
    with pytest.raises(RecordingError) as caught:
        read(Run, {"passes": []} | values, "run", RecordingError)
    return str(caught.value)


def test_nested_values_come_back_typed_and_unknown_fields_of_a_growing_form_are_passed_over() -> None:
    values = {"passes": [{"name": "chunk", "seconds": 1, "betas": [0, 0.5]}], "nodes": 3, "spot": [1, "w"], "new": 1}
    found = read(Run, values, "run", RecordingError)
    assert found == Run([Pass("chunk", 1.0, (0.0, 0.5))], 3, (1, "w"))


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"nodes": -1}, "run.nodes has the wrong value\n  expected: an integer, zero or more\n  found: -1"),
        ({"nodes": True}, "run.nodes has the wrong type\n  expected: an integer\n  found: True"),
        ({"passes": {}}, "run.passes has the wrong type\n  expected: an array\n  found: {}"),
        ({"passes": [3]}, "run.passes[0] has the wrong type\n  expected: an object\n  found: 3"),
        ({"passes": [{}]}, "run.passes[0].name is missing\n  expected: a value\n  found: nothing"),
        (
            {"passes": [{"name": "a", "second": 1}]},
            "run.passes[0].second is not a field\n  expected: name, seconds, betas\n  found: 1"
            "\n  fix: did you mean seconds?",
        ),
        (
            {"passes": [{"name": "a", "seconds": "1"}]},
            "run.passes[0].seconds has the wrong type\n  expected: a number\n  found: '1'",
        ),
        (
            {"passes": [{"name": "a", "seconds": float("inf")}]},
            "run.passes[0].seconds has the wrong value\n  expected: a finite number\n  found: inf",
        ),
        ({"spot": [True, "w"]}, "run.spot[0] has the wrong type\n  expected: an integer\n  found: True"),
        ({"spot": [1]}, "run.spot[1] is missing\n  expected: a value\n  found: nothing"),
        ({"facts": []}, "run.facts has the wrong type\n  expected: an object\n  found: []"),
        ({"case": 3}, "run.case has the wrong value\n  expected: an object\n  found: 3"),
    ],
)
def test_a_refusal_says_where_what_is_expected_and_what_was_found(values: dict[str, Any], reported: str) -> None:
    assert refusal(**values) == f"RecordingError: {reported}"


def test_what_a_nested_class_raises_is_reported_with_its_place() -> None:
    case = all_cases()[0].to_dict()
    assert read(Run, {"passes": [], "case": case}, "run", RecordingError).case == all_cases()[0]
    lines = refusal(case=case | {"name": "../.."}).splitlines()
    assert lines[0] == "RecordingError: run.case is not a case"
    assert lines[1] == "  found: CaseError: a case name serves as a folder name and in -k expressions"


def test_the_caller_says_which_error_and_what_is_wrong_and_where() -> None:
    with pytest.raises(UsageError) as caught:
        read(Run, {}, "run", UsageError, damaged="is damaged", where="run.json")
    assert str(caught.value) == (
        "UsageError: run.passes is damaged\n  expected: a value\n  found: nothing\n  came from: run.json"
    )


def test_halves_of_surrogate_pairs_survive_as_errors_and_names_of_files_have_them() -> None:
    odd = "a\udc80\ud83d"
    found = read(Run, {"passes": [{"name": odd}], "spot": [0, odd], "facts": {odd: [odd]}}, "run", RecordingError)
    assert found == Run([Pass(odd)], spot=(0, odd), facts={odd: [odd]})
    assert repr(odd) in refusal(passes=[{"name": "a"}], nodes=odd)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is not a number of JSON"),
        ('{"a": -Infinity}', "-Infinity is not a number of JSON"),
        ('{"a": {"b": 1, "b": 1}}', "the field 'b' is there twice"),
        (b"\x80", "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),
    ],
)
def test_what_json_does_not_mean_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_every_case_of_ours_comes_back() -> None:
    for case in all_cases():
        assert read(Case, parse(json.dumps(case.to_dict())), "case", RecordingError) == case


def test_the_schema_says_what_types_and_marks_say() -> None:
    schema = json_schema(Run)
    assert schema["required"] == ["passes"]
    assert schema["properties"]["nodes"] == {"default": 0, "minimum": 0, "title": "Nodes", "type": "integer"}
    assert schema["$defs"]["Pass"]["additionalProperties"] is False
    assert "Case" in schema["$defs"]


def test_reading_stops_at_the_first_wrong_item_of_a_list_however_many_there_are():
    with pytest.raises(CaseError) as raised:
        read(list[tuple[int, ...]], [[1], [2, "x", "y"], *[[] for _ in range(1000)], 0, 0], "numbers", CaseError)
    assert "numbers[1][1] has the wrong value" in str(raised.value)
    assert raised.value.__cause__.error_count() == 1


def test_a_text_of_too_many_fields_is_refused_while_it_is_parsed(monkeypatch):
    monkeypatch.setattr(validate, "MOST_FIELDS", 3)
    assert parse('{"a": {"b": 1}, "c": 2}') == {"a": {"b": 1}, "c": 2}
    with pytest.raises(ValueError, match=r"^more than 3 fields$"):
        parse('[{"a": 1}, {"b": 1, "c": 2}, {"d": 3}]')
