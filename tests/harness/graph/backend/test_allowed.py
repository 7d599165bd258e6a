"""The operators that a graph from elsewhere may call: all of them exist, and none does more than compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Model
from bitproof.harness.graph import offload_operators  # noqa: F401 (it registers bitproof's own)
from bitproof.harness.graph.backend.allowed import ALLOWED
from bitproof.harness.graph.graph_json import graph_to_json, refuse_operators
from bitproof.harness.systems.graph import prepare
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload, import_tracing


def test_every_name_is_an_operators() -> None:
    import_tracing()
    for name in ALLOWED:
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        assert isinstance(found, (HigherOrderOperator, OpOverload)), name


def test_none_reads_a_file_memory_by_its_address_or_python() -> None:
    strangers = ("from_file", "as_strided", "set_", "empty", "_from_dlpack", "inductor", "print", "wrap", "triton")
    assert not [name for name in ALLOWED for word in strangers if word in name]
    assert {name.partition(".")[0] for name in ALLOWED} == {"aten", "_c10d_functional", "bitproof", "higher_order"}


@pytest.mark.slow
@pytest.mark.traces
def test_the_steps_of_larger_models_call_none_that_is_missing() -> None:
    """Heads of unequal sizes, as DeepSeek-V3's own are, have attention written out on a CPU."""
    model = Model(flavor="debugmodel", layers=2, dense_layers=1)
    case, cpu = replace(CASES["moe_seq"], model=model), torch.device("cpu")
    refuse_operators(graph_to_json(prepare(case, cpu).module), ALLOWED)
