"""The pool: work takes the next free place, what is cancelled ends, and a place serves others afterwards."""

import threading
from concurrent.futures import CancelledError

import pytest

from bitproof.harness.execute.pool import Pool


class Place:
    """A session that runs nothing, and logs what is asked of it."""

    def __init__(self):
        self.is_left, self.began, self.log = threading.Event(), threading.Event(), []

    def abandon(self):
        self.log.append("abandon")
        self.is_left.set()

    def resume(self):
        self.log.append("resume")
        self.is_left.clear()

    def end(self):
        self.log.append("end")
        self.is_left.set()

    def stay(self, *_):
        """Work that takes until the place is left."""
        self.began.set()
        assert self.is_left.wait(20)
        raise InterruptedError


@pytest.fixture
def place():
    return Place()


@pytest.fixture
def pool(place):
    made = Pool([(place,)])
    yield made
    made.end()


def test_work_is_done_in_order_at_the_place_that_is_free(pool, place):
    done = []
    tasks = [pool.submit(lambda sessions, number=number: done.append((number, sessions))) for number in range(5)]
    for task in tasks:
        task.result()
    assert done == [(number, (place,)) for number in range(5)]


def test_what_work_raises_is_raised_for_who_asks_for_its_result_and_for_nobody_else(pool):
    def fail(sessions):
        raise ValueError("broken")

    failed, good = pool.submit(fail), pool.submit(lambda sessions: 7)
    assert good.result() == 7
    with pytest.raises(ValueError, match="broken"):
        failed.result()


def test_cancelled_work_ends_and_its_place_serves_the_next_one(pool, place):
    stuck, later = pool.submit(place.stay), pool.submit(lambda sessions: place.is_left.is_set())
    assert place.began.wait(20)
    pool.cancel(stuck)
    assert later.result() is False, "it answers again"
    assert place.log == ["abandon", "resume"]
    with pytest.raises(InterruptedError):
        stuck.result()


def test_cancelled_work_that_waits_never_begins(pool, place):
    stuck, waiting = pool.submit(place.stay), pool.submit(lambda sessions: pytest.fail("it began"))
    assert place.began.wait(20)
    pool.cancel(waiting)
    assert place.log == []
    pool.cancel(stuck)
    with pytest.raises(CancelledError):
        waiting.result()


def test_cancelling_what_is_done_harms_neither_its_result_nor_the_work_that_follows(pool, place):
    done = pool.submit(lambda sessions: 1)
    done.result()
    pool.cancel(done)
    assert (done.result(), pool.submit(lambda sessions: 2).result(), place.log) == (1, 2, [])


def test_a_closed_pool_has_no_threads_and_its_sessions_go_on():
    before, places = threading.active_count(), [Place(), Place()]
    pool = Pool([(place,) for place in places])
    stuck = [pool.submit(lambda sessions: sessions[0].stay()) for _ in range(3)]
    pool.close()
    assert threading.active_count() == before and all(task.is_done for task in stuck)
    assert all(set(place.log) <= {"abandon", "resume"} and not place.is_left.is_set() for place in places)


def test_at_a_place_of_several_sessions_all_are_left():
    one, other = Place(), Place()
    pool = Pool([(one, other)])
    pool.submit(one.stay)
    assert one.began.wait(20)
    pool.end()
    assert one.log[0] == other.log[0] == "end"
