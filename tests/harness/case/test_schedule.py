from __future__ import annotations

import pytest

from bitproof.harness.case import Batch, Case, Chunking, Model, Parallelism, Schedule, stage_of_layer
from bitproof.harness.errors import CaseError

PIPELINE = {
    "name": "mine",
    "family": "test",
    "reference": "eager",
    "parallelism": Parallelism(world_size=4, ep=2, pp=2),
    "batch": Batch(sequences=8),
    "schedule": Schedule(),
}


def test_a_pipeline_says_how_many_stages_and_micro_batches_there_are_and_what_each_counts_for():
    case = Case(**PIPELINE)
    assert (case.stages, case.micro_batches, case.gradient_seed) == (2, 4, 1 / 8)
    assert (case.parallelism.stage_ranks, case.parallelism.data_ranks, case.parallelism.expert_fsdp) == (2, 2, 1)
    assert Case.from_dict(case.to_dict()) == case
    plain = Case(name="mine", family="test", reference="eager")
    assert (plain.stages, plain.micro_batches, plain.gradient_seed) == (1, 1, 1 / 8)


@pytest.mark.parametrize("order", ["zbv", "dual_pipe_v"])
def test_a_v_takes_as_many_micro_batches_as_stages_in_any_number(order):
    for rows in (4, 5):
        schedule = Schedule(order=order, stages_per_rank=2, micro_batches=rows)
        assert Case(**PIPELINE | {"schedule": schedule, "batch": Batch(sequences=rows)}).stages == 4


def test_earlier_stages_have_a_layer_more_where_layers_do_not_divide():
    assert [stage_of_layer(layer, 5, 2) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert [stage_of_layer(layer, 4, 4) for layer in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"schedule": None}, "has a pipeline and does not say what goes through it"),
        ({"model": Model(layers=1, dense_layers=0)}, "model.layers of at least 2, one for each stage"),
        ({"batch": Batch(sequences=6)}, "cannot be cut into micro-batches of equal size"),
        ({"batch": Batch(sequences=4), "chunking": Chunking(dim="batch", modules="layers.*")}, "a multiple of 8: 4"),
        ({"schedule": Schedule(micro_batches=1)}, "too few micro-batches to fill its pipeline"),
        ({"schedule": Schedule(stages_per_rank=2, order="gpipe")}, "several stages in a way that has no order"),
        ({"schedule": Schedule(stages_per_rank=2, micro_batches=3), "batch": Batch(sequences=6)}, "multiple of it as"),
        ({"schedule": Schedule(order="zbv")}, "expected: stages_per_rank=2 and parallelism.pp > 1 with order='zbv'"),
        ({"schedule": Schedule(order="dual_pipe_v", stages_per_rank=3, micro_batches=8)}, "asks for a V, which has"),
        (
            {"schedule": Schedule(order="zbv", stages_per_rank=2), "parallelism": Parallelism(world_size=4, ep=2)},
            "found: stages_per_rank=2, parallelism.pp=1",
        ),
        (
            {"schedule": Schedule(order="dual_pipe_v", stages_per_rank=2, micro_batches=2)},
            "expected: schedule.micro_batches of at least 4, one for each stage of the pipeline",
        ),
        (
            {
                "schedule": Schedule(reductions_once=True),
                "chunking": Chunking(dim="batch", modules="layers.*"),
                "batch": Batch(sequences=16),
            },
            "reduces gradients once a step, and those of each chunk separately",
        ),
        ({"candidate": "joint"}, "found: the system joint"),
        ({"candidate": "precompiled"}, "is cut into stages when the case runs"),
        ({"observe": ("layers.*",)}, "found: observe"),
        ({"grad_norm": True}, "found: grad_norm"),
    ],
)
def test_what_a_step_in_micro_batches_does_not_do_is_refused_by_name(changes, reported):
    with pytest.raises(CaseError) as error:
        Case(**PIPELINE | changes)
    assert reported in str(error.value)


def test_orders_that_are_unknown_and_pipelines_that_do_not_divide_the_ranks_are_refused():
    for make in (
        lambda: Schedule(order="zigzag"),
        lambda: Schedule(micro_batches=0),
        lambda: Parallelism(world_size=8, pp=3),
        lambda: Parallelism(world_size=8, pp=4, ep=4),
        lambda: Parallelism(world_size=8, pp=4, ep=1, tp=4),
    ):
        with pytest.raises(CaseError):
            make()
    assert Schedule(micro_batches=1).micro_batches == 1
