from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases.pipelines import pipeline_1f1b, pipeline_interleaved
from bitproof.harness.errors import CaseError
from bitproof.reference.data import Step
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.pipeline_stages import (
    StageModule,
    keep_stages,
    mean_of_losses,
    micro_batches_of,
    stage_of,
    stages_of,
)


def model_of(case):
    torch.manual_seed(0)
    return build_model(case.model)


def test_the_stages_of_all_ranks_are_the_model_under_its_own_names():
    case = pipeline_interleaved
    whole = {name: tuple(x.shape) for name, x in model_of(case).state_dict().items()}
    found = {}
    for rank in (0, 4):
        own = stages_of(case, Mesh(rank, case.parallelism))
        assert list(own) == [rank // 4, rank // 4 + 2]
        model = model_of(case)
        keep_stages(model, own, case.stages)
        names = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        assert {stage_of(name, 4, case.stages) for name in names} == set(own)
        assert not found.keys() & names.keys()
        found |= names
    assert found == whole


def test_stages_one_after_the_other_compute_what_the_model_does():
    case = pipeline_interleaved
    model = model_of(case)
    tokens, positions = torch.randint(0, 256, (2, 8)), torch.arange(8).repeat(2, 1)
    expected = model(tokens, positions)
    keep_stages(model, range(4), 4)
    x = tokens
    for stage in range(4):
        x = StageModule(model, stage, 4)(x, positions_BS=positions)
    assert torch.equal(x, expected)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(CaseError, match="one for each stage"):
        replace(pipeline_1f1b, model=replace(pipeline_1f1b.model, layers=1, dense_layers=1))
    model = model_of(pipeline_1f1b)  # a module that no case states is refused where it is cut
    with pytest.raises(CaseError, match=f"{model.num_layers + 1} layers or more"):
        keep_stages(model, [0], model.num_layers + 1)


def test_micro_batches_are_consecutive_rows_and_their_losses_are_added_in_their_order():
    rows = torch.arange(8).view(4, 2)
    parts = micro_batches_of(Step(rows, rows + 1, rows + 2), 2)
    assert [part.tokens_BS.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    losses = [torch.tensor(x) for x in (1e8, 1.0, -1e8, 1.0)]
    assert mean_of_losses(losses).item() == 0.25
