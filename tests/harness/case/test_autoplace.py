"""What a case may ask of placements, and the plan that it carries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Autoplace, Case, Chunking, Memory, Plan, with_plan
from bitproof.harness.errors import CaseError

CASE = CASES["autoplace_llama3_fsdp2_tp2"]
PLAN = Plan(split=("layers.0.attention",), replicated=("norm.weight",))


def test_a_plan_travels_with_its_case() -> None:
    planned = with_plan(CASE, PLAN)
    assert planned.autoplace == Autoplace(memory_mib=4.2, plan=PLAN)
    assert Case.from_dict(json.loads(json.dumps(planned.to_dict()))) == planned


@pytest.mark.parametrize("settings", [{"memory_mib": 0.0}, {"memory_mib": math.inf}, {"source": "autoparallel"}])
def test_a_bound_is_a_finite_number_and_a_source_is_known(settings: dict[str, Any]) -> None:
    with pytest.raises(
        CaseError, match=r"placements are asked for in an unknown way|autoplace.memory_mib is out of range"
    ):
        Autoplace(**{"memory_mib": 1.0} | settings)


def test_the_system_needs_a_bound_and_a_bound_the_system() -> None:
    for changes in ({"autoplace": None}, {"candidate": "graph"}):
        with pytest.raises(CaseError, match="must bound a rank's memory exactly when the system autoplace"):
            replace(CASE, **changes)  # type: ignore[arg-type]


def test_any_system_may_run_a_case_that_states_its_plan() -> None:
    assert replace(with_plan(CASE, PLAN), candidate="graph").candidate == "graph"


@pytest.mark.parametrize("changes", [{"memory": Memory(policy="full")}, {"chunking": Chunking(dim="seq", modules="*")}])
def test_chunks_and_memory_policies_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CaseError, match="asks the system autoplace for what it does not do"):
        replace(CASE, **changes)
