from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases import pipelines
from bitproof.harness.case import Parallelism, Schedule
from bitproof.harness.errors import CaseError
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.tied_stages import EMBEDDINGS, PROJECTION, JoinTied, copies_of, share_parameters
from tests.ranks import on_ranks

CASE = pipelines.pipeline_tied
SHARED = replace(CASE, schedule=Schedule(shared=("layers.0.attention", "layers.2.attention")))

# float32 has no 1 beside 1e8: the order of the sum shows.
FIRST, LAST = torch.tensor([1e8, 0.1]), torch.tensor([1.0, 0.2])


def test_a_rank_with_both_copies_adds_their_gradients_and_leaves_others():
    other = torch.ones(1)
    joined = JoinTied(CASE, Mesh(0, Parallelism(ep=1)), [EMBEDDINGS, PROJECTION], 4, False)(
        {PROJECTION: LAST, "norm.weight": other, EMBEDDINGS: FIRST}
    )
    assert joined["norm.weight"] is other
    assert all(torch.equal(joined[name], FIRST + LAST) for name in (EMBEDDINGS, PROJECTION))


@pytest.mark.ranks
def test_the_first_stage_and_the_last_get_the_sum_of_both_and_those_between_nothing():
    def body(mesh):
        own = ({EMBEDDINGS: FIRST}, {"norm.weight": FIRST}, {PROJECTION: LAST})[mesh.coordinate("pp")]
        return {name: x.tolist() for name, x in JoinTied(case, mesh, own, 4, True)(own).items()}

    total = (FIRST + LAST).tolist()
    case = replace(CASE, parallelism=Parallelism(world_size=3, ep=1, pp=3))
    expected = [{EMBEDDINGS: total}, {"norm.weight": FIRST.tolist()}, {PROJECTION: total}]
    assert on_ranks(case.parallelism, body) == expected


@pytest.mark.ranks
def test_the_stages_of_two_modules_with_one_parameter_both_add_the_first_modules_gradient_first():
    first, second = "layers.0.attention.wo.weight", "layers.2.attention.wo.weight"

    def body(mesh):
        own = ({first: FIRST}, {second: LAST})[mesh.coordinate("pp")]
        return {name: x.tolist() for name, x in JoinTied(SHARED, mesh, own, 4, True)(own).items()}

    total = (FIRST + LAST).tolist()
    assert on_ranks(Parallelism(world_size=2, ep=1, pp=2), body) == [{first: total}, {second: total}]


def test_a_second_copy_has_the_values_of_the_first_and_as_one_object_is_the_first():
    with torch.device("meta"):
        model = build_model(SHARED.model)
    names = [name for name, _ in model.named_parameters()]
    copies = copies_of(SHARED, names)
    assert copies["layers.2.attention.wo.weight"] == "layers.0.attention.wo.weight"
    assert set(copies) == {name for name in names if name.startswith("layers.2.attention.")}
    share_parameters(model, SHARED)
    assert {name for name, _ in model.named_parameters()} == set(names) - set(copies)
    assert model.layers[2].attention.wo.weight is model.layers[0].attention.wo.weight


@pytest.mark.parametrize(
    ("shared", "what"),
    [
        (("layers.0.attention", "layers.9.attention"), "names a shared module that the model does not have"),
        (("layers.0.attention", "layers.1.attention"), "shares parameters that lie in no two stages"),
        (("layers.2.attention", "layers.0.attention"), "shares parameters that lie in no two stages"),
        (("layers.0.attention", "layers.2.moe"), "shares the parameters of modules of another form"),
    ],
)
def test_what_two_stages_cannot_share_is_refused_by_name(shared, what):
    with torch.device("meta"):
        model = build_model(SHARED.model)
    with pytest.raises(CaseError, match=what):
        share_parameters(model, replace(SHARED, schedule=Schedule(shared=shared)))
