"""The collector rests while a graph is made, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

from bitproof.harness.graph.collector import gc_paused


def test_the_collector_rests_inside_and_runs_again_after() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), gc_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_collector_that_rested_before_rests_on() -> None:
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
