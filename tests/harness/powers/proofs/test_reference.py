"""A reference that another process traces while this one traces the candidate."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.powers.proofs.prover import pairs
from bitproof.harness.powers.proofs.prover import prove as prove_module
from bitproof.harness.powers.proofs.prover import reference as reference_module
from bitproof.harness.powers.proofs.prover.certify import certificate_of
from bitproof.harness.powers.proofs.prover.prove import prove_case
from bitproof.harness.processes.process import children
from tests.sweeps import sweep

pytestmark = [pytest.mark.ranks, pytest.mark.traces]


SMALL = replace(
    CASES["transformer_batch"],
    reference="eager",
    chunking=None,
    model=replace(CASES["transformer_batch"].model, layers=1, dense_layers=1),
    parallelism=Parallelism(world_size=2, ep=2),
)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case whose step counts as one of too many parameters to be computed."""
    for module in (reference_module, pairs):
        monkeypatch.setattr(module, "MOST_ELEMENTS", 0)
    return SMALL


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The systems that this process traces, and no kept reference of another test's."""
    seen: list[str] = []
    own = reference_module.graph_of

    def graph_of(case: Case, system: str, *rest: Any) -> Any:
        seen.append(system)
        return own(case, system, *rest)

    monkeypatch.setattr(reference_module, "graph_of", graph_of)
    monkeypatch.setattr(prove_module, "graph_of", graph_of)
    monkeypatch.setattr(reference_module.threading, "active_count", lambda: 1)
    reference_module.traced_reference.cache_clear()
    return seen


def test_a_large_reference_is_traced_meanwhile_and_the_proof_is_the_same(large: Case, traced_here: list[str]) -> None:
    case, before = large, children()
    apart = prove_case(case, follow=True, in_turn=False)
    assert traced_here == ["graph"]
    assert children() <= before
    alone = prove_case(case, follow=True)
    assert traced_here == ["graph", "eager", "graph"]
    assert apart.verdict == alone.verdict == "PROVED"
    assert apart.not_evaluated == alone.not_evaluated == "the step is too large to be computed here"
    assert (apart.answers, apart.graphs, apart.bounds) == (alone.answers, alone.graphs, alone.bounds)
    sides = apart.update, alone.update
    assert all(update is not None and update.induction.holds and update.proof is not None for update in sides)
    one, other = (certificate_of("large", update.proof) for update in sides if update and update.proof)
    assert one == other


def test_a_small_reference_is_traced_here(traced_here: list[str]) -> None:
    assert prove_case(SMALL, evaluate=False, in_turn=False).verdict == "PROVED"
    assert traced_here == ["eager", "graph"]


@pytest.mark.slow
def test_where_other_threads_run_no_process_is_forked(
    large: Case, traced_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_module.threading, "active_count", lambda: 2)
    assert prove_case(large, in_turn=False).verdict == "PROVED"
    assert traced_here == ["eager", "graph"]


def _is_killed(*_: Any) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _hangs(*_: Any) -> bytes:
    time.sleep(1000)
    raise AssertionError


@pytest.mark.parametrize("how", sweep([_is_killed, _hangs], _is_killed))
def test_where_the_other_process_fails_the_reference_is_traced_here(
    how: Callable[..., bytes], large: Case, traced_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr(reference_module.pickle, "dumps", how)
    monkeypatch.setattr(reference_module, "PATIENCE_SECONDS", 1.0)
    assert prove_case(large, in_turn=False).verdict == "PROVED"
    assert traced_here == ["graph", "eager"]
    assert children() <= before


def test_a_candidate_that_fails_leaves_no_process(large: Case, traced_here: list[str]) -> None:
    before = children()
    with pytest.raises(Exception, match="no_such_file"):
        prove_case(large, GraphOptions(extra_passes=("no_such_file:x",)), in_turn=False)
    assert children() <= before


@pytest.mark.slow
def test_other_models_are_refused_by_what_the_other_process_says(
    large: Case, traced_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = reference_module.pickle.dumps
    monkeypatch.setattr(reference_module.pickle, "dumps", lambda kept: own((kept[0][1:], *kept[1:])))
    found = prove_case(large, in_turn=False)
    assert found.verdict == "REFUSED"
    assert found.reason == "the two systems' models have other parameters, buffers or inputs, in both graphs"
