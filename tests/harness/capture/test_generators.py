"""Which generators a step drew from, and what is shown of them."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.generators import Generators

DRAWS = {
    "torch": lambda: torch.rand(1),
    "python": lambda: random.random(),
    "numpy": lambda: numpy.random.rand(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_only_the_generator_that_was_drawn_from_is_shown(name):
    before = Generators()
    assert before.drawn() == {}
    DRAWS[name]()
    assert list(before.drawn()) == [name]


def test_torch_s_state_has_the_digest_that_a_log_gives_it():
    before = Generators()
    torch.rand(1)
    assert digest(before.drawn()["torch"]) == digest(torch.get_rng_state())


def test_a_number_that_a_generator_keeps_for_its_next_call_is_part_of_its_state():
    random.seed(1)
    random.gauss(0, 1)
    before = Generators()
    random.gauss(0, 1)  # the second of two that were made at once
    assert list(before.drawn()) == ["python"]


def test_a_generator_of_one_s_own_is_not_shown():
    before = Generators()
    torch.rand(1, generator=torch.Generator())
    random.Random(1).random()
    assert before.drawn() == {}
