"""What a trainer's update calls, written down, gives the bits of the update itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bitproof.harness.errors import PassError
from bitproof.harness.powers.sensitivity.lockstep import after, run_step
from bitproof.harness.powers.sensitivity.program import PARAM, STATE, Program
from bitproof.harness.powers.sensitivity.update import add_update, begin_state, held


class Toy:
    """A trainer of one parameter, whose update also adds a number over all ranks into a buffer."""

    def __init__(self, stray: bool = False) -> None:
        self.model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
        self.model.register_buffer("count", torch.tensor([3.0, 4.0]))
        self.parameters = dict(self.model.named_parameters())
        self.state_buffers = dict(self.model.named_buffers())
        self._adamw = torch.optim.AdamW(self.parameters.values(), lr=0.1, fused=True)
        self.optimizer = SimpleNamespace(state=self._state)
        self._stray = torch.ones(2) if stray else None

    def _state(self):
        for name, parameter in self.parameters.items():
            for state, value in self._adamw.state[parameter].items():
                yield f"{name}.{state}", value

    @torch.no_grad()
    def update(self, gradients):
        count = self.model.count
        total = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(count, "sum", "all"))
        for part in total.unbind():
            count.add_(part if self._stray is None else part * self._stray)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        self._adamw.step()


def program_of(trainer):
    begin_state(trainer)
    program = Program()
    program.compared["grad", "weight"] = program.input(("input", "gradient"))
    add_update(program, trainer, {"all": ((0, 1),)})
    return program


def test_two_updates_have_the_bits_of_two_steps_of_the_optimizer():
    trainer, twin = Toy(), Toy()
    program = program_of(trainer)
    start = {key: value.clone() for key, value in held(trainer).items()}
    assert torch.equal(start[PARAM, "weight"], twin.model.weight), "writing it down changes nothing"
    assert not any(bool(x.any()) for key, x in start.items() if key[0] == STATE)
    ranks = [start, dict(start)]
    for turn in range(2):
        gradient = torch.tensor([[0.3, -0.1, 7.0]]) * (turn + 1)
        values = run_step(program, [own | {("input", "gradient"): gradient} for own in ranks])
        ranks = [after(program, own) for own in values]
        twin.parameters["weight"].grad = gradient
        twin._adamw.step()
    assert torch.equal(ranks[1][PARAM, "weight"], twin.model.weight)
    assert all(torch.equal(ranks[0][STATE, name], x) for name, x in twin._state())
    assert [call.operator for call in program.calls if call.counts] == [
        "all_reduce", "unbind", "add_", "add_", "_foreach_add_", "_fused_adamw_",
    ]  # fmt: skip


def test_an_update_that_reads_what_is_no_part_of_a_ranks_state_is_refused():
    with pytest.raises(PassError, match="no part of what a rank holds between steps"):
        program_of(Toy(stray=True))
