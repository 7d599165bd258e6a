from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitproof import builtin_cases as cases
from bitproof.builtin_cases import (
    captured,
    chunking,
)
from bitproof.harness.case import Case
from bitproof.harness.case.select import select
from bitproof.harness.errors import CaseError, UsageError
from bitproof.reference.data import TextStream, text_source
from bitproof.reference.init import initial_values, spread_biases
from bitproof.reference.models import build_model, model_config
from tests.distributions import install


def test_make_run_takes_the_six_cases_that_ci_judges():
    root = Path(__file__).parents[2]
    asked = dict(re.findall(r"^(CASES|SIGHT) := (.+)$", (root / "Makefile").read_text(), re.MULTILINE))
    chosen = {case.name for case in select(cases.all_cases(), f"{asked['CASES']} or {asked['SIGHT']}")}
    judged = re.findall(r"^(?:NAMES|SIGHT) = \{(.+)\}$", (root / ".ci/check_report.py").read_text(), re.MULTILINE)
    assert chosen == set(re.findall(r"\w+", " ".join(judged))) and len(chosen) == 6


def test_cases_are_listed_by_family_and_the_main_ones_come_first():
    names = [case.name for case in cases.all_cases()]
    assert names[:4] == ["transformer_batch", "moe_batch", "moe_seq", "unchunked"]
    assert names[4:7] == ["blocks_batch_sight", "experts_batch_sight", "experts_seq_sight"]
    assert names == [case.name for family in cases.FAMILIES for case in family.CASES]
    for family in cases.FAMILIES:
        assert {case.family for case in family.CASES} == {family.__name__.rpartition(".")[2]}
    assert all(cases.CASES[case.name] is case for case in cases.all_cases())


def test_two_cases_of_one_name_are_refused():
    twin = Case(name="moe_seq", family="other", reference="eager")
    with pytest.raises(CaseError) as error:
        cases.collect(chunking.CASES, [twin])
    assert str(error.value) == (
        "CaseError: two cases are named moe_seq\n"
        "  expected: a name of its own for every case\n"
        "  found: one in family chunking, one in family other"
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which a distribution named mine brings cases from its module `more_cases`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "more_cases", raising=False)
    install(tmp_path, "mine", "[bitproof.cases]\nmore = more_cases:CASES\n")
    yield tmp_path
    sys.modules.pop("more_cases", None)


CASE = (
    "from bitproof.harness.case import Case\ndef case(name): return Case(name=name, family='more', reference='eager')\n"
)


@pytest.mark.parametrize("declared", ["CASES = [case('mine')]", "def CASES(): return (case('mine'),)"])
def test_cases_of_installed_distributions_come_last(site, declared):
    (site / "more_cases.py").write_text(CASE + declared)
    assert [case.name for case in cases.all_cases()] == [*cases.CASES, "mine"]
    assert "mine" not in cases.CASES


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("CASES = [case('moe_seq')]", "CaseError: two cases are named moe_seq\n"),
        ("CASES = [case('MINE')]", "UsageError: entry point more of mine 1.0 cannot be loaded\n  found: CaseError"),
        ("CASES = ['mine']", "UsageError: entry point more of mine 1.0 is not a list of cases\n"),
        ("CASES = case('mine')", "UsageError: entry point more of mine 1.0 is not a list of cases\n"),
        ("import no_such_module", "UsageError: entry point more of mine 1.0 cannot be loaded\n"),
    ],
)
def test_a_distribution_that_brings_no_cases_or_a_name_again_is_refused(site, declared, text):
    (site / "more_cases.py").write_text(CASE + declared)
    with pytest.raises(UsageError) as error:
        cases.all_cases()
    assert str(error.value).startswith(text)


def test_of_the_experts_of_a_case_that_sees_one_gets_no_token_one_a_single_one_and_one_more_than_256():
    case = chunking.blocks_batch_sight
    model = build_model(case.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_values(name, parameter.shape, case.seed, spread=True))
        spread_biases(model, case.seed)
        step = TextStream(text_source(case.batch.data)[0], case.batch, rank=1, world_size=6).step(0)
        loss_like = model(step.tokens_BS, step.positions_BS)
    counts = model.get_buffer("layers.1.moe.tokens_per_expert")
    assert loss_like.isfinite().all()
    assert counts[1] == 0 and counts[-1] == 1 and counts.max() > 256 and counts.sum() == 3 * 1024


def test_a_capacity_is_a_positive_factor_of_a_model_with_experts_and_a_captured_step_observes_nothing():
    llama3, experts = captured.CASES[0], cases.CASES["captured_experts"]
    assert model_config(experts.model).moe.capacity == 1.25
    with pytest.raises(CaseError, match="observes activations of a step that is replayed as a CUDA graph"):
        replace(llama3, observe=("layers.*",))
    with pytest.raises(CaseError, match="llama3 has no experts, and so no capacity"):
        model_config(replace(llama3.model, capacity=1.0))
    for capacity in (0, 0.0, -1.0, float("nan"), 1e9, True):
        with pytest.raises(CaseError, match=r"model\.capacity is out of range"):
            replace(experts.model, capacity=capacity)


@pytest.mark.parametrize("name", ["transformer_batch", "moe_batch", "moe_seq"])
def test_the_name_of_a_main_case_selects_it_alone(name):
    assert [case.name for case in select(cases.all_cases(), name)] == [name]


def test_a_shard_of_the_uneven_model_is_padded_or_padding_alone_for_dense_and_for_expert_parameters():
    ranks, shards = 8, 4  # all, and those that share the parameters of half of the experts
    model = build_model(cases.CASES["experts_seq_uneven"].model)
    dense = {name: p.shape[0] for name, p in model.named_parameters() if ".experts." not in name}
    assert {name for name, rows in dense.items() if rows % ranks} == {
        "tok_embeddings.weight",
        "output.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w3.weight",
        *(f"layers.{layer}.attention.{name}.weight" for layer in range(3) for name in ("wkv_a", "kv_norm")),
        *(f"layers.{layer}.moe.router.weight" for layer in (1, 2)),
    }
    assert holds_padding_alone(dense["layers.1.moe.router.weight"], ranks) == [5, 6, 7]
    experts = {p.shape[0] // 2 for name, p in model.named_parameters() if ".experts." in name}
    assert [holds_padding_alone(rows, shards) for rows in experts] == [[3]]


def holds_padding_alone(rows: int, ranks: int) -> list[int]:
    """The ranks whose shard of `rows` rows begins past the last row."""
    return [rank for rank in range(ranks) if rank * -(-rows // ranks) >= rows]


def test_some_experts_get_no_token_from_any_rank_of_their_group():
    """By counting: there are more experts than rows that the ranks of one expert group route in a step."""
    for stem in ("blocks_batch", "experts_batch", "experts_seq"):
        case = cases.CASES[f"{stem}_idle_experts"]
        routing = model_config(case.model).moe.routing
        rows = case.batch.sequences * case.batch.seq_len * routing.top_k * case.parallelism.ep
        assert rows < routing.num_experts


@pytest.mark.ranks
def test_pytest_selects_the_same_cases_as_the_command_line():
    expression = "not (moe_seq or unequal)"
    root = Path(__file__).parents[2]
    flags = f"--rootdir={root} --import-mode=importlib -p no:cacheprovider -q --collect-only".split()
    command = [sys.executable, "-m", "pytest", "cases", *flags, "-k", expression]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    ids = [line.split("[")[1].rstrip("]") for line in found.stdout.splitlines() if "[" in line]
    assert ids == [case.name for case in select(cases.all_cases(), expression)], found.stderr
