from dataclasses import replace

import pytest
import torch
from torch import nn

from bitproof.harness.case import Batch, Case, Chunking, Model, Parallelism
from bitproof.reference.data import DOCUMENT_START, Step
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import StepInputs, loss_and_gradients, make_eager, mean_loss
from tests.ranks import on_ranks

TWO = Parallelism(world_size=2, ep=2)
CASE = Case(
    name="small",
    family="test",
    parallelism=TWO,
    batch=Batch(sequences=2, seq_len=16),
    chunking=Chunking(dim="batch", modules="layers.*"),
)
CPU = torch.device("cpu")


class Taking(nn.Module):
    """Notes the masks that it is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, tokens_BS, positions_BS, attention_masks=None):
        self.given.append(attention_masks)
        return torch.zeros(*tokens_BS.shape, 300)


def test_a_model_that_attends_with_flex_gets_a_mask_that_keeps_documents_apart():
    model = Taking()
    tokens_BS = torch.tensor([[7, DOCUMENT_START, 8, 9], [DOCUMENT_START, 7, 7, DOCUMENT_START]])
    inputs = Step(tokens_BS, tokens_BS, tokens_BS)
    assert mean_loss(model, Model(), inputs) == mean_loss(model, Model(attention="flex"), inputs)
    assert model.given[0] is None
    [documents_BS] = model.given[1].mask_mod.captured
    assert documents_BS.tolist() == [[0, 1, 1, 1], [1, 1, 1, 2]]
    assert model.given[1].shape == (2, 1, 4, 4)


def test_a_folded_model_gets_the_offset_of_each_tokens_document():
    model, tokens_T = Taking(), torch.tensor([7, DOCUMENT_START, 8, 9])
    loss = mean_loss(model, Model(attention="flex", folded=True), Step(tokens_T, tokens_T, torch.tensor([0, 0, 1, 2])))
    assert loss == torch.tensor(300.0).log()
    assert model.given[0].tolist() == [0, 1, 1, 1]


def test_a_model_with_its_loss_in_pieces_gets_the_labels_and_their_number_and_returns_the_loss():
    class Losing(nn.Module):
        def forward(self, tokens_BS, positions_BS, attention_masks, labels_BS, loss_pieces):
            return labels_BS.sum() * loss_pieces

    inputs = Step(torch.zeros(1, 4), torch.arange(4), torch.zeros(1, 4))
    assert mean_loss(Losing(), Model(loss_pieces=2), inputs) == 12
    assert mean_loss(Taking(), Model(loss_pieces=1), inputs._replace(tokens_BS=torch.zeros(1, 4).long())).dim() == 0


@pytest.mark.ranks
def test_a_step_is_observed_in_the_order_it_is_computed():
    def body(mesh):
        trainer = make_eager(CASE, mesh, CPU, False, lambda gradients: gradients)
        seen: list[list[str]] = []
        trainer.step(0, lambda kind, name, value: seen.append([kind, name]))
        return seen

    seen = on_ranks(TWO, body)[0]
    kinds = [kind if kind != "buffer" else name.split("@")[1] for kind, name in seen]
    order = list(dict.fromkeys(kinds))
    assert order == ["loss", "grad", "before_optimizer", "param", "optimizer", "after_optimizer"]
    assert kinds.count("grad") == kinds.count("param") == kinds.count("optimizer") / 3
    assert [name for kind, name in seen if kind == "buffer"][:2] == [
        "layers.1.moe.expert_bias@before_optimizer",
        "layers.1.moe.tokens_per_expert@before_optimizer",
    ]


@pytest.mark.ranks
def test_token_counts_are_seen_before_the_optimizer_and_zero_after_it():
    def body(mesh):
        trainer = make_eager(CASE, mesh, CPU, True, lambda gradients: gradients)
        seen = {}
        trainer.step(0, lambda kind, name, value: seen.__setitem__(name, value.sum().item()))
        return [seen[f"layers.1.moe.tokens_per_expert@{when}"] for when in ("before_optimizer", "after_optimizer")]

    assert on_ranks(TWO, body) == [[2 * 16 * 3, 0]] * 2


@pytest.mark.ranks
def test_a_step_in_chunks_shows_how_often_each_module_ran_and_a_whole_one_shows_nothing():
    def body(mesh):
        trainers = [make_eager(CASE, mesh, CPU, chunked, lambda gradients: gradients) for chunked in (True, False)]
        for trainer in trainers:
            trainer.step(0, lambda kind, name, value: None)
        return [trainer.chunked for trainer in trainers]

    assert on_ranks(TWO, body) == [[{f"layers.{layer}": 1 for layer in range(3)}, None]] * 2


@pytest.mark.ranks
def test_gradients_can_be_tampered_with_before_they_are_observed():
    def body(mesh):
        def zeroed(gradients):
            def compute(inputs):
                loss, values = gradients(inputs)
                return loss, {name: torch.zeros_like(value) for name, value in values.items()}

            return compute

        trainer = make_eager(CASE, mesh, CPU, False, zeroed)
        seen = []
        trainer.step(0, lambda kind, name, value: kind == "grad" and seen.append(value.abs().max().item()))
        return max(seen)

    assert on_ranks(TWO, body) == [0.0, 0.0]


@pytest.mark.ranks
def test_the_manifest_names_the_text():
    def body(mesh: Mesh):
        return make_eager(CASE, mesh, CPU, False, lambda gradients: gradients).manifest()

    first, second = on_ranks(TWO, body)
    assert first == second and len(first["data_sha256"]) == 64


@pytest.mark.ranks
def test_all_tensor_ranks_of_one_data_coordinate_read_one_text():
    parallelism = Parallelism(world_size=4, ep=1, tp=2)
    case = replace(CASE, model=Model(family="llama3"), parallelism=parallelism, reference="eager", chunking=None)

    def body(mesh: Mesh):
        return make_eager(case, mesh, CPU, False, lambda gradients: gradients).data.step(0).tokens_BS.tolist()

    first, second, third, fourth = on_ranks(parallelism, body)
    assert first == second != third == fourth


def test_gradients_start_from_one_over_the_ranks_that_read_different_text():
    model = nn.Embedding(257, 257)
    tokens_BS = torch.zeros(1, 4, dtype=torch.int64)
    inputs = StepInputs(tokens_BS, tokens_BS, tokens_BS)

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = model

        def forward(self, tokens_BS, positions_BS, attention_masks):
            return self.table(tokens_BS)

    _, whole = loss_and_gradients(Scores(), Model(), inputs, 1)
    _, quarter = loss_and_gradients(Scores(), Model(), inputs, 1 / 4)
    assert torch.equal(quarter["table.weight"], whole["table.weight"] / 4)
