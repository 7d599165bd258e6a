"""The settings of optimizers, as a watched trainer's recording states them."""

from types import SimpleNamespace

import numpy
import torch
from torch import nn

from bitproof.harness.records import OPTIMIZERS
from bitproof.harness.systems.optimizer_settings import SettingsLog
from bitproof.harness.systems.watched_step import watch


def trained(steps: int = 3, count: int = 1) -> list[dict]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(index: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model[0](torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    system = watch(step, model=model, optimizer=optimizer)
    for index in range(steps):
        system.step(index, lambda kind, name, tensor: None)
    return system.manifest()[OPTIMIZERS]


def test_every_group_is_stated_once_with_its_parameters_and_later_what_a_schedule_changed() -> None:
    first, second, *later = trained()
    assert (first["optimizer"], first["group"], first["parameters"]) == ("AdamW", "0.0", ["0.weight"])
    assert (first["settings"]["weight_decay"], first["settings"]["lr"]) == ("0.1", "0.25")
    assert first["settings"]["betas"] == "(0.9, 0.999)" and first["settings"]["fused"] == "None"
    assert (second["parameters"], second["settings"]["lr"]) == (["0.bias"], "0.5")
    assert later == [
        {"step": 2, "group": "0.0", "settings": {"lr": "0.125"}},
        {"step": 2, "group": "0.1", "settings": {"lr": "0.25"}},
    ]


def test_a_numbers_type_is_no_difference() -> None:
    def settings(value: object) -> dict:
        log = SettingsLog()
        log.note(0, 0, SimpleNamespace(param_groups=[{"params": [], "decay": value}]), {})
        return log.entries[0]["settings"]

    assert settings(0) == settings(0.0) == settings(numpy.float64(0)) == {"decay": "0.0"}
    assert settings(False) == {"decay": "False"} and settings(10**400) == {"decay": "1" + "0" * 79}
    assert settings(object()) == {} and settings((0, None)) == {"decay": "(0.0, None)"}
