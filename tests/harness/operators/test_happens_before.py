"""What gets in the way of what is on its way, beside its nearest neighbour that does not; memory has letters here."""

from bitproof.harness.operators import known
from bitproof.harness.operators.happens_before import NEVER_FREED, Order

OFFLOAD, RELOAD, GATHER = (known(name) for name in ("bitproof.offload", "bitproof.reload", "_c10d_functional.x"))
WAIT_OFFLOAD, WAIT_RELOAD = known("bitproof.wait_offload").wait, known("bitproof.wait_reload").wait
WAIT_TENSOR = known("_c10d_functional.wait_tensor").wait


def described(order: Order, reads: str = "", writes: str = "") -> list[str]:
    return [race.describe("it") for race in order.races(reads, writes)]


def flying(rule, results=("h",), takes="x", last_use=None) -> Order:
    order = Order(last_use or {})
    order.launch("launch", 0, rule, results, takes)
    return order


def test_what_is_filled_may_be_neither_read_nor_written_and_what_is_taken_may_be_read() -> None:
    late = "before anything waits for it"
    order = flying(OFFLOAD.launch)
    assert described(order, reads="x") == described(order, reads="y", writes="z") == []
    assert described(order, reads="h") == [f"it reads what `launch` brings, {late}"]
    assert described(order, reads="h", writes="h") == [f"it writes what `launch` brings, {late}"]
    assert described(order, reads="x", writes="x") == [f"it writes what `launch` copies, {late}"]
    assert described(flying(GATHER.launch), writes="x") == [f"it writes what `launch` sends, {late}"]


def test_a_wait_ends_what_fills_the_memory_that_it_is_handed_if_it_is_of_its_kind() -> None:
    for rule, wait in ((OFFLOAD, WAIT_OFFLOAD), (RELOAD, WAIT_RELOAD), (GATHER, WAIT_TENSOR)):
        order = flying(rule.launch)
        for other in (WAIT_OFFLOAD, WAIT_RELOAD, WAIT_TENSOR):
            assert order.wait(wait, "y", 1) == []
            assert other is wait or order.wait(other, "h", 1) == []
        assert order.is_filling("h")
        assert order.touching("x") == order.touching("h") == [0]
        assert order.wait(wait, "h", 1) == []
        assert not order.is_filling("h")
        assert described(order, reads="h", writes="x") == []


def test_one_wait_frees_what_is_taken_and_each_result_has_a_wait_of_its_own() -> None:
    order = flying(GATHER.launch, results=("a", "b"))
    order.wait(WAIT_TENSOR, "a", 1)
    assert described(order, reads="a", writes="x") == []
    assert described(order, reads="b") == ["it reads what `launch` brings, before anything waits for it"]


def test_of_two_launches_of_one_name_a_wait_ends_one() -> None:
    order = flying(OFFLOAD.launch)
    order.launch("launch", 1, OFFLOAD.launch, ["i"], "x")
    order.wait(WAIT_OFFLOAD, "h", 2)
    assert described(order, writes="x") == ["it writes what `launch` copies, before anything waits for it"]


def test_only_what_must_be_kept_is_missed_when_it_is_gone_at_the_wait() -> None:
    freed = ["it waits for `launch`, which copies what is not kept until then"]
    for rule, wait, last_use, expected in (
        (OFFLOAD, WAIT_OFFLOAD, {"x": 2}, freed),
        (OFFLOAD, WAIT_OFFLOAD, {"x": 3}, []),
        (OFFLOAD, WAIT_OFFLOAD, {"x": NEVER_FREED}, []),
        (RELOAD, WAIT_RELOAD, {"x": 0}, []),
        (GATHER, WAIT_TENSOR, {"x": 0}, []),
    ):
        found = flying(rule.launch, last_use=last_use).wait(wait, "h", 3)
        assert [race.describe("it") for race in found] == expected
