"""Boundaries: which modules a case observes, and what records of them are called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import JOINT, Boundary, Pipeline, boundary_of, observed_modules
from bitproof.harness.errors import CaseError

MODULES = ["", "norm", "layers", "layers.0", "layers.0.moe", "layers.1", "layers.1.moe"]
moe_seq = CASES["moe_seq"]


@pytest.mark.parametrize(
    ("boundary", "name"),
    [
        (Boundary("layers.0", "forward"), "layers.0@forward"),
        (Boundary("layers.1.moe.router", "backward", 0, 0, 1), "layers.1.moe.router@backward.output0.chunk1"),
        (Boundary("rope", "forward", None, 2), "rope@forward.call2"),
    ],
)
def test_a_boundarys_name_says_all_of_it_and_is_read_back(boundary, name):
    assert boundary.name == name
    assert boundary_of(name) == boundary


@pytest.mark.parametrize("name", ["layers.0.w", "layers.0@sideways", "layers.0@forward.chunk2", "@forward"])
def test_another_name_says_no_boundary(name):
    assert boundary_of(name) is None


def test_modules_are_chosen_once_in_their_own_order_and_the_model_itself_never():
    assert observed_modules(["layers.*", "norm"], MODULES) == ["norm", "layers.0", "layers.1"]
    assert observed_modules(["layers.*.moe", "**"], MODULES) == MODULES[1:]


def test_a_pattern_that_fits_no_module_is_refused_beside_one_that_does():
    with pytest.raises(CaseError) as refusal:
        observed_modules(["layers.*", "layer.*"], MODULES)
    assert str(refusal.value) == (
        "CaseError: the pattern 'layer.*' of what to observe matches no module\n"
        "  expected: modules of the model: layers, layers.*, layers.*.moe, norm\n"
        "  found: no match\n"
        "  fix: correct --observe, or `observe` in the case"
    )


def test_what_is_no_pattern_is_refused():
    assert replace(moe_seq, observe=("layers.**",)).observe == ("layers.**",)
    with pytest.raises(CaseError, match="observes what is no pattern over module names") as refusal:
        replace(moe_seq, observe=("layers.*", "layers[0]"))
    assert refusal.value.found == "'layers[0]'"


def test_compiled_graphs_and_exported_ones_show_no_activations():
    compiled = Pipeline(backend="inductor")
    assert replace(moe_seq, observe=("norm",), pipeline=replace(compiled, until="chunk")).observe
    with pytest.raises(CaseError, match="of what does not show them") as refusal:
        replace(moe_seq, observe=("norm",), pipeline=compiled)
    assert refusal.value.found == "backend inductor"
    with pytest.raises(CaseError, match="of what does not show them"):
        replace(CASES["unchunked"], observe=("norm",), candidate=JOINT)
