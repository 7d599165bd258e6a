"""What shrinking asks of a process that loads models: sizes of a model, and a file of two systems' code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases.chunking import moe_batch
from bitproof.builtin_cases.tp_ep import tp_ep_shared
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.shrink.in_stage import model_sizes, write_file


def test_a_model_says_all_of_its_sizes_whatever_the_case_states() -> None:
    sizes = model_sizes(replace(tp_ep_shared, model=replace(tp_ep_shared.model, layers=1)))
    assert (sizes["layers"], sizes["experts"]) == (1, 8)


def test_a_system_whose_code_is_no_graph_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as refusal:
        write_file(replace(moe_batch, reference="mine:factory"), [], 0, "")
    assert refusal.value.what == "system mine:factory is not known as a graph"
