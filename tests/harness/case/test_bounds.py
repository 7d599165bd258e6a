"""Numbers of a case: the largest and smallest that it may have, and that their neighbours are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.case import SIZES, AdamW, Autoplace, Batch, Case, Memory, Model, Parallelism
from bitproof.harness.case.bounds import FLOAT32_MAX
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.errors import CaseError

LARGEST = (1 << 32) - 1
WHOLE: dict[str, tuple[Callable[..., Any], int, int]] = {
    "steps": (lambda value: Case(name="a", family="b", reference="eager", steps=value), 1, 1_000_000),
    "seed": (lambda value: Case(name="a", family="b", reference="eager", seed=value), 0, LARGEST),
    "parallelism.world_size": (lambda value: Parallelism(world_size=value, ep=1), 1, 65_536),
    "parallelism.ep": (lambda value: Parallelism(world_size=65_536, ep=value), 1, 65_536),
    "parallelism.tp": (lambda value: Parallelism(world_size=65_536, tp=value), 1, 65_536),
    "batch.sequences": (lambda value: Batch(sequences=value), 1, 65_536),
    "batch.seq_len": (lambda value: Batch(seq_len=value), 1, 1 << 24),
    "memory.prefetch": (lambda value: Memory(policy="offload", prefetch=value), 0, 1000),
    "memory.defer": (lambda value: Memory(policy="offload", defer=value), 0, 1000),
} | {
    f"model.{name}": (lambda value, name=name: Model(**{name: value}), 0 if name == "dense_layers" else 8, most.high)
    for name, most in SIZES.items()
    if isinstance(most.high, int)
}
REAL: dict[str, tuple[Callable[..., Any], float]] = {
    "optimizer.lr": (lambda value: AdamW(lr=value), FLOAT32_MAX),
    "optimizer.eps": (lambda value: AdamW(eps=value), FLOAT32_MAX),
    "optimizer.weight_decay": (lambda value: AdamW(weight_decay=value), FLOAT32_MAX),
    "optimizer.expert_bias_lr": (lambda value: AdamW(expert_bias_lr=value), FLOAT32_MAX),
    "optimizer.betas[0]": (lambda value: AdamW(betas=(value, 0.9)), math.nextafter(1.0, 0.0)),
    "optimizer.betas[1]": (lambda value: AdamW(betas=(0.9, value)), math.nextafter(1.0, 0.0)),
    "memory.offload_gib": (lambda value: Memory(offload_gib=value), 1e6),
    "autoplace.memory_mib": (lambda value: Autoplace(memory_mib=value), 1e9),
}


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(CaseError) as refused:
        make()
    return str(refused.value)


@pytest.mark.parametrize("name", WHOLE)
def test_an_integer_is_taken_from_its_smallest_to_its_largest_and_no_further(name: str) -> None:
    make, least, most = WHOLE[name]
    make(least)
    if name != "steps":  # so many would be on one rank alone
        make(most)
    for value in (-1, most + 1, 2**70, 10**5000, 1.5, math.nan, True, "3"):
        assert f"CaseError: {name} is out of range\n  expected: an integer from " in refusal(
            lambda value=value: make(value)
        )


@pytest.mark.parametrize("name", REAL)
def test_a_number_is_taken_up_to_its_largest_and_no_further(name: str) -> None:
    make, most = REAL[name]
    make(most)
    make(1e-300)
    for value in (
        -1,
        -1e-300,
        math.nextafter(most, math.inf),
        10**5000,
        math.nan,
        math.inf,
        -math.inf,
        True,
        "3",
        None,
    ):
        assert f"CaseError: {name} is out of range\n  expected: a number from 0 to " in refusal(
            lambda value=value: make(value)
        )


@pytest.mark.parametrize("betas", [(0.9,), (), None, 5, (0.1, 0.2, 0.3), "ab"])
def test_there_are_two_betas(betas: Any) -> None:
    assert "CaseError: " in refusal(lambda: AdamW(betas=betas))


def test_a_refusal_says_what_the_number_may_be() -> None:
    assert refusal(lambda: Case(name="a", family="b", reference="eager", seed=2**70)) == (
        "CaseError: seed is out of range\n"
        "  expected: an integer from 0 to 4,294,967,295\n"
        "  found: seed=1180591620717411303424"
    )
    assert refusal(lambda: AdamW(betas=(5, 9))) == (
        "CaseError: optimizer.betas[0] is out of range\n"
        "  expected: a number from 0 to below 1\n"
        "  found: optimizer.betas[0]=5"
    )


def test_steps_and_ranks_are_bounded_together_as_recordings_are() -> None:
    facts: dict[str, Any] = {"name": "a", "family": "b", "reference": "eager"}
    Case(**facts, steps=1_000_000, parallelism=Parallelism(world_size=8))
    assert refusal(lambda: Case(**facts, steps=1_000_000, parallelism=Parallelism(world_size=16))) == (
        "CaseError: case a takes more steps on more ranks than can be recorded\n"
        "  expected: steps times parallelism.world_size at most 10,000,000\n"
        "  found: steps=1,000,000, parallelism.world_size=16"
    )


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [(None, "seed", -1), ("optimizer", "lr", -1), ("optimizer", "betas", [5, 9]), ("parallelism", "world_size", 10**9)],
)
def test_a_file_is_refused_as_the_value_is(part: str | None, field: str, value: Any, tmp_path: Path) -> None:
    values = json.loads(case_text(Case(name="a", family="b", reference="eager")))
    (values[part] if part else values)[field] = value
    (tmp_path / "case.json").write_text(json.dumps(values))
    text = refusal(lambda: read_case(tmp_path / "case.json"))
    assert f"{part + '.' if part else ''}{field}" in text
