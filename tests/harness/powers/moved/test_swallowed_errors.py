"""What goes wrong in our recorder while a user's program runs is raised at the end, even if the program catches it."""

from __future__ import annotations

import pytest

from bitproof.harness.powers.moved.standalone import watched_program
from bitproof.harness.powers.moved.standalone.call_events import CallEvent, Events, Listener
from bitproof.harness.powers.moved.standalone.watched_program import run_program

CATCHES = """
import torch

def train():
    try:
        torch.ones(2) + 1
    except Exception:
        pass
    return torch.ones(1)
"""


class _Fails(Listener):
    """A full disk, at the first sum."""

    def __init__(self, when: str) -> None:
        self.when = when

    def before(self, event: CallEvent) -> None:
        if self.when == "before" and "add" in event.name:
            raise OSError("no space left")

    def after(self, event: CallEvent) -> None:
        if self.when == "after" and "add" in event.name:
            raise OSError("no space left")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_that_the_program_catches_is_raised_when_it_has_ended(tmp_path, when):
    program = tmp_path / "catching.py"
    program.write_text(CATCHES)
    assert len(run_program(f"{program}:train", [], 1, Events(_Fails("never")))) == 1
    with pytest.raises(OSError, match="no space left"):
        run_program(f"{program}:train", [], 1, Events(_Fails(when)))


STEPS = """
import torch

def train():
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    w.sum().backward()
    try:
        optimizer.step()
    except Exception:
        pass
    return torch.ones(1)
"""


def test_a_record_that_cannot_be_made_is_an_error_though_the_program_goes_on(tmp_path, monkeypatch):
    def fails(value):
        raise ValueError("a tensor without bytes")

    program = tmp_path / "stepping.py"
    program.write_text(STEPS)
    kinds = [kind for _, kind, *_ in run_program(f"{program}:train", [], 1, Events())]
    assert kinds == ["loss", "grad", "param", "result"]
    optimizer_step = watched_program.Records.optimizer_step

    def step(records, optimizer, *rest):
        with monkeypatch.context() as patch:
            patch.setattr(watched_program, "digest_of", fails)
            optimizer_step(records, optimizer, *rest)

    monkeypatch.setattr(watched_program.Records, "optimizer_step", step)
    with pytest.raises(ValueError, match="a tensor without bytes"):
        run_program(f"{program}:train", [], 1, Events())
