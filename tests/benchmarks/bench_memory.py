"""What each memory policy leaves alive, by chunking and model: `python tests/benchmarks/bench_memory.py`.

Counted on the finished graphs, nothing runs: the tiny model as the cases have it, and layers of the 671B
model's dims on 8 ranks with 4 sequences of 4,096 tokens. MiB a rank; sizes that depend on routing are
taken as balanced. `held` is what forward hands to backward, `saved` the peak's share less than `none` has.
On a GPU, a run's report.json has the allocator's own peak of both systems under `memory`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked
from bitproof.harness.case import Batch, Case, Memory, Model
from bitproof.harness.systems.graph import prepare
from bitproof.reference import models
from bitproof.reference.models.deepseek_v3 import FLAVORS

NUM_LAYERS = 5
OFFLOAD_GIB = 16.0
POLICIES = ("none", "selective", "full", "offload")
SMALL = (Model(), Batch())
LARGE = (Model(family="bench", flavor="671B"), Batch(sequences=4, seq_len=4096))


def facts_of(case: Case) -> dict[str, Any]:
    """What the passes report of the case's finished graph, all in one."""
    facts: dict[str, Any] = {"recomputed_nodes": 0}
    for entry in prepare(case, torch.device("cpu")).passes:
        facts |= entry["facts"]
    return facts


def rows(model: Model, batch: Batch) -> Iterator[str]:
    """The table of one model, a line at a time."""
    yield f"{model.flavor}, {batch.sequences} x {batch.seq_len} tokens"
    yield f"{'chunking':20}{'policy':11}{'peak':>11}{'saved':>8}{'held':>11}{'recomputed':>12}{'offloaded':>11}"
    for base in (transformer_batch, moe_batch, moe_seq, unchunked):
        whole = 0.0
        for policy in POLICIES:
            memory = Memory(policy=policy, offload_gib=OFFLOAD_GIB)  # type: ignore[arg-type]
            facts = facts_of(replace(base, model=model, batch=batch, memory=memory))
            whole = whole or facts["peak_mib"]
            yield (
                f"{base.name:20}{policy:11}{facts['peak_mib']:11.2f}{1 - facts['peak_mib'] / whole:8.1%}"
                f"{facts['at_backward_mib']:11.2f}{facts['recomputed_nodes']:12}{facts['host_peak_mib']:11.2f}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    flavors = dict(FLAVORS) | {"671B": replace(FLAVORS["671B"], num_layers=NUM_LAYERS)}
    models.FAMILIES["bench"] = models.FAMILIES["deepseek_v3"]._replace(flavors=flavors)
    for shape in (SMALL, LARGE):
        for row in rows(*shape):
            print(row, flush=True)
