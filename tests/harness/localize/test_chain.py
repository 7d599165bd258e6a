"""The chain from the call to blame to the record that is shown, on logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.chain import MAX_LINKS, links_of, way_between
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from tests.harness.localize.test_blame import blamed, call, find_culprit


def operators(reference: list[Call], candidate: list[Call], *differing: str) -> list[str]:
    culprit = blamed(reference, candidate, *differing)
    assert culprit is not None
    return [link.call.operator for link in culprit.chain]


def test_the_chain_goes_from_the_culprit_to_the_record_by_what_each_call_reads() -> None:
    reference = [call("mm x w -> a"), call("neg y -> n"), call("silu a -> b"), call("sum b n -> l")]
    candidate = [call("mm x w -> A"), call("neg y -> n"), call("silu A -> B"), call("sum B n -> L")]
    assert operators(reference, candidate, "L") == ["mm", "silu", "sum"]


def test_a_culprit_that_gives_the_record_itself_is_the_whole_chain() -> None:
    assert operators([call("mm x w -> a")], [call("mm x w -> A")], "A") == ["mm"]


def test_the_chain_ends_where_the_record_s_value_was_first_given_and_not_with_what_only_passes_it_on() -> None:
    reference = [call("mm x w -> a"), call("adamw p a -> q a")]
    assert operators(reference, [call("mm x w -> A"), call("adamw p A -> Q A")], "A") == ["mm"]


def test_a_call_that_is_missing_leads_to_the_record_in_the_reference_s_log() -> None:
    reference = [call("mm x w -> a"), call("tanh a -> b"), call("sum b -> l")]
    candidate = [call("mm x w -> a"), call("sum a -> L")]
    assert operators(reference, candidate, "L") == ["tanh", "sum"]


def test_views_are_left_out_and_counted() -> None:
    view = call("view A -> V")._replace(view=True)
    reference = [call("mm x w -> a"), call("view a -> v")._replace(view=True), call("sum v -> l")]
    culprit = blamed(reference, [call("mm x w -> A"), view, call("sum V -> L")], "L")
    assert culprit is not None
    assert [(link.call.operator, link.left_out) for link in culprit.chain] == [("mm", 0), ("sum", 1)]


def test_the_chain_crosses_to_another_rank_at_a_collective_alone() -> None:
    def logs(a: str, s: str) -> list[list[Call]]:
        first = [call(f"mm x w -> {a}"), call(f"all_reduce {a} -> {s}", collective=True), call("neg s -> q")]
        second = [call("mm y w -> b"), call(f"all_reduce b -> {s}", collective=True)]
        return [first[:2], second]

    culprit = find_culprit(logs("a", "s"), logs("A", "S"), {1: [("s", "S")]})
    assert culprit is not None
    assert [(link.call.operator, link.rank) for link in culprit.chain] == [
        ("mm", 0),
        ("all_reduce", 0),
        ("all_reduce", 1),
    ]


def test_a_long_chain_keeps_its_ends_and_what_changes_module() -> None:
    log = [call(f"op{i} v{i} -> v{i + 1}") for i in range(40)]
    log[20] = log[20]._replace(place=CallSite("layers.7", "forward"))
    links = links_of([(0, i) for i in range(40)], [log], lambda site: (None, site[1]))
    lines = [link.call.operator for link in links]
    assert len(links) == MAX_LINKS and (lines[0], lines[-1]) == ("op0", "op39") and {"op20", "op21"} <= set(lines)
    assert sum(link.left_out for link in links) + MAX_LINKS == 40


def test_what_backward_still_reads_is_of_backward_and_not_of_the_update() -> None:
    update, backward = CallSite(None, "update"), CallSite("layers.0", "backward")
    reference = [call("mm x g -> a", backward), call("mm y g -> b", backward), call("add a b -> s", backward)]
    scaled = [reference[0], call("mul a -> A", update), reference[1], call("add A b -> S", backward)]
    culprit = blamed(reference, scaled, "S")
    assert culprit is not None
    assert (culprit.call.operator, culprit.call.place.direction) == ("mul", "backward")
    assert culprit.chain[0].call.place.direction == "backward"
    late = [*reference, call("mul s -> t", update)]
    culprit = blamed(late, [*reference, call("mul s -> T", update)], "T")
    assert culprit is not None and culprit.call.place.direction == "update"


def test_where_no_path_leads_there_is_no_way() -> None:
    log = [call("mm x w -> a"), call("neg y -> n")]
    assert way_between((0, 0), [(0, 1)], JoinedLogs([log]), lambda _: (), lambda _: True) == []
