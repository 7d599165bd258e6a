"""Patterns over module names, as chunking and observing use them."""

from __future__ import annotations

import pytest

from bitproof.harness.case.patterns import fits, is_pattern, pattern_of, root_of


def test_the_pattern_of_a_module_is_that_of_its_like_in_other_layers():
    assert pattern_of("layers.1.moe.router") == "layers.*.moe.router"
    assert pattern_of("norm") == "norm"


def test_a_root_is_the_module_that_matches_and_what_lies_in_it_has_it():
    assert root_of("layers.*.moe", "layers.1.moe") == "layers.1.moe"
    assert root_of("layers.*.moe", "layers.1.moe.router") == "layers.1.moe"
    assert root_of("layers.*.moe", "layers.1.attention") is None
    assert root_of("layers.*.moe", "layers.1") is None


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        ("layers.*", "layers.1", "layers.1.moe"),
        ("layers.**", "layers.1.moe", "layers"),
        ("layers.**.w1", "layers.1.moe.shared_experts.w1", "layers.1.moe.shared_experts.w2"),
        ("**", "norm", ""),
        ("norm", "norm", "layers.1.norm"),
    ],
)
def test_one_star_is_one_component_and_two_are_several(pattern, fitting, other):
    assert is_pattern(pattern)
    assert fits(pattern, fitting) and not fits(pattern, other)


@pytest.mark.parametrize("text", ["", "layers.", "layers.***", "layers.a*", "layers [0]", ".layers"])
def test_what_is_no_dotted_name_is_no_pattern(text):
    assert not is_pattern(text)
