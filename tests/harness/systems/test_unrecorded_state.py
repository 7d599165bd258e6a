"""State that a system keeps and shows nobody."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, AdamW

from bitproof.harness.capture.digest import digest
from bitproof.harness.records import Key, Record
from bitproof.harness.systems.unrecorded_state import UnrecordedState


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("fixed", torch.ones(2))
        self.noise = torch.Generator()

    def forward(self, x):
        self.count += 1
        torch.rand(1, generator=self.noise)
        return self.inner(x).sum()


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizers = [AdamW(model.parameters())]

    def step(self):
        self.model(torch.ones(1, 2)).backward()
        self.optimizers[0].step()


def rows(**shown):
    return {Key(0, "buffer", name, 0): Record(digest(value), "float32", (2,)) for name, value in shown.items()}


def test_buffers_generators_and_optimizer_state_that_change_are_reported_and_what_stays_is_not():
    trainer = Trainer(Counting())
    kept = UnrecordedState(trainer)
    assert kept.unshown({}) == []
    trainer.step()
    assert kept.unshown({}) == [
        "buffer count",
        "rng noise",
        *(
            f"optimizer inner.{name}.{state}"
            for name in ("weight", "bias")
            for state in ("step", "exp_avg", "exp_avg_sq")
        ),
    ]


def test_what_a_record_has_by_its_name_or_its_value_is_shown():
    trainer = Trainer(Counting())
    kept = UnrecordedState(trainer)
    trainer.step()
    assert "buffer count" not in kept.unshown(rows(**{"count@before_optimizer": torch.zeros(2)}))
    assert "buffer count" not in kept.unshown(rows(other=trainer.model.count))
    assert "buffer count" in kept.unshown(rows(other=torch.zeros(2)))


def test_what_a_function_closes_over_is_found_and_so_is_what_a_method_s_object_has():
    trainer = Trainer(Counting())
    model = trainer.model

    def step(index):
        model(torch.ones(1, 2))

    for made in (step, trainer.step):
        kept = UnrecordedState(made)
        model(torch.ones(1, 2))
        assert kept.unshown({})[0] == "buffer count"


def test_an_optimizer_without_state_has_none_to_show():
    model = nn.Linear(2, 2)
    trainer = Trainer(model)
    trainer.optimizers = [SGD(model.parameters(), lr=0.1)]
    kept = UnrecordedState(trainer)
    trainer.optimizers[0].step()
    assert kept.unshown({}) == []
