"""A split layer computes what the whole one does, up to rounding; replicated parameters agree bit for bit."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from torch import nn

from bitproof.harness.case import Batch, Case, Model, Parallelism, Precision
from bitproof.harness.errors import CaseError
from bitproof.reference.data import TextStream, text_source
from bitproof.reference.init import initial_values, initialize
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import TENSOR, Mesh
from bitproof.reference.parallel.sequence import GatherInput, ScatterOutput
from bitproof.reference.parallel.tensor import SumGradient, SumOutput, split_layers
from bitproof.reference.step import make_eager, mean_loss
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def steps(parallelism: Parallelism) -> list[dict]:
    """On every rank: the losses of three steps of Llama 3 in float32, and a hash of every gradient's bits."""
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
                seen["gradients"][f"{name}, step {len(seen['losses'])}"] = sha256(value.numpy()).hexdigest()

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
def test_ranks_that_divide_the_sequence_compute_the_same_bits_but_for_the_norms_whose_gradients_they_add(
    two_by_two: list[dict],
) -> None:
    divided = steps(Parallelism(world_size=4, ep=1, tp=2, sequence=True))
    for whole, part in zip(two_by_two, divided, strict=True):
        assert part["losses"][0] == whole["losses"][0], "sums in rank order, and norms of single tokens"
        first = [name for name in whole["gradients"] if name.endswith("step 1")]
        other = {name for name in first if part["gradients"][name] != whole["gradients"][name]}
        assert other == {name for name in first if "norm" in name}, "two sums of half the tokens, then their sum"
    assert divided[0]["gradients"]["norm.weight, step 1"] == divided[1]["gradients"]["norm.weight, step 1"]


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
def test_where_the_sequence_is_divided_a_split_layer_gathers_its_input_and_scatters_its_output() -> None:
    def body(mesh: Mesh) -> list:
        x = torch.tensor([[[1.0], [2.0]]]) + 2 * mesh.rank  # a row of four tokens, two on each rank
        x.requires_grad_()
        entered = GatherInput.apply(x, 2, TENSOR)
        left = ScatterOutput.apply(entered * (mesh.rank + 1.0), 2, TENSOR)
        (gradient,) = torch.autograd.grad(left, x, torch.full((1, 2, 1), 0.5))
        return [y.flatten().tolist() for y in (entered, left, gradient)]

    # Ranks add 1 and 2 times each token, and each keeps its own; backward as without.
    tokens, gradient = [1.0, 2.0, 3.0, 4.0], [1.5, 1.5]
    expected = [[tokens, [3.0, 6.0], gradient], [tokens, [9.0, 12.0], gradient]]
    assert on_ranks(Parallelism(world_size=2, ep=1, tp=2), body) == expected


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


TOKENS = 128


def test_without_tensor_parallelism_a_model_stays_as_it_is() -> None:
    model = tiny("deepseek_v3")
    classes = [type(module) for module in model.modules()]
    assert split_layers(model, Mesh(0, Parallelism()), TOKENS) == {}
    assert [type(module) for module in model.modules()] == classes


def test_weights_into_a_layer_are_split_by_output_and_weights_out_of_it_by_input() -> None:
    dims = split_layers(tiny("llama3"), Mesh(0, Parallelism(ep=1, tp=2)), TOKENS)
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


def test_latents_and_routers_stay_whole_and_routed_experts_are_left_to_the_expert_group() -> None:
    dims = split_layers(tiny("deepseek_v3"), Mesh(0, Parallelism(ep=4, tp=2)), TOKENS)
    assert {name: dim for name, dim in dims.items() if name.startswith("layers.1.")} == {
        "layers.1.attention.wq.weight": 0,
        "layers.1.attention.wkv_a.weight": None,
        "layers.1.attention.kv_norm.weight": None,
        "layers.1.attention.wkv_b.weight": 0,
        "layers.1.attention.wo.weight": 1,
        "layers.1.moe.router.weight": None,
        "layers.1.moe.shared_experts.w1.weight": 0,
        "layers.1.moe.shared_experts.w3.weight": 0,
        "layers.1.moe.shared_experts.w2.weight": 1,
    }


def test_every_parameter_within_a_block_is_a_norms_a_routed_experts_or_one_that_splitting_knows() -> None:
    with torch.device("meta"):
        with_query_latent = build_model(Model(flavor="671B", layers=4))
    for model in (with_query_latent, tiny("qwen3_moe"), tiny("llama3")):
        dims = split_layers(model, Mesh(0, Parallelism(ep=1, tp=2)), TOKENS)
        left = {name for name, _ in model.get_submodule("layers").named_parameters()} - {
            name.removeprefix("layers.") for name in dims
        }
        assert {name.split(".", 1)[1] for name in left} <= {
            "attention_norm.weight",
            "ffn_norm.weight",
            *(f"moe.experts.{name}" for name in ("w1", "w2", "w3")),
        }


def refusal(model: nn.Module, tp: int, num_tokens: int = TOKENS) -> str:
    with pytest.raises(CaseError) as error:
        split_layers(model, Mesh(0, Parallelism(ep=1, tp=tp)), num_tokens)
    return str(error.value)


def test_a_layer_of_an_unknown_kind_is_refused() -> None:
    model = tiny("deepseek_v3")
    model.get_submodule("layers.0").attention = nn.Linear(4, 4, device="meta")
    assert refusal(model, 2) == (
        "CaseError: layers.0.attention cannot be split over tensor-parallel ranks\n"
        "  expected: a layer of a known kind: GroupedQueryAttention, LatentAttention, FeedForward, MoE\n"
        "  found: Linear with weight, bias\n"
        "  fix: set tp=1, or choose another model"
    )


def test_a_parameter_that_nobody_knows_how_to_split_is_refused() -> None:
    model = tiny("deepseek_v3")
    model.get_submodule("layers.1.moe.router").bias = nn.Parameter(torch.empty(8, device="meta"))
    assert "found: MoE with router.bias\n" in refusal(model, 2)


def test_more_tensor_ranks_than_key_value_heads_are_refused() -> None:
    assert refusal(tiny("llama3"), 8) == (
        "CaseError: layers.0.attention does not split evenly over tensor-parallel ranks\n"
        "  expected: key/value heads a multiple of tp=8\n"
        "  found: 4 key/value heads\n"
        "  fix: choose a tp that divides them"
    )
    assert len(split_layers(tiny("llama3"), Mesh(0, Parallelism(ep=1, tp=4)), TOKENS)) == 14


def test_tokens_that_ranks_cannot_share_evenly_are_refused() -> None:
    assert refusal(tiny("deepseek_v3"), 2, num_tokens=9) == (
        "CaseError: layers.1.moe does not split evenly over tensor-parallel ranks\n"
        "  expected: tokens a call a multiple of tp=2\n"
        "  found: 9 tokens a call\n"
        "  fix: choose a tp that divides them"
    )
    assert split_layers(tiny("deepseek_v3"), Mesh(0, Parallelism(ep=1, tp=2)), 10)


# -- mixtures of experts ------------------------------------------------------------------------------

BATCH = Batch(sequences=2, seq_len=16)
SIZES = {
    "deepseek_v3": Model(layers=2, dense_layers=1),
    "qwen3_moe": Model(family="qwen3_moe", layers=1),
}


def expert_case(family: str, parallelism: Parallelism) -> Case:
    return Case(
        name="tp_ep",
        family="test",
        reference="eager",
        model=SIZES[family],
        parallelism=parallelism,
        batch=BATCH,
        precision=Precision(compute="float32"),
        grad_norm=True,
    )


def whole_step(case: Case) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The unsharded model's gradients of the mean over all texts, and each text's tokens per expert."""
    model = build_model(case.model)
    initialize(model, case.seed)
    documents, _ = text_source(case.batch.data)
    size = case.parallelism.data_ranks
    [counter] = [x for name, x in model.named_buffers() if name.endswith("tokens_per_expert")]
    counts = []
    for rank in range(size):
        inputs = TextStream(documents, case.batch, rank=rank, world_size=size).step(0)
        (mean_loss(model, case.model, inputs) / size).backward()
        counts.append(counter.clone())
        counter.zero_()
    return {name: p.grad for name, p in model.named_parameters()}, counts


def shard_of(name: str, whole: torch.Tensor, mesh: Mesh, dims: dict[str, int | None]) -> torch.Tensor:
    """The rows of a whole gradient that a rank has, by what the mesh promises."""
    if ".experts." in name:
        whole = whole.chunk(mesh.size("ep"))[mesh.coordinate("ep")]
        return whole.chunk(mesh.size("efsdp"))[mesh.coordinate("efsdp")]
    if (dim := dims.get(name)) is not None:
        whole = whole.chunk(mesh.size("tp"), dim)[mesh.coordinate("tp")]
    return whole.chunk(mesh.size("fsdp"))[mesh.coordinate("fsdp")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "parallelism"),
    [
        ("deepseek_v3", Parallelism(world_size=4, tp=2, ep=4)),  # one expert group over two texts
        ("deepseek_v3", Parallelism(world_size=4, tp=2, ep=4, sequence=True)),
        # two expert groups within one text
        pytest.param("deepseek_v3", Parallelism(world_size=4, tp=4, ep=2), marks=pytest.mark.slow),
        # the expert group is the tensor group; norms over single heads
        ("qwen3_moe", Parallelism(world_size=4, tp=2, ep=2)),
    ],
)
def test_gradients_are_close_to_the_unsharded_models_and_each_token_is_counted_once(
    family: str, parallelism: Parallelism
) -> None:
    case = expert_case(family, parallelism)
    dims = split_layers(build_model(case.model), Mesh(0, case.parallelism), TOKENS)
    gradients, counts = whole_step(case)

    def body(mesh: Mesh) -> dict:
        seen: dict = {}
        trainer = make_eager(case, mesh, CPU, False, lambda gradients: gradients)

        def observe(kind: str, name: str, value: torch.Tensor) -> None:
            if kind in ("grad", "buffer", "grad_norm"):
                seen.setdefault(kind, {})[name] = value.tolist()

        trainer.step(0, observe)
        return {"grad": seen["grad"], "buffer": seen["buffer"], "norm": seen["grad_norm"]["grad_norm"]}

    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()

    for rank, answer in enumerate(on_ranks(case.parallelism, body)):
        mesh = Mesh(rank, case.parallelism)
        assert answer["grad"].keys() == gradients.keys()
        for name, found in answer["grad"].items():
            expected = shard_of(name, gradients[name], mesh, dims)
            error = (torch.tensor(found)[: len(expected)] - expected).norm() / expected.norm()
            assert error < 1e-5, f"{name} on rank {rank}: relative error {error:.1e}"
        assert answer["norm"] == pytest.approx(norm, rel=1e-5), "each element counts once"
        [found] = [x for name, x in answer["buffer"].items() if name.endswith("tokens_per_expert@before_optimizer")]
        assert found == counts[mesh.coordinate("fsdp")].tolist()


def test_a_plan_splits_the_layers_that_it_names_and_leaves_all_others_whole() -> None:
    model = tiny("llama3")
    dims = split_layers(model, Mesh(0, Parallelism(ep=1, tp=2)), TOKENS, ["layers.1.feed_forward"])
    assert sorted(dims) == [f"layers.1.feed_forward.w{n}.weight" for n in (1, 2, 3)]
    assert type(model.get_submodule("layers.1.feed_forward")).__name__ == "SplitFeedForward"
    assert type(model.get_submodule("layers.0.feed_forward")).__name__ == "FeedForward"


def test_a_plan_for_a_layer_that_is_not_there_or_without_its_experts_is_refused() -> None:
    mesh = Mesh(0, Parallelism(ep=4, tp=2))
    with pytest.raises(CaseError, match=r"a plan splits layers that the model does not have"):
        split_layers(tiny("deepseek_v3"), mesh, TOKENS, ["layers.9.attention"])
    with pytest.raises(
        CaseError, match=r"cannot be whole on the ranks[^\n]*\n[^\n]*\n  found: layers.1.moe, layers.2.moe"
    ):
        split_layers(tiny("deepseek_v3"), mesh, TOKENS, ["layers.0.attention"])
    assert split_layers(tiny("deepseek_v3"), mesh, TOKENS, ["layers.1.moe", "layers.2.moe"])
