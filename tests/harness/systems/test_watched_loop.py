"""What `watch` makes of a loop that is a framework's: where its steps begin and end, and what is refused."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import _global_optimizer_pre_hooks

import bitproof
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.systems.user_system import UserSystem

DATA = torch.ones(4, 3)


def shown(watched, num_steps=2, around=None):
    """What a system shows, a dictionary a step, by kind and name, in order."""
    rows = []
    system = UserSystem("mine", watched, names={}, origin={})

    @contextmanager
    def taking(index):
        assert index == len(rows)
        rows.append({})
        with (around or logged)(None):
            yield lambda kind, name, tensor: rows[index].__setitem__((kind, name), tensor.detach().clone())

    system.take_steps(num_steps, taking)
    return rows


def loop(model, *optimizers, num_steps=5, parts=1, ended=lambda: None):
    """A training loop as users write it."""

    def train():
        for _ in range(num_steps):
            for _ in range(parts):
                (model(DATA).square().mean() / parts).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        ended()

    return train


def test_each_step_of_the_optimizer_is_a_step_and_the_loop_is_left_after_the_last():
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    weights = [model.weight.detach().clone()]
    optimizer.register_step_post_hook(lambda *_: weights.append(model.weight.detach().clone()))
    rows = shown(bitproof.watch(train=loop(model, optimizer, ended=pytest.fail), model=model))
    assert len(rows) == 2 and len(weights) == 3
    assert [row["param", "weight"].equal(weight) for row, weight in zip(rows, weights[1:], strict=True)] == [True] * 2
    assert {kind for kind, _ in rows[0]} == {"grad", "param", "optimizer", "loss"}
    assert list(rows[0]) == list(rows[1])


def test_a_loop_shows_what_single_steps_show():
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    first, second = AdamW(model.parameters()), AdamW(other.parameters())

    def step(index):
        loss = other(DATA).square().mean()
        loss.backward()
        second.step()
        second.zero_grad()
        return loss

    looped = shown(bitproof.watch(train=loop(model, first), model=model))
    stepped = shown(bitproof.watch(step, model=other, optimizer=second))
    for row, expected in zip(looped, stepped, strict=True):
        assert list(row) == list(expected)
        assert all(row[key].equal(expected[key]) for key in row)


def test_nothing_of_a_step_is_lost_or_reported_of_another():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5, foreach=False)
    logs = []

    @contextmanager
    def around(_):
        with logged(bitproof.watch(train=print, model=model)) as log:
            yield
        logs.append([(call.operator.partition(".")[0], call.place.direction) for call in log.calls])

    shown(bitproof.watch(train=loop(model, optimizer), model=model), 3, around)
    assert logs[1] == logs[2] and logs[0] == logs[1]
    assert ("addmm", "forward") in logs[0] and ("mm", "backward") in logs[0] and ("add_", "update") in logs[0]


def test_a_step_ends_when_all_optimizers_that_hold_the_parameters_have_taken_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    nn.init.ones_(model[1].weight)
    parts = [SGD(model[0].parameters(), lr=0.5), AdamW(model[1].parameters())]
    stranger = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    rows = shown(bitproof.watch(train=loop(model, stranger, *parts), model=model))
    assert ("optimizer", "0.weight.lr") in rows[0] and ("optimizer", "1.weight.exp_avg") in rows[0]
    assert len(rows) == 2 and len([name for kind, name in rows[0] if kind == "grad"]) == 4


def test_optimizers_count_that_take_turns_with_the_others_parameters_frozen():
    """As those that Lightning toggles; what nobody trains, as a backbone, is waited for by nobody."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    parts = {part: SGD(part.parameters(), lr=0.5) for part in (model[0], model[1])}

    def train():
        for _ in range(4):
            for part, optimizer in parts.items():
                for other in parts:
                    other.requires_grad_(other is part)
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    rows = shown(bitproof.watch(train=train, model=model))
    held = [("optimizer", f"{part}.{name}.lr") for part in (0, 1) for name in ("weight", "bias")]
    assert len(rows) == 2 and [[key for key in row if key[0] == "optimizer"] for row in rows] == [held] * 2


def test_optimizers_that_never_hold_all_are_refused_unless_they_are_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = SGD(model[0].parameters(), lr=0.5)
    with pytest.raises(RecordingError, match="an optimizer of type SGD took two steps in step 0") as refused:
        shown(bitproof.watch(train=loop(model, optimizer), model=model))
    assert refused.value.fix == "give watch the optimizers that train: optimizer=[...]"
    assert len(shown(bitproof.watch(train=loop(model, optimizer), model=model, optimizer=optimizer))) == 2


def test_what_an_optimizer_updates_that_holds_none_of_the_model_is_shown():
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    own, other = SGD(model.parameters(), lr=0.5), SGD([scale], lr=0.5)

    def update(*_):
        scale.grad = torch.ones(1)
        other.step()

    own.register_step_pre_hook(update)
    steps = shown(bitproof.watch(train=loop(model, own), model=model))
    assert [rows["param", "optimizer.1.group0.param0"] for rows in steps] == [0.5, 0.0]


def test_the_loss_is_the_sum_of_what_backward_began_with():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.0)
    [whole] = shown(bitproof.watch(train=loop(model, optimizer), model=model), 1)
    [parts] = shown(bitproof.watch(train=loop(model, optimizer, parts=4), model=model), 1)
    loss = model(DATA).square().mean()
    assert whole["loss", "loss"].equal(loss) and parts["loss", "loss"].dtype == torch.float64
    assert parts["loss", "loss"] == 4 * (loss / 4).double()


class Framework:
    """A trainer whose gradients come without autograd's backward, as of a traced graph."""

    def __init__(self):
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)

    def micro_batch(self, part):
        loss = self.model(DATA).mean() * part
        [self.model.weight.grad] = torch.autograd.grad(loss, [self.model.weight])
        return loss.detach()

    def train(self):
        while True:
            assert [self.micro_batch(part) for part in (1, 2)]
            self.optimizer.step()


def test_the_loss_may_be_what_a_method_of_the_framework_returns():
    own = Framework()
    first = own.micro_batch(1).double() + own.micro_batch(2)
    rows = shown(bitproof.watch(train=own.train, model=own.model, loss=own.micro_batch))
    assert torch.equal(rows[0]["loss", "loss"], first) and rows[1]["loss", "loss"] < first
    assert "micro_batch" not in vars(own), "the method is as it was"
    other = Framework()
    assert ("loss", "loss") not in shown(bitproof.watch(train=other.train, model=other.model))[0]
    with pytest.raises(UsageError, match="a loss that is no method"):
        bitproof.watch(train=own.train, model=own.model, loss=lambda: None)


def test_a_gradient_that_backward_is_handed_is_no_loss():
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.5)

    def train():
        while True:
            model(DATA[:1]).backward(torch.ones(1, 1))
            optimizer.step()

    [row] = shown(bitproof.watch(train=train, model=model), 1)
    assert ("loss", "loss") not in row and ("grad", "weight") in row


def test_a_loop_that_ends_early_is_refused():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    with pytest.raises(RecordingError, match="the training loop ended after 1 steps of its optimizer"):
        shown(bitproof.watch(train=loop(model, optimizer, num_steps=1), model=model))


def test_a_framework_that_catches_everything_and_goes_on_shows_no_more():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)

    def stubborn():
        for _ in range(4):
            with suppress(BaseException):
                loop(model, optimizer, num_steps=3)()

    assert len(shown(bitproof.watch(train=stubborn, model=model))) == 2
    assert not _global_optimizer_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_what_a_loop_raises_by_itself_is_raised():
    def train():
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        shown(bitproof.watch(train=train, model=nn.Linear(3, 2)))


def test_exactly_one_function_trains_and_a_step_names_its_optimizer():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    for given in ({}, {"step": print, "train": print}):
        with pytest.raises(UsageError, match="watch takes one function that trains"):
            bitproof.watch(model=model, optimizer=optimizer, **given)
    with pytest.raises(UsageError, match="a step without its optimizer"):
        bitproof.watch(print, model=model)
