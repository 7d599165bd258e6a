from __future__ import annotations

import pytest

from bitproof.builtin_cases.pipelines import pipeline_interleaved, pipeline_zbv
from bitproof.harness.case import StageMap


@pytest.mark.parametrize(
    ("stage_map", "ranks"),
    [
        (StageMap(), [0]),
        (StageMap(3), [0, 1, 2]),
        (StageMap(2, 3), [0, 1, 0, 1, 0, 1]),
        (StageMap(2, 2, is_v=True), [0, 1, 1, 0]),
        (StageMap(3, 3, is_v=True), [0, 1, 2, 2, 1, 0, 0, 1, 2]),
    ],
)
def test_stages_are_on_ranks_in_laps_and_in_a_v_every_second_lap_goes_back(stage_map, ranks):
    assert [stage_map.rank_of(stage) for stage in range(stage_map.num_stages)] == ranks
    for rank in range(stage_map.num_ranks):
        assert stage_map.stages_of(rank) == [stage for stage, own in enumerate(ranks) if own == rank]


def test_a_v_has_the_first_and_the_last_stage_on_one_rank_and_a_loop_has_not():
    found = [[case.stage_map.rank_of(stage) for stage in (0, 3)] for case in (pipeline_zbv, pipeline_interleaved)]
    assert found == [[0, 0], [0, 1]]
