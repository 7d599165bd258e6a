"""The refusals themselves are in `test_verdict.py`; here is how two trees of values are told apart."""

from __future__ import annotations

from bitproof.harness.case import Case
from bitproof.harness.compare.same_case import LABELS, in_current_form, leaf_differences


def test_differences_are_named_by_their_paths() -> None:
    values = {"case": ({"batch": {"seq_len": 8, "rows": 1}}, {"batch": {"seq_len": 16, "rows": 1}})}
    assert list(leaf_differences(values)) == [("case.batch.seq_len", (8, 16))]


def test_what_one_side_lacks_differs() -> None:
    values = {"machine": ({"torch": "2.13.0"}, {"cuda": "13.0"})}
    assert list(leaf_differences(values)) == [
        ("machine.torch", ("2.13.0", None)),
        ("machine.cuda", (None, "13.0")),
    ]


def test_labels_move_no_bit_and_values_of_other_types_are_other_values() -> None:
    labels = {"case": (dict.fromkeys(LABELS, 1), dict.fromkeys(LABELS, 2))}
    assert list(leaf_differences(labels)) == []
    assert list(leaf_differences({"a": (1, True), "b": (1.0, 1.0), "c": ([1], {"0": 1})})) == [
        ("a", (1, True)),
        ("c", ([1], {"0": 1})),
    ]


def test_a_setting_that_a_recorded_case_lacks_has_its_default() -> None:
    case = Case(name="a", family="b", reference="eager").to_dict()
    older = case | {"pipeline": {name: x for name, x in case["pipeline"].items() if name != "isolate_gathers"}}
    assert list(leaf_differences({"case": (in_current_form(older), case)})) == []
    other = case | {"pipeline": case["pipeline"] | {"isolate_gathers": True}}
    [(path, _)] = leaf_differences({"case": (in_current_form(other), case)})
    assert path == "case.pipeline.isolate_gathers"


def test_what_is_no_case_today_stays_as_it_is() -> None:
    strange = {"name": "a", "no_such_field": 1}
    assert in_current_form(strange) is strange
