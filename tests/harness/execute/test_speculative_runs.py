"""Tries that are begun ahead: what is asked for is got, and what is not wanted any more ends."""

import threading
import time
from collections import Counter

import pytest

from bitproof.harness.execute.pool import Pool
from bitproof.harness.execute.speculative_runs import SpeculativeRuns


class Place:
    """A session that runs nothing."""

    def __init__(self):
        self.is_left = threading.Event()
        self.log = []

    def abandon(self):
        self.log.append("abandon")
        self.is_left.set()

    def resume(self):
        self.log.append("resume")
        self.is_left.clear()

    def end(self):
        self.is_left.set()


class Bench:
    """Tries are numbers; each comes to its square as soon as its gate is opened."""

    def __init__(self, num_places, cores=None):
        self.places = [Place() for _ in range(num_places)]
        self.gates = {number: threading.Event() for number in range(10)}
        self.begun, self.left = Counter(), []
        self.pool = Pool([(place,) for place in self.places])  # type: ignore[list-item]
        self.tries = SpeculativeRuns(self.pool, self.run, lambda number: 2, cores)

    def run(self, place, number):
        self.begun[number] += 1
        if number == 7:
            raise ValueError("seven")
        while not self.gates[number].wait(0.01):
            if place.is_left.is_set():
                self.left.append(number)
                raise InterruptedError
        return number * number

    def wait_until_begun(self, *numbers):
        """Until these are under way: work that was not begun is not ended, but never begins."""
        while not self.begun.keys() >= set(numbers):
            time.sleep(0.01)

    def open(self, *numbers):
        for number in numbers:
            self.gates[number].set()


def test_as_many_as_there_are_places_run_at_once_and_each_runs_once():
    bench = Bench(3)
    bench.tries.begin(iter([1, 2, 3, 4]))
    bench.open(3, 2, 1)
    assert [bench.tries.result(number) for number in (1, 2, 3)] == [1, 4, 9]
    assert bench.begun == {1: 1, 2: 1, 3: 1}
    bench.pool.end()


def test_with_one_place_a_try_begins_when_it_is_asked_for():
    bench = Bench(1)
    bench.open(1, 2)
    for number in (1, 2):
        bench.tries.begin(iter([number, 5]))
        assert bench.tries.result(number) == number * number
    assert bench.begun == {1: 1, 2: 1}


def test_ranks_that_would_find_no_core_wait_and_one_try_runs_however_few_there_are():
    bench = Bench(3, cores=4)
    bench.open(1, 2, 3)
    bench.tries.begin(iter([1, 2, 3]))
    assert [bench.tries.result(number) for number in (1, 2)] == [1, 4]
    assert set(bench.begun) == {1, 2}
    narrow = Bench(3, cores=1)
    narrow.open(1)
    narrow.tries.begin(iter([1, 2]))
    assert narrow.tries.result(1) == 1 and set(narrow.begun) == {1}


def test_what_is_not_wanted_any_more_ends_and_its_place_is_free():
    bench = Bench(2)
    bench.tries.begin(iter([1, 2]))
    bench.wait_until_begun(1, 2)
    bench.open(1, 3, 4)
    assert bench.tries.result(1) == 1
    bench.tries.begin(iter([3, 4]))
    assert [bench.tries.result(number) for number in (3, 4)] == [9, 16]
    assert bench.left == [2]
    assert sorted(place.log for place in bench.places) == [[], ["abandon", "resume"]]


def test_a_result_that_nobody_asked_for_yet_is_kept():
    bench = Bench(2)
    bench.open(1, 2, 3)
    bench.tries.begin(iter([1, 2]))
    bench.tries.result(1), bench.tries.result(2)
    bench.tries.begin(iter([3]))
    assert bench.tries.result(2) == 4 and bench.begun[2] == 1


def test_a_try_that_fails_fails_for_who_asks_for_it_and_for_nobody_else():
    bench = Bench(2)
    bench.open(1)
    bench.tries.begin(iter([1, 7]))
    assert bench.tries.result(1) == 1
    with pytest.raises(ValueError, match="seven"):
        bench.tries.result(7)


def test_closing_ends_what_is_under_way():
    bench = Bench(2)
    bench.tries.begin(iter([1, 2]))
    bench.wait_until_begun(1, 2)
    bench.pool.end()
    assert sorted(bench.left) == [1, 2]
