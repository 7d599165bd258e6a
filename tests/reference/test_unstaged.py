from __future__ import annotations

import torch

from bitproof.builtin_cases.pipelines import pipeline_unstaged
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer
from bitproof.reference.unstaged import eager


def test_a_rank_has_all_of_the_model_and_shows_what_its_own_stages_would(monkeypatch):
    shown = {}
    for rank in (0, 2):
        names = shown[rank] = []
        trainer = eager(pipeline_unstaged, Mesh(rank, pipeline_unstaged.parallelism))
        assert {name.split(".")[1] for name in trainer.parameters if name.startswith("layers.")} == set("0123")

        def step(self, index, observe):
            observe("loss", "loss", torch.zeros(()))
            for name in self.parameters:
                observe("grad", name, self.parameters[name])
            observe("buffer", "layers.3.moe.expert_bias@before_optimizer", torch.zeros(()))

        monkeypatch.setattr(Trainer, "step", step)
        trainer.step(0, lambda kind, name, tensor, names=names: names.append(name))
    assert "loss" in shown[2] and "loss" not in shown[0]
    assert "layers.3.moe.expert_bias@before_optimizer" in shown[2] and "tok_embeddings.weight" in shown[0]
    assert not set(shown[0]) & set(shown[2])
    assert {*shown[0], *shown[2]} > set(trainer.parameters)
