"""A case with ranks: calls of every rank are merged, replayed, and exchanged on all ranks together."""

import json
from pathlib import Path

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from tests.harness.powers.moved.test_moved_command import PLANT

SYSTEM = """
import os
import torch
import torch.distributed as dist

class Made:
    def __init__(self, case, mesh):
        self.rank, self.size = mesh.rank, case.parallelism.world_size
        self.weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7
        self.moment = torch.zeros_like(self.weight)

    def gradients(self, x):
        product = (self.weight * x).sum()
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(gathered, 2 * product * x)
        return product.square(), sum(gathered[1:], gathered[0])

    def step(self, index, observe):
        x = torch.full((2, 3), 0.5 + index + self.rank / 8) * float(os.environ.get("PLANTED_SCALE", "1"))
        # Each rank has a call of its own, by its shape, beside those of both.
        x = x + torch.relu(torch.ones(self.rank + 2, 3))[:2]
        loss, gradient = self.gradients(x)
        observe("loss", "loss", loss)
        observe("grad", "weight", gradient)
        self.moment = self.moment * 0.9 + gradient
        self.weight = self.weight - 1e-3 * self.moment
        observe("param", "weight", self.weight)
        observe("optimizer", "weight.moment", self.moment)

def make(case, mesh):
    return Made(case, mesh)

class Loops:
    def step(self, index, observe): ...
    def take_steps(self, steps, taking): ...

def loops(case, mesh):
    return Loops()
"""
pytestmark = pytest.mark.ranks


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A case of two ranks, and a plant that moves relu."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SYSTEM)
    Path("plant").mkdir()
    Path("plant", "sitecustomize.py").write_text(PLANT)
    name = f"{tmp_path}/mine.py:make"
    made = Case(
        **{"name": "mine", "family": "toys", "reference": name, "candidate": name, "expected": "EQUAL"},
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    Path("case.json").write_text(case_text(made))
    return ["case.json", "--no-causes", "--env", f"PYTHONPATH={Path('plant').resolve()}"]


def moved(capsys, *words):
    capsys.readouterr()
    status = main(["moved", "--json", *words])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return status, json.loads(printed.out)


@pytest.mark.slow
def test_calls_of_all_ranks_are_merged_and_exchanged_together(case, capsys):
    status, found = moved(capsys, *case, "--env", "PLANTED=1", "--", "--device", "cpu")
    assert status == 1
    shapes = sorted(row["shapes"] for row in found["rows"])
    assert {row["operator"] for row in found["rows"]} == {"aten.relu.default"}
    assert shapes == [[[2, 3]], [[3, 3]]], "a call of rank 0 and a call of rank 1"
    verified = found["verified"]
    assert (verified["plain"], verified["with_exchange"], verified["remainder"]) == ("DIFFERENT", "EQUAL", "")
    assert verified["exchanged"] == 4, "a call a rank and step"
    assert not any(row["alone"] for row in found["rows"]), "--no-causes moves no call alone"
    assert any("over ranks 0, 1: a collective, which is not replayed alone" in text for text in found["uncollected"])
    assert found["system"].endswith("mine.py:make") and len(found["recordings"]) == 2


@pytest.mark.slow
def test_a_second_difference_outside_of_operators_is_the_remainder(case, capsys):
    planted = ["--env", "PLANTED=1", "--env", "PLANTED_SCALE=2"]
    status, found = moved(capsys, *case, *planted, "--", "--device", "cpu")
    assert (status, found["verified"]["with_exchange"]) == (1, "DIFFERENT")
    assert found["verified"]["remainder"].startswith("not from an operator: call")
    assert "aten.mul.Tensor(tensor, 2.0), was aten.mul.Tensor(tensor, 1.0)" in found["verified"]["remainder"]


@pytest.mark.slow
def test_nothing_moves_on_ranks_where_nothing_was_planted(case, capsys):
    status, found = moved(capsys, *case, "--", "--device", "cpu")
    assert (status, found["rows"], found["verified"]["plain"]) == (0, [], "EQUAL")
    assert len({each["digest"] for each in found["recordings"]}) == 1


def test_cases_that_cannot_be_watched_are_refused(case, capsys):
    assert main(["moved", "no_such_case", "--env", "A=1"]) == 2
    assert main(["moved", "case.json", "--env", "A=1", "--system", "absent.py:make"]) == 2
    assert main(["moved", "model.py:forward", "--env", "A=1", "--system", "eager"]) == 2
    assert "--system is for a case" in capsys.readouterr().err
    assert main(["moved", "case.json", "--env", "A=1", "--", "--no-such-option"]) == 2
    assert main(["moved", "case.json", "--env", "A=1", "--system", f"{Path('mine.py').resolve()}:loops"]) == 3
    assert "loops over its steps itself" in capsys.readouterr().err
