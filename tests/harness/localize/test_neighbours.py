"""The calls around a blamed one, on logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.neighbours import modules_of, neighbours_of
from bitproof.harness.records import ModuleCalls, Neighbour
from tests.harness.localize.test_blame import blamed, call


def marks(reference: list[Call], candidate: list[Call], *differing: str) -> list[tuple[str, bool, bool]]:
    """The operators around the culprit on the single rank, whether they agree, and which is to blame."""
    culprit = blamed(reference, candidate, *differing)
    assert culprit is not None
    found = neighbours_of(culprit, [reference], [candidate])
    return [(call.operator, call.agrees, call.is_culprit) for call in found]


def test_the_neighbours_of_a_call_are_three_before_and_three_after_it_with_a_mark_each() -> None:
    operators = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    reference = [call(f"{name} {i} -> {i + 1}") for i, name in enumerate(operators)]
    wrong = ["", "", "", "", "x5", "x6", "x7", "x8", "x9"]
    candidate = [call(f"{name} {wrong[i - 1] or i} -> {wrong[i] or i + 1}") for i, name in enumerate(operators)]
    culprit = find_culprit([reference], [candidate], {0: [("9", "x9")]})
    assert culprit is not None and culprit.candidate == 4
    found = neighbours_of(culprit, [reference], [candidate])
    assert [call.operator for call in found] == ["b", "c", "d", "e", "f", "g", "h"]
    assert [call.agrees for call in found] == [True, True, True, False, False, False, False]
    assert [call.is_culprit for call in found] == [False, False, False, True, False, False, False]


def test_the_first_call_of_a_log_has_neighbours_on_one_side_and_says_where_each_call_belongs() -> None:
    place = Place("layers.1", "forward", 1)
    reference = [Call(place, "mm", ("x",), ("a",), source="model.py:7"), call("sum a -> l")]
    candidate = [Call(place, "mm", ("x",), ("A",), source="model.py:7"), call("sum A -> L")]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None
    assert neighbours_of(culprit, [reference], [candidate])[0] == Neighbour(
        operator="mm",
        module="layers.1",
        direction="forward",
        chunk=1,
        source="model.py:7",
        agrees=False,
        is_culprit=True,
    )


def test_the_neighbours_of_a_call_that_the_candidate_lacks_are_the_references() -> None:
    reference = [call("mm x w -> a"), call("neg a -> b"), call("sum b -> l")]
    candidate = [call("mm x w -> a"), call("sum a -> L")]
    assert marks(reference, candidate, "L") == [("mm", True, False), ("neg", False, True), ("sum", False, False)]


def test_calls_are_counted_by_module_and_direction_and_what_differs_first_has_the_first_turn() -> None:
    near = Place("layers.0.mlp", "forward")
    reference = [call("mm x w -> a"), call("silu a -> b", near), call("sum b -> l"), call("neg w -> v")]
    candidate = [reference[0], call("silu a -> B", near), call("sum B -> L"), reference[3]]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None
    assert modules_of(culprit, [reference], [candidate]) == [
        ModuleCalls(module="layers.0", direction="forward", calls=3, differing=1, turn=2),
        ModuleCalls(module="layers.0.mlp", direction="forward", calls=1, differing=1, turn=1),
    ]
