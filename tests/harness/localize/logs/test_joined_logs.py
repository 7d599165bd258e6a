"""Which calls of several ranks are one collective, and what happened before what."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.joined_logs import JoinedLogs

HERE = CallSite("layers.0", "forward")


def compute(*producers: int) -> Call:
    return Call(HERE, "mm", ("x",) * len(producers), ("y",), producers=producers)


def meet(*peers: int, operator: str = "all_reduce") -> Call:
    return Call(HERE, operator, ("y",), ("z",), collective=True, peers=peers)


def test_collectives_of_one_group_are_matched_in_its_order_whatever_other_groups_do() -> None:
    logs = [[meet(0, 1), meet(0, 2)], [meet(0, 1)], [compute(), meet(2, 0)]]
    joined = JoinedLogs(logs)
    assert joined.together((0, 0)) == [(0, 0), (1, 0)]
    assert sorted(joined.together((2, 1))) == [(0, 1), (2, 1)]


def test_a_call_that_is_no_collective_is_one_by_itself() -> None:
    assert JoinedLogs([[compute()]]).together((0, 0)) == [(0, 0)]


def test_what_is_received_was_sent_by_the_rank_and_turn_that_sent_it() -> None:
    sends, receives = meet(0, 1, operator="send"), meet(0, 1, operator="recv_")
    back = meet(1, 0, operator="send")
    joined = JoinedLogs([[sends, meet(1, 0, operator="recv_"), sends], [back, receives, receives]])
    assert sorted(joined.together((1, 2))) == [(0, 2), (1, 2)]
    assert sorted(joined.together((0, 1))) == [(0, 1), (1, 0)]


def test_messages_with_tags_are_matched_by_them_in_whatever_order_they_are_received() -> None:
    sends, receives = (
        [meet(0, 1, operator=operator)._replace(tag=tag) for tag in ("7", "9", "7")] for operator in ("send", "recv_")
    )
    joined = JoinedLogs([sends, [receives[1], receives[0], receives[2]]])
    assert [joined.together((1, index))[0] for index in range(3)] == [(0, 1), (0, 0), (0, 2)]


def test_a_launch_happens_before_what_other_ranks_compute_of_it_and_indices_do_not_count() -> None:
    long = [compute() for _ in range(50)]
    joined = JoinedLogs([[meet(0, 1), compute(0)], [*long, meet(0, 1)]])
    assert joined.when((1, 10)) < joined.when((0, 1)), "it is before the launch, for all that its index is larger"
    assert joined.when((1, 49)) < joined.when((1, 50)) < joined.when((0, 1))


def test_a_ring_that_no_run_can_have_is_cut() -> None:
    log = [Call(HERE, "mm", ("x",), ("y",), producers=(1,)), meet(0, 1)]
    joined = JoinedLogs([log, log])
    assert len({joined.when((rank, index)) for rank in (0, 1) for index in (0, 1)}) == 4
