"""A small case, and recordings of it made by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from bitproof.harness.case import Case, Chunking, Parallelism
from bitproof.harness.records import Key, Manifest, Record, Recording

NAMES = (
    ("optimizer", "layers.0.w.exp_avg"),
    ("param", "layers.0.w"),
    ("buffer", "layers.0.moe.expert_bias@after_optimizer"),
    ("buffer", "layers.0.moe.tokens_per_expert@before_optimizer"),
    ("grad", "layers.0.w"),
    ("grad", "layers.0.b"),
    ("loss", "loss"),
)


@pytest.fixture
def case() -> Case:
    return Case(
        name="tiny",
        family="hand_made",
        chunking=Chunking(dim="seq", modules="layers.*"),
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )


@pytest.fixture
def record(case: Case) -> Callable[[], Recording]:
    """A whole recording of the case; the kinds are recorded in an order that no step computes in."""

    def make() -> Recording:
        keys = [
            Key(step, kind, name, rank)
            for rank in range(case.parallelism.world_size)
            for step in range(case.steps)
            for kind, name in NAMES
        ]
        return Recording(
            manifest=Manifest(
                case=case.to_dict(), system="toy", steps=case.steps, world_size=case.parallelism.world_size
            ),
            records={key: Record(hashlib.md5(repr(key).encode()).hexdigest(), "float32", (4, 8)) for key in keys},
        )

    return make


@pytest.fixture
def flip() -> Callable[..., Key]:
    """Change one bit of one digest, and return its key."""

    def change(recording: Recording, step: int, kind: str, name: str, rank: int) -> Key:
        key = Key(step, kind, name, rank)
        record = recording.records[key]
        recording.records[key] = record._replace(digest=f"{int(record.digest, 16) ^ 1:032x}")
        return key

    return change
