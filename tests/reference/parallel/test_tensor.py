"""A split layer computes what the whole one does, up to rounding; replicated parameters agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.case import Batch, Case, Model, Parallelism, Precision
from harness.errors import CaseError
from reference.init import initial_values
from reference.models import build_model
from reference.parallel.mesh import TENSOR, Mesh
from reference.parallel.tensor import SumGradient, SumOutput, split_layers
from reference.step import make_eager
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def steps(parallelism: Parallelism) -> list[dict]:
    """On every rank: the losses of three steps of Llama 3 in float32, and the bits of every gradient."""
    case = Case(
        name="llama",
        family="test",
        reference="eager",
        model=Model(family="llama3"),
        parallelism=parallelism,
        batch=Batch(sequences=2, seq_len=16),
        precision=Precision(compute="float32"),
    )

    def body(mesh: Mesh) -> dict:
        trainer = make_eager(case, mesh, CPU, False, lambda gradients: gradients)
        seen: dict = {"losses": [], "gradients": {}}

        def observe(kind: str, name: str, value: torch.Tensor) -> None:
            if kind == "loss":
                seen["losses"].append(value.item())
            if kind == "grad":
                seen["gradients"][f"{name}, step {len(seen['losses'])}"] = value.tolist()

        for index in range(3):
            trainer.step(index, observe)
        return seen

    return on_ranks(parallelism, body)


@pytest.fixture(scope="module")
def two_by_two() -> list[dict]:
    return steps(Parallelism(world_size=4, ep=1, tp=2))


@pytest.mark.ranks
def test_losses_are_close_to_those_of_whole_layers(two_by_two: list[dict]) -> None:
    whole = [answer["losses"] for answer in steps(Parallelism(world_size=2, ep=1))]
    assert whole[0] != whole[1], "two data ranks read different text"
    split = [answer["losses"] for answer in two_by_two]
    assert split[0] == split[1] == pytest.approx(whole[0], rel=1e-5)
    assert split[2] == split[3] == pytest.approx(whole[1], rel=1e-5)


@pytest.mark.ranks
def test_four_tensor_ranks_are_close_to_one() -> None:
    [whole] = steps(Parallelism(world_size=1, ep=1))
    split = steps(Parallelism(world_size=4, ep=1, tp=4))
    for answer in split:
        assert answer["losses"] == split[0]["losses"] == pytest.approx(whole["losses"], rel=1e-5)


@pytest.mark.ranks
def test_gradients_of_what_is_not_split_agree_bitwise_on_all_tensor_ranks(two_by_two: list[dict]) -> None:
    first, second = two_by_two[0]["gradients"], two_by_two[1]["gradients"]
    differing = {name.split(".weight")[0].split(".")[-1] for name in first if first[name] != second[name]}
    assert differing == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert {name for name in first if "norm" in name or "tok_embeddings" in name or "output" in name}


@pytest.mark.ranks
def test_a_split_starts_from_the_whole_parameters_values() -> None:
    case = Case(
        name="llama", family="test", reference="eager", model=Model(family="llama3"), parallelism=Parallelism(ep=1)
    )

    def body(mesh: Mesh) -> list:
        model = make_eager(case, mesh, CPU, False, lambda gradients: gradients).model
        layer = model.get_submodule("layers.1")
        return [layer.attention.wk.weight.tolist(), layer.attention.wo.weight.tolist(), layer.ffn_norm.weight.tolist()]

    answers = on_ranks(Parallelism(world_size=4, ep=1, tp=2), body)
    wk = initial_values("layers.1.attention.wk.weight", (64, 64), 0).bfloat16().tolist()
    wo = initial_values("layers.1.attention.wo.weight", (64, 128), 0).bfloat16().tolist()
    left, right = [row[:64] for row in wo], [row[64:] for row in wo]
    assert answers == [[wk[:32], left, [1.0] * 64], [wk[32:], right, [1.0] * 64]] * 2


@pytest.mark.ranks
def test_each_split_layer_sums_its_output_once_and_its_inputs_gradient_once() -> None:
    def body(mesh: Mesh) -> list:
        x = torch.ones(3, requires_grad=True)
        entered = SumGradient.apply(x, TENSOR)
        left = SumOutput.apply(entered * (mesh.rank + 1.0), TENSOR)
        (gradient,) = torch.autograd.grad(left, x, torch.full((3,), 0.5))
        return [entered.tolist(), left.tolist(), gradient.tolist()]

    # Ranks add 1 and 2 times x; each gets the whole upstream 0.5, and hands on 0.5 * 1 + 0.5 * 2.
    expected = [[1.0] * 3, [3.0] * 3, [1.5] * 3]
    assert on_ranks(Parallelism(world_size=2, ep=1, tp=2), body) == [expected] * 2


def tiny(family: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(Model(family=family))


def test_without_tensor_parallelism_a_model_stays_as_it_is() -> None:
    model = tiny("deepseek_v3")
    classes = [type(module) for module in model.modules()]
    assert split_layers(model, Mesh(0, Parallelism())) == {}
    assert [type(module) for module in model.modules()] == classes


def test_weights_into_a_layer_are_split_by_output_and_weights_out_of_it_by_input() -> None:
    dims = split_layers(tiny("llama3"), Mesh(0, Parallelism(ep=1, tp=2)))
    assert {name: dim for name, dim in dims.items() if name.startswith("layers.1.")} == {
        "layers.1.attention.wq.weight": 0,
        "layers.1.attention.wk.weight": 0,
        "layers.1.attention.wv.weight": 0,
        "layers.1.attention.wo.weight": 1,
        "layers.1.feed_forward.w1.weight": 0,
        "layers.1.feed_forward.w3.weight": 0,
        "layers.1.feed_forward.w2.weight": 1,
    }
    assert len(dims) == 14


def refusal(family: str, tp: int) -> str:
    with pytest.raises(CaseError) as error:
        split_layers(tiny(family), Mesh(0, Parallelism(ep=1, tp=tp)))
    return str(error.value)


def test_attention_of_another_kind_is_refused() -> None:
    assert refusal("deepseek_v3", 2) == (
        "CaseError: layers.0.attention cannot be split over tensor-parallel ranks\n"
        "  expected: grouped-query attention without query and key norms, or a dense feed-forward layer\n"
        "  found: LatentAttention with wq.weight, wkv_a.weight, kv_norm.weight, wkv_b.weight, wo.weight\n"
        "  fix: set tp=1, or choose a dense model such as llama3"
    )


def test_norms_over_single_heads_are_refused_since_each_rank_would_see_its_own_heads_only() -> None:
    assert "found: GroupedQueryAttention with q_norm.weight, k_norm.weight\n" in refusal("qwen3_moe", 2)


def test_more_tensor_ranks_than_key_value_heads_are_refused() -> None:
    assert refusal("llama3", 8) == (
        "CaseError: layers.0.attention does not split evenly over tensor-parallel ranks\n"
        "  expected: key/value heads a multiple of tp=8\n"
        "  found: 4 key/value heads\n"
        "  fix: choose a tp that divides them"
    )
    assert len(split_layers(tiny("llama3"), Mesh(0, Parallelism(ep=1, tp=4)))) == 14


def test_experts_are_refused() -> None:
    model = tiny("qwen3_moe")
    del model.get_submodule("layers.0").attention
    with pytest.raises(CaseError, match=r"layers\.0\.moe cannot be split over tensor-parallel ranks"):
        split_layers(model, Mesh(0, Parallelism(ep=1, tp=2)))
