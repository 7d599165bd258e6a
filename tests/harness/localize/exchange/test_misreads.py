"""Calls that read a wrong one of several right values, in the same way as the blamed call."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.exchange_plan import plan_of
from bitproof.harness.localize.exchange.misreads import misreads_like
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog

FORWARD, BACKWARD = CallSite("layers.0", "forward"), CallSite("layers.0", "backward")


def call(place: CallSite, batch: int, operator: str, given: str, made: str, *producers: int | None) -> Call:
    inputs, outputs = tuple(given.split()), tuple(made.split())
    return Call(place, operator, inputs, outputs, producers=producers, micro_batch=batch)


def forwards() -> list[Call]:
    """Three micro-batches: calls 0 to 2."""
    return [call(FORWARD, batch, "silu", f"x{batch}", f"a{batch}", None) for batch in (1, 2, 3)]


def backward(batch: int, kept: int, gives: Sequence[str]) -> list[Call]:
    """The backward of a micro-batch, which reads what the forward of micro-batch `kept` has kept."""
    made = [call(BACKWARD, batch, "mul", f"g{batch} a{kept}", gives[0], None, kept - 1)]
    return [*made, call(BACKWARD, batch, "mm", f"h{batch} a{kept}", gives[1], None, kept - 1)]


def pipeline() -> CandidateLog:
    """The backward of micro-batches 2 and 3 reads what the one before has kept. The second micro-batch's `mm` is 6."""
    reference, candidate = forwards(), forwards()
    for batch in (1, 2, 3):
        reference += backward(batch, batch, (f"d{batch}", f"e{batch}"))
        candidate += backward(batch, max(batch - 1, 1), [f"{name}{batch}" for name in ("de" if batch == 1 else "DE")])
    return CandidateLog(candidate, ReferenceLog(reference))


def reads(log: CandidateLog, index: int) -> Culprit:
    return Culprit(how="reads", call=log.log[index], ranks=(0,), candidate=index, reference=log.matching_call(index))


def test_all_calls_that_read_the_micro_batch_before_are_one_cause_and_each_input_is_exchanged() -> None:
    log = pipeline()
    blamed = reads(log, 5)
    assert [(read.mine, read.position) for read in misreads_like(blamed, [log])] == [(5, 1), (6, 1), (7, 1), (8, 1)]
    lead, *others = plan_of(blamed, [log], {0: [("d2", "D2")]}).groups
    assert lead.is_lead and [swap.site.call for swap in lead.candidate] == [5]
    found = [
        (swap.site.call, swap.site.position, swap.found, swap.wanted) for each in others for swap in each.candidate
    ]
    assert (6, 1, "a1", "a2") in found and (8, 1, "a2", "a3") in found
    back = [(swap.site.call, swap.found, swap.wanted) for each in others for swap in each.reference]
    assert (6, "a2", "a1") in back and (8, "a3", "a2") in back


def test_a_call_that_computes_a_wrong_value_misreads_nothing() -> None:
    log = pipeline()
    assert not [*misreads_like(Culprit(how="computes", call=log.log[5], ranks=(0,), candidate=5, reference=5), [log])]


def test_another_call_s_value_of_the_same_micro_batch_is_no_known_way() -> None:
    """`mul` reads `x2` in place of `a2`: that says nothing of other calls."""
    reference, candidate = forwards(), forwards()
    reference += backward(2, 2, ("d2", "e2"))
    candidate += [reference[3]._replace(inputs=("g2", "x2"), outputs=("D2",), producers=(None, None)), reference[4]]
    reference[:0] = candidate[:0] = [call(FORWARD, 2, "neg", "y2", "x2", None)]
    reference, candidate = ([each._replace(producers=moved(each)) for each in log] for log in (reference, candidate))
    candidate[4] = candidate[4]._replace(producers=(None, 0))
    log = CandidateLog(candidate, ReferenceLog(reference))
    assert not [*misreads_like(reads(log, 4), [log])]


def moved(call: Call) -> tuple[int | None, ...]:
    """The producers of a call before whose log another call was put."""
    return tuple(None if producer is None else producer + 1 for producer in call.producers)


def test_values_left_from_before_the_step_are_one_cause_though_each_call_reads_another() -> None:
    """Parameters gathered in the step before are read, and not those that this step gathers."""
    reference = [call(FORWARD, 1, "all_gather", f"s{i}", f"p{i}", None) for i in (1, 2)]
    candidate = [*reference]
    reference += [call(FORWARD, 1, "mm", "x p1", "a", None, 0), call(FORWARD, 1, "mul", "y p2", "b", None, 1)]
    candidate += [call(FORWARD, 1, "mm", "x P1", "A", None, None), call(FORWARD, 1, "mul", "y P2", "B", None, None)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="inherits", call=log.log[2], ranks=(0,), candidate=2, reference=2)
    groups = plan_of(blamed, [log], {0: [("a", "A"), ("b", "B")]}).groups
    found = {(swap.site.call, swap.site.position, swap.wanted) for each in groups for swap in each.candidate}
    assert found == {(2, 1, "p1"), (3, 1, "p2")}


def test_a_parameter_that_is_read_without_a_call_that_the_reference_makes_of_it_is_another_defect() -> None:
    """A gathered parameter is left from the step before; beside it, another parameter is not scaled."""
    reference = [call(FORWARD, 1, "all_gather", "s", "p", None), call(FORWARD, 1, "mul", "q", "k", None)]
    candidate = reference[:1]
    reference += [call(FORWARD, 1, "mm", "x p", "a", None, 0), call(FORWARD, 1, "bmm", "y k", "b", None, 1)]
    candidate += [call(FORWARD, 1, "mm", "x P", "A", None, None), call(FORWARD, 1, "bmm", "y q", "B", None, None)]
    log = CandidateLog(candidate, ReferenceLog(reference))
    blamed = Culprit(how="inherits", call=log.log[1], ranks=(0,), candidate=1, reference=2)
    assert [read.mine for read in misreads_like(blamed, [log])] == [1]


def test_a_view_that_reads_the_wrong_value_stands_for_those_of_its_line() -> None:
    """Two views of one place take the first turn's value, and what they should take is no other micro-batch's."""
    reference = [call(FORWARD, 1, operator, operator, made, None) for operator, made in (("mm", "k"), ("sub", "o"))]
    reference += [call(FORWARD, 1, "add", "w", "v", None), call(FORWARD, 1, "mul", "w", "q", None)]
    turned = [("o", "r", 1), ("q", "s", 3)]
    views = [call(BACKWARD, 1, "transpose", given, made, by)._replace(view=True) for given, made, by in turned]
    wrong = [("k", "R", 0), ("v", "S", 2)]
    turns = [call(BACKWARD, 1, "transpose", given, made, by)._replace(view=True) for given, made, by in wrong]
    readers = [call(BACKWARD, 1, operator, "r", f"{operator}_r", 4) for operator in ("exp", "log")]
    candidate = [*reference, *turns, *(each._replace(inputs=("R",), outputs=("T",)) for each in readers)]
    log = CandidateLog(candidate, ReferenceLog([*reference, *views, *readers]))
    found = plan_of(reads(log, 4), [log], {0: [("exp_r", "T")]}).groups
    assert {swap.site.call for each in found for swap in each.candidate} == {4, 5}
