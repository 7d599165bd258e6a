"""Results and a report made by hand: one of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitproof.harness.case import Case, Chunking, Parallelism
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.baselines.report import finding_of
from bitproof.harness.records import (
    BlamedCall,
    CaseResult,
    CaseSeconds,
    ChainLink,
    Closeness,
    Divergence,
    Drift,
    Key,
    OtherCause,
    PassReport,
    Report,
    Sample,
    TensorDifference,
    Verdict,
    Verification,
)
from bitproof.harness.report.status import exit_status

COMPARED = {"loss": 160, "grad": 320, "param": 320, "buffer": 80, "optimizer": 640}
LOSS = (10.5).hex()
CLOSENESS = Closeness(
    bound=0.01,
    largest_error=0.00312,
    largest=Key(1, "grad", "layers.1.moe.gate|w", 3),
    tensors_beyond=0,
    histogram={kind: {"0": 990, "1": 7, "3-4": 3} if kind == "grad" else {"0": 1000} for kind in COMPARED},
)


DRIFT = Drift(
    kind="grad",
    name="layers.1.moe.gate|w",
    step=1,
    rank=3,
    records=4,
    measured=2,
    elements_differing=5,
    elements=128,
    max_ulp=3,
    reference_bits="0x3f80",
    candidate_bits="0x3f83",
    reference_type="bfloat16[64]",
    candidate_type="bfloat16[64]",
    histogram={"1": 4, "3-4": 1},
)


@pytest.fixture
def make_baseline() -> Callable[..., BaselineResult]:
    def make(status: str = "EQUAL", **facts: Any) -> BaselineResult:
        has_drift = status == "DRIFTED" or "reasons" in facts
        values = {
            "status": BaselineStatus(status),
            "path": None if status == "NO BASELINE" else "baselines/moe_seq/graph/cpu-torch2.13.0-1a2b3c4d",
            "compared": 1520 if status in ("EQUAL", "DRIFTED") else 0,
            "mismatched": 4 if has_drift else 0,
            "tensors_drifted": 1 if has_drift else 0,
            "drift": [DRIFT] if has_drift else [],
        }
        return BaselineResult(**values | facts)

    return make


@pytest.fixture
def make_result() -> Callable[..., CaseResult]:
    def make(name: str = "moe_seq", verdict: str = "EQUAL", **facts: Any) -> CaseResult:
        expected, steps, world_size = facts.pop("expected", "EQUAL"), facts.get("steps", 20), facts.get("world_size", 8)
        places = steps * world_size
        case = Case(
            name=name,
            family="chunking",
            chunking=Chunking(dim="seq", modules="layers.*.moe"),
            expected=expected,
            differs=("grad", "param") if expected == "DIFFERENT" else (),
            close_within=0.01 if expected == "CLOSE" else None,
            steps=steps,
            parallelism=Parallelism(world_size=world_size, ep=1 if world_size % 2 else 2),
        )
        if verdict == "DIFFERENT":
            facts = {
                "mismatched": {"loss": 0, "grad": 3, "param": 2, "buffer": 0, "optimizer": 0},
                "differing_kinds": ("grad", "param"),
                "first_divergence": Divergence(
                    step=0,
                    rank=min(3, world_size - 1),
                    kind="grad",
                    name="layers.1.moe.gate|w",
                    tensor=TensorDifference(max_ulp=1),
                ),
                **facts,
            }
        if verdict == "CLOSE":
            facts = {
                "mismatched": {"loss": 0, "grad": 3, "param": 2, "buffer": 0, "optimizer": 0},
                "differing_kinds": ("grad", "param"),
                "first_divergence": Divergence(step=0, rank=3, kind="grad", name="layers.1.moe.gate|w"),
                "closeness": CLOSENESS,
                **facts,
            }
        if baseline := facts.pop("baseline", None):
            systems = {"reference": case.reference, "candidate": case.candidate}
            facts["checks"] = {"baseline": finding_of(baseline, systems)}
        values = {
            "steps": steps,
            "world_size": world_size,
            "device": "cpu",
            "backend": "gloo",
            "compared": {kind: places * count // 160 for kind, count in COMPARED.items()},
            "control": {"reference": "EQUAL", "candidate": "EQUAL"},
            "losses": {"reference": [LOSS] * steps, "candidate": [LOSS] * steps},
            "seconds": CaseSeconds(trace=2.0, passes={"chunk": 0.5}, reference=1.25),
            "passes": [PassReport("chunk", seconds=0.5, nodes_before=10, nodes_after=20)],
            "memory": {"reference": None, "candidate": 12.5},
            **facts,
        }
        return CaseResult(case=case, verdict=Verdict(verdict), **values)

    return make


@pytest.fixture
def localized(make_result) -> CaseResult:
    """A case that differs, with everything that a search for the cause finds out."""
    return make_result(
        "bad",
        "DIFFERENT",
        steps=3,
        losses={"reference": ["0x1p+3", "0x1p+2", "0x1p+1"], "candidate": ["0x1p+3", "0x1.8p+2", "0x1p+1"]},
        differing={
            "grad": {"layers.1.moe.gate|w": {"0": [3], "1": [0, 1, 2, 3, 4, 5, 6, 7]}},
            "param": {"layers.1.moe.gate|w": {"1": [0, 1, 3]}},
        },
        mismatched={"loss": 0, "grad": 9, "param": 3, "buffer": 0, "optimizer": 0},
        logs=["logs/bad/eager_chunked/rank0.log", "logs/bad/graph/rank0.log", "logs/bad/graph/rank0.control.log"],
        first_divergence=Divergence(
            step=0,
            rank=3,
            kind="grad",
            name="layers.1.moe.gate|w",
            tensor=TensorDifference(
                elements_differing=2,
                elements=1000,
                max_ulp=4,
                reference_bits="0x3f80",
                candidate_bits="0x3f84",
                reference_type="bfloat16[10, 100]",
                candidate_type="bfloat16[10, 100]",
                histogram={"0": 998, "1": 1, "3-4": 1},
                samples=[Sample([0, 7], "0x3f80", "0x3f84"), Sample([9, 99], "0x4000", "0x4001")],
            ),
            call=BlamedCall(
                operator="gate<b>",
                how="has the same inputs and a different output",
                module="layers.1.moe",
                direction="backward",
                chunk=1,
                source="moe.py:68",
                rank=3,
                ranks="3, 5",
                output=TensorDifference(
                    elements_differing=1,
                    elements=8,
                    max_ulp=1,
                    histogram={"0": 7, "1": 1},
                    samples=[Sample([5], "0xbf80", "0xbf81")],
                ),
                micro_batch=2,
                part="<b>",
                expected="eps=1e-05 | <b>",
                found="eps=0.001 | <i>",
                verification=Verification(
                    status="in part",
                    tensors=1200,
                    differing=8,
                    remaining=1,
                    accounts=4,
                    reverse=False,
                    reason="no call <b> explains | what still differs",
                    calls=["gate<b> of layers.1.moe (forward) on ranks 3, 5"],
                    calls_left_out=2,
                    causes=[
                        OtherCause(
                            call="mm of layers.0 (forward) on rank 0 | <i>",
                            accounts=3,
                            operator="mm<i>",
                            module="layers.0",
                            direction="forward",
                            rank=1,
                        )
                    ],
                    runs=3,
                ),
                chain=[
                    ChainLink(
                        operator="gate<b>", module="layers.1.moe", direction="backward", chunk=1, rank=3, micro_batch=2
                    ),
                    ChainLink(
                        operator="all_reduce", direction="backward", rank=3, source="moe.py:70", left_out=4, part="|"
                    ),
                    ChainLink(
                        operator="all_reduce",
                        direction="backward",
                        rank=0,
                        source="moe.py:70",
                        elements_differing=3,
                        elements=8,
                        max_ulp=2,
                    ),
                ],
            ),
        ),
    )


@pytest.fixture
def make_report() -> Callable[..., Report]:
    def make(*results: CaseResult, **facts: Any) -> Report:
        environment = {"torch": "2.13.0", "device": "cpu", "backend": "gloo"}
        values = {"run_id": "20260102T030405Z-abcdef", "environment": environment, **facts}
        return Report(exit_status=exit_status(results, faults=facts.get("faults")), cases=list(results), **values)

    return make


@pytest.fixture
def report(make_report, make_result) -> Report:
    """One case as expected, one that differs, one that differs as it should, one error, one unverified."""
    hostile = "Traceback ``` </details> ]]> \x1b[31m \x00 \ud800 \ufffe <b>&amp;"
    return make_report(
        make_result("good"),
        make_result("bad", "DIFFERENT"),
        make_result("meant", "DIFFERENT", expected="DIFFERENT"),
        make_result("broken", "ERROR", error=hostile, losses={"reference": [], "candidate": []}),
        make_result("lost", "UNVERIFIED", error="the candidate recording is empty"),
        options=("--steps", "2"),
    )
