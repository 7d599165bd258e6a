"""Which values a plan exchanges, and at which calls."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.exchange_plan import plan_of
from bitproof.harness.localize.exchange.reader_exchanges import MessageReceives, ReaderExchanges, Swap
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.logs.replay import ValueSite

PLACE = CallSite("", "forward")


def call(operator: str, given: str, made: str, *producers: int | None, node: str | None = None) -> Call:
    return Call(PLACE, operator, tuple(given), tuple(made), producers=producers, node=node)


def sites(swaps: Sequence[Swap]) -> list[tuple[int, int, int, bool, str, str]]:
    return [(*swap.site, swap.found, swap.wanted) for swap in swaps]


def test_a_recomputed_value_is_exchanged_in_the_reference_at_its_own_readers() -> None:
    reference = [call("mm", "xw", "a", None, None), call("silu", "a", "b", 0), call("mul", "bg", "c", 1, None)]
    again = [call("mm", "xW", "A", None, None, node="mm_recomputed"), call("silu", "A", "B", 2, node="silu_recomputed")]
    candidate = [reference[0]._replace(node="mm"), reference[1]._replace(node="silu"), *again]
    candidate += [call("mul", "Bg", "C", 3, None)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="computes", call=candidate[2], ranks=(0,), candidate=2, reference=0)
    [group] = plan_of(blamed, [log], {0: [("c", "C")]}).groups
    assert sites(group.candidate) == [(0, 2, 0, False, "A", "a")]
    assert sites(group.reference) == [(0, 2, 0, True, "b", "B")], "the forward reads the right value on"


def test_an_extra_call_that_only_a_send_reads_is_exchanged_at_the_receiving_rank() -> None:
    def send(given: str, producer: int, direction: str) -> Call:
        place = CallSite("", direction)
        return call("send", given, "", producer)._replace(place=place, collective=True, peers=(0, 1))

    def receive(made: str) -> Call:
        return call("recv_", "e", made, None)._replace(collective=True, peers=(0, 1))

    start = call("mm", "xw", "a", None, None)
    candidate, reference = [start, call("div", "a", "A", 0), send("A", 1, "backward")], [start, send("a", 0, "forward")]
    logs = [
        CandidateLog(candidate, ReferenceLog(reference)),
        CandidateLog([receive("A")], ReferenceLog([receive("a")])),
    ]
    blamed = Culprit(how="adds", call=logs[0].log[1], ranks=(0,), candidate=1, reference=None)
    plan = plan_of(blamed, logs, {1: [("a", "A")]})
    assert not plan.problems
    [group] = plan.groups
    assert sites(group.candidate) == [(1, 0, 0, False, "A", "a")]
    assert sites(group.reference) == [(1, 0, 0, False, "a", "A")]


def test_missing_copies_are_one_cause_though_another_call_reads_what_one_of_them_would_give() -> None:
    """A target network is not updated; the values that it should have are those of the online network."""
    copies = [call("copy_", f"{old}{new}", new, None, None) for old, new in ("sv", "tw")]
    online = call("neg", "w", "n", None)
    reference = [*copies, call("mm", "xv", "a", None, 0), call("mm", "yw", "b", None, 1), online]
    candidate = [call("mm", "xs", "A", None, None), call("mm", "yt", "B", None, None), online]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[0], ranks=(0,), candidate=None, reference=0)
    groups = plan_of(blamed, [log], {0: [("a", "A"), ("b", "B")]}).groups
    assert [site for group in groups for site in sites(group.candidate)] == [
        (0, 0, 1, True, "s", "v"),
        (0, 1, 1, True, "", "w"),
    ]


def test_a_product_row_by_row_is_exchanged_where_the_rows_are_joined_though_one_row_matches_the_product() -> None:
    reference = [call("mm", "xw", "p", None, None), call("silu", "p", "s", 0)]
    rows = [call("select", "x", row, None)._replace(view=True) for row in "rq"]
    candidate = [*rows, call("mm", "rw", "A", 0, None), call("mm", "qw", "B", 1, None)]
    candidate += [call("cat", "AB", "P", 2, 3), call("silu", "P", "S", 4)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    assert log.matching_call(2) == 0 and log.matching_call(3) is None, "the first row matches the whole product"
    blamed = Culprit(how="adds", call=candidate[3], ranks=(0,), candidate=3, reference=None)
    plan = plan_of(blamed, [log], {0: [("s", "S")]})
    assert not plan.problems and [site for group in plan.groups for site in sites(group.candidate)] == [
        (0, 4, 0, False, "P", "p")
    ]


def test_a_row_that_another_kernel_computes_wrongly_is_not_hidden_by_the_join() -> None:
    """The second product reads what its match reads, so it is a defect of its own."""
    reference = [call("mm", "xw", "p", None, None), call("exp", "xv", "e", None, None), call("silu", "p", "s", 0)]
    candidate = [call("mul", "xw", "A", None, None), call("exp", "xv", "E", None, None)]
    candidate += [call("cat", "AE", "P", 0, 1), call("silu", "P", "S", 2)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="adds", call=candidate[0], ranks=(0,), candidate=0, reference=None)
    assert plan_of(blamed, [log], {0: [("s", "S")]}).problems


def test_a_record_s_memory_that_another_call_rightly_reads_is_not_written() -> None:
    """A bias is not added to scores, from which weights are taken as well; a record shows the biased scores."""
    scores = call("sigmoid", "x", "s", None)
    reference = [scores, call("add", "sb", "t", 0, None), call("topk", "t", "k", 1), call("mul", "sg", "m", 0, None)]
    candidate = [scores, call("topk", "s", "K", 0), call("mul", "sg", "m", 0, None)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[1], ranks=(0,), candidate=None, reference=1)
    [group] = plan_of(blamed, [log], {0: [("t", "s"), ("k", "K")]}).groups
    assert [(swap.site.call, swap.wanted, swap.in_place) for swap in group.candidate] == [(1, "t", False)]


def test_a_record_of_zeros_is_not_exchanged_for_another_value_that_is_zero() -> None:
    """Two gradients stand in each other's places; one is zeros, and so is an optimizer's average of it."""
    start = [call("mm", "xw", "g", None, None), call("mm", "yw", "z", None, None)]
    reference, candidate = [*start, call("adamw", "gz", "mz", 0, 1)], [*start, call("adamw", "zg", "zm", 1, 0)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="misplaces", call=candidate[1], ranks=(0,), candidate=1, reference=1)
    groups = plan_of(blamed, [log], {0: [("g", "z"), ("z", "g"), ("m", "z"), ("z", "m")]}).groups
    assert {swap.site.call for group in groups for swap in group.candidate if not swap.site.is_input} == {0, 1}


def test_the_wrong_summand_is_exchanged_though_the_systems_add_in_another_order() -> None:
    start = [call("mm", "xw", "a", None, None), call("mm", "yw", "b", None, None)]
    reference = [*start, call("add", "ba", "c", 1, 0)]
    candidate = [*start, call("zeros_like", "b", "Z", 1), call("add", "aZ", "C", 0, 2)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="adds", call=candidate[2], ranks=(0,), candidate=2, reference=None)
    [group] = plan_of(blamed, [log], {0: [("c", "C")]}).groups
    assert sites(group.candidate) == [(0, 2, 0, False, "Z", "b")]
    assert sites(group.reference) == [(0, 2, 0, True, "b", "Z")]


def test_the_reverse_exchange_is_at_both_calls_for_which_the_candidate_s_single_call_stands() -> None:
    place = [CallSite("", "forward", chunk) for chunk in (0, 1)]
    reference = [call("t", "w", "v", None)._replace(place=place[0]), call("mm", "xv", "a", None, 0)]
    reference += [call("t", "w", "v", None)._replace(place=place[1]), call("mm", "yv", "b", None, 2)]
    candidate = [call("roll", "w", "W", None), call("t", "W", "V", 0), call("mm", "xV", "A", None, 1)]
    candidate += [call("mm", "yV", "B", None, 1)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="adds", call=candidate[0], ranks=(0,), candidate=0, reference=None)
    [group] = plan_of(blamed, [log], {0: [("a", "A"), ("b", "B")]}).groups
    assert sites(group.candidate) == [(0, 0, 0, False, "W", "w")]
    assert sites(group.reference) == [(0, 0, 0, True, "w", "W"), (0, 2, 0, True, "w", "W")]


def test_a_value_that_a_record_shows_is_exchanged_itself_though_two_calls_stand_for_one() -> None:
    """The candidate counts again for backward, and what it counts is recorded."""
    reference = [call("add_", "nk", "a", None, None), call("stack", "a", "s", 0)]
    candidate = [reference[0]._replace(node="add"), call("add_", "ak", "B", 0, None, node="add_recomputed")]
    candidate += [call("stack", "B", "S", 1)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="reads", call=candidate[1], ranks=(0,), candidate=1, reference=0)
    [group] = plan_of(blamed, [log], {0: [("a", "B")]}).groups
    assert sites(group.reference) == [(0, 0, 0, False, "a", "B")]


def test_an_extra_call_read_by_a_recomputed_call_and_by_a_send_is_exchanged_in_reverse_on_both_ranks() -> None:
    message = {"collective": True, "peers": (0, 1)}
    reference = [call("mm", "xw", "a", None, None), call("silu", "a", "b", 0), call("mul", "bg", "c", 1, None)]
    sent = call("send", "A", "", 3)._replace(place=CallSite("", "backward"), **message)
    candidate = [reference[0], reference[1]._replace(node="silu"), call("exp", "a", "z", 0), call("neg", "a", "A", 0)]
    candidate += [call("silu", "A", "B", 3, node="silu_recomputed"), sent, call("mul", "Bg", "C", 4, None)]
    received = [[call("recv_", "e", made, None)._replace(**message)] for made in ("A", "a")]
    logs = [
        CandidateLog(candidate, ReferenceLog(reference)),
        CandidateLog(received[0], ReferenceLog(received[1])),
    ]
    readers = ReaderExchanges(logs[0], 0, [("c", "C")], (), MessageReceives(logs))
    draft = readers.of_new(3)
    draft.add(readers.of_new(5))
    assert sites(readers.of_this_repeat(draft).reference) == [(0, 2, 0, True, "b", "B"), (1, 0, 0, False, "a", "A")]


def test_an_extra_call_is_exchanged_behind_the_bucket_of_which_it_writes_a_part() -> None:
    """Gradients are averaged over ranks in a bucket one micro-batch too early."""
    start = [call("mm", "xw", "g", None, None), call("mm", "yw", "k", None, None)]
    reference = [*start, call("add_", "gh", "s", 0, None), call("add_", "ki", "t", 1, None)]
    parts = [call("mul.out", "g", "A", 0), call("mul.out", "k", "B", 1)]
    bucket = call("all_reduce", "P", "Q", 3, 2, 3)._replace(collective=True)
    taken = [call("as_strided", "Q", part, 4)._replace(view=True) for part in "GK"]
    candidate = [*start, *parts, bucket, *taken, call("add_", "Gh", "S", 5, None), call("add_", "Ki", "T", 6, None)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="adds", call=candidate[2], ranks=(0,), candidate=2, reference=None)
    group, *_ = plan_of(blamed, [log], {0: [("s", "S"), ("t", "T")]}).groups
    assert group.is_lead
    assert [site[:-2] for site in sites(group.candidate)] == [(0, 5, 0, False), (0, 6, 0, False)]
    assert [site[:-2] for site in sites(group.reference)] == [(0, 2, 0, True), (0, 3, 0, True)]


def test_two_calls_in_the_other_order_are_exchanged_one_after_the_other() -> None:
    """A bias is added before the sum over ranks. Once `sum` has the right input, the bias is still to be added."""
    reference = [call("sum", "x", "a", None), call("add", "ab", "c", 0, None), call("exp", "c", "e", 1)]
    wrong = [call("add", "xb", "A", None, None), call("sum", "A", "C", 0), call("exp", "C", "E", 1)]
    after = [call("add", "xb", "x", None, None), call("sum", "x", "a", 0), call("exp", "a", "F", 1)]
    found = list[list[tuple[int, int, int, bool, str, str]]]()
    for candidate in (wrong, after):
        log = CandidateLog(candidate, ReferenceLog(reference))
        blamed = Culprit(how="reads", call=candidate[0], ranks=(0,), candidate=0, reference=1)
        [group] = plan_of(blamed, [log], {0: [("e", candidate[2].outputs[0])]}).groups
        found.append(sites(group.candidate))
    assert found == [[(0, 0, 0, False, "A", "x")], [(0, 2, 0, True, "a", "c")]]


def test_a_missing_cast_is_exchanged_where_the_values_behind_it_have_the_right_dtype_again() -> None:
    casts = [call("_to_copy", given, made, None) for given, made in ("ab", "wv")]
    reference = [*casts, call("mm", "bv", "m", 0, 1), call("relu", "m", "r", 2)]
    reference += [call("add", "rf", "s", 3, None), call("_to_copy", "r", "n", 3), call("sub", "nf", "t", 5, None)]
    candidate = [call("mm", "aw", "M", None, None), call("relu", "M", "R", 0)]
    candidate += [call("add", "Rf", "S", 1, None), call("sub", "Rf", "T", 1, None)]
    types = dict.fromkeys("awMRsStTnf", "float32[2]") | dict.fromkeys("bvmr", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[0], ranks=(0,), candidate=None, reference=0)
    blocked = [ValueSite(0, 0, 0, True), ValueSite(0, 0, 0), ValueSite(0, 1, 0)]
    group, *_ = plan_of(blamed, [log], {0: [("s", "S"), ("t", "T")]}, blocked, types=types).groups
    assert sites(group.candidate) == [(0, 2, 0, False, "S", "s"), (0, 3, 0, True, "", "n")]
    assert sites(group.reference) == [(0, 4, 0, False, "s", "S"), (0, 6, 0, True, "", "R")]


def test_a_record_behind_a_missing_cast_is_exchanged_itself() -> None:
    reference = [call("_to_copy", "a", "b", None), call("mm", "bb", "m", 0, 0), call("_to_copy", "m", "n", 1)]
    candidate = [call("mm", "aa", "M", None, None)]
    types = dict.fromkeys("aMn", "float32[2]") | dict.fromkeys("bm", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[0], ranks=(0,), candidate=None, reference=0)
    blocked = [ValueSite(0, 0, position, True) for position in (0, 1)] + [ValueSite(0, 0, 0)]
    group, *_ = plan_of(blamed, [log], {0: [("n", "M")]}, blocked, types=types).groups
    assert sites(group.candidate) == [(0, 0, 0, False, "M", "n")]
    assert sites(group.reference) == [(0, 2, 0, False, "n", "M")]


def test_a_call_behind_a_missing_cast_that_has_another_argument_is_not_passed() -> None:
    """Otherwise its own defect would be hidden."""
    casts = [call("_to_copy", given, made, None) for given, made in ("ab", "wv")]
    product = call("mm", "bv", "m", 0, 1)._replace(scalars=(("alpha", "1"),))
    reference = [*casts, product, call("add", "mf", "s", 2, None)]
    candidate = [call("mm", "aw", "M", None, None)._replace(scalars=(("alpha", "2"),))]
    candidate += [call("add", "Mf", "S", 0, None)]
    types = dict.fromkeys("awMsSf", "float32[2]") | dict.fromkeys("bvm", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[0], ranks=(0,), candidate=None, reference=0)
    blocked = [ValueSite(0, 0, 0, True), ValueSite(0, 0, 0)]
    plan = plan_of(blamed, [log], {0: [("s", "S")]}, blocked, types=types)
    assert not any(group.is_lead for group in plan.groups) and "also reads another value" in plan.problems[0]


def test_a_missing_cast_hides_no_wrong_value_that_comes_from_before_it() -> None:
    """`exp` has another argument. It is a defect of its own, although its value is of another dtype behind `t`."""
    exp = call("exp", "c", "e", None)._replace(scalars=(("eps", "1"),))
    reference = [exp, call("_to_copy", "e", "b", 0), call("t", "b", "u", 1), call("_to_copy", "w", "v", None)]
    reference += [call("mm", "uv", "m", 2, 3), call("add", "mf", "s", 4, None)]
    wrong = exp._replace(outputs=("E",), scalars=(("eps", "2"),))
    candidate = [wrong, call("t", "E", "U", 0), call("mm", "Uw", "M", 1, None), call("add", "Mf", "S", 2, None)]
    types = dict.fromkeys("ceEUwMsSf", "float32[2]") | dict.fromkeys("buvm", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[3], ranks=(0,), candidate=None, reference=3)
    plan = plan_of(blamed, [log], {0: [("s", "S")]}, types=types)
    assert not any(group.is_lead for group in plan.groups) and "also reads another value" in plan.problems[0]


def test_a_missing_cast_hides_no_other_tensor_that_is_read_in_its_region() -> None:
    """`mm` reads the other chunk's activation, which the reference casts as well, elsewhere."""
    casts = [call("_to_copy", given, made, None) for given, made in ("ab", "xy", "wv")]
    reference = [*casts, call("mm", "bv", "m", 0, 2), call("add", "mf", "s", 3, None)]
    candidate = [call("mm", "xw", "M", None, None), call("add", "Mf", "S", 0, None)]
    types = dict.fromkeys("axwMsSf", "float32[2]") | dict.fromkeys("byvm", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[2], ranks=(0,), candidate=None, reference=2)
    plan = plan_of(blamed, [log], {0: [("s", "S")]}, types=types)
    assert not any(group.is_lead for group in plan.groups) and "also reads another value" in plan.problems[0]


def test_a_missing_cast_hides_no_other_missing_call_before_its_exchange() -> None:
    reference = [call("_to_copy", "w", "v", None), call("mul", "f", "g", None), call("mm", "bv", "m", None, 0)]
    reference += [call("add", "mg", "s", 2, 1)]
    candidate = [call("mm", "bw", "M", None, None), call("add", "Mf", "S", 0, None)]
    types = dict.fromkeys("wMsSfg", "float32[2]") | dict.fromkeys("bvm", "bfloat16[2]")
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="lacks", call=reference[0], ranks=(0,), candidate=None, reference=0)
    plan = plan_of(blamed, [log], {0: [("s", "S")]}, types=types)
    assert not any(group.is_lead for group in plan.groups) and "also reads another value" in plan.problems[0]
