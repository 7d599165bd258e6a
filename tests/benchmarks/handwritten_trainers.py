"""Trainers that people write by hand, with one defect each: `handwritten_trainers.py:reduced__wrong_group`.

As `defective_trainers`, for what that has not: gradients summed by hand, column- and row-parallel layers as Megatron's,
token counts as divisors, dropout and recomputation, running statistics, DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from bitproof import Case, Mesh
from bitproof.harness.torch_operators import is_backward_running
from tests.benchmarks.defective_trainers import Defect, asked_for, on_rank, void

STEPS = 2
VOCABULARY, DIM, PADDING = 32, 16, 0
KINDS = ("reduced", "megatron", "padded", "dropout", "statistics", "dtensor", "broken", "lists")


class ToRanks(torch.autograd.Function):
    """What column-parallel layers read: as it is, with a gradient summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: bool) -> Tensor:
        """As it is."""
        ctx.sums = sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum over ranks."""
        gradient = gradients[0].contiguous().clone()
        if ctx.sums:
            dist.all_reduce(gradient)
        return gradient, None


class FromRanks(torch.autograd.Function):
    """What row-parallel layers give: summed over ranks, with a gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum over ranks."""
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Block(nn.Module):
    """A residual MLP, of which a rank may have a part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hidden = DIM if kind == "megatron" else 2 * DIM
        self.kind, self.sums = kind, True
        self.norm = nn.BatchNorm1d(DIM) if kind == "statistics" else nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, hidden, bias=False), nn.Linear(hidden, DIM, bias=False)
        self.bias = nn.Parameter(torch.full((DIM,), 0.01))
        self.bias_first = False
        self.drop = nn.Dropout(0.2 if kind == "dropout" else 0.0)
        self.approximate = "none"

    def forward(self, x: Tensor) -> Tensor:
        """The block's input plus what it computes of it."""
        normed = self.norm(x.flatten(0, 1)).view_as(x) if self.kind == "statistics" else self.norm(x)
        if self.kind == "megatron":
            y = self.down(gelu(self.up(ToRanks.apply(normed, self.sums))))
            return x + (FromRanks.apply(y + self.bias) if self.bias_first else FromRanks.apply(y) + self.bias)
        if self.kind == "broken":
            hidden = self.up(normed)
            torch._dynamo.graph_break()
            return x + self.down(gelu(hidden, approximate=self.approximate)) + self.bias
        y = self.down(gelu(self.up(normed))) + self.bias
        return x + (self.drop(y) if self.kind == "dropout" else y)


class Model(nn.Module):
    """Predicts each token from the one before, with one table for both ends."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.recomputes, self.keeps_state = kind == "dropout", True

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keeps_state)
            else:
                x = block(x)
        return x @ self.embedding.weight.t()


class Trainer:
    """One rank; a defect is put in when all else is built."""

    def __init__(self, case: Case, mesh: Mesh, kind: str, defects: Sequence[str] = ()) -> None:
        self.kind, self.rank, self.world = kind, mesh.rank, case.parallelism.world_size
        self.grid = init_device_mesh("cpu", (self.world,))
        self.alone = [dist.new_group([rank]) for rank in range(self.world)][self.rank]
        self.model = Model(kind)
        if kind == "megatron":
            for block in self.model.blocks:
                block.up.weight.data.mul_(1 + self.rank)
        if kind == "broken":
            for block in self.model.blocks:
                block.compile(backend="aot_eager")
        torch.manual_seed(10 + self.rank)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=kind == "lists", foreach=False)
        self.data = torch.Generator().manual_seed(0 if kind == "megatron" else self.rank)
        self.divisor_of: Callable[[str], int] = lambda _: self.world
        self.reduced = dict(self.model.named_parameters())
        self.group_of: Callable[[str], Any] = lambda _: None
        self.waits: Callable[[str], bool] = lambda _: True
        self.placement_of: Callable[[str], Any] = lambda _: Partial("avg")
        self.masks: Callable[[int], bool] = lambda _: True
        self.divisor: Callable[[Tensor, Tensor], Tensor] = lambda _, total: total
        self.sums_norm, self.max_norm = True, 0.1
        self.before_step: Callable[[int], None] = lambda _: None
        self.evaluates = self.model.blocks[0].norm if kind == "statistics" else None
        self.running: Callable[[], tuple[Tensor, Tensor]] | None = None
        for defect in defects:
            DEFECTS[kind, defect].put_in(self)

    def losses(self, tokens: Tensor) -> Tensor:
        """Forward and backward of two micro-batches; without padding where there is any."""
        parts = tokens.chunk(2)
        total = sum(((part[:, 1:] != PADDING).sum() for part in parts), torch.tensor(0))
        found = []
        for number, part in enumerate(parts):
            logits, wanted = self.model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()
            if self.kind != "padded":
                loss = cross_entropy(logits, wanted) / len(parts)
            else:
                each, mask = cross_entropy(logits, wanted, reduction="none"), (wanted != PADDING).float()
                each = each * mask if self.masks(number) else each
                loss = each.sum() / self.divisor(mask.sum(), total)
            loss.backward()
            found.append(loss.detach())
        return torch.stack(found).sum()

    def reduce(self) -> None:
        """Each gradient, averaged over ranks."""
        works = []
        for name, parameter in self.reduced.items():
            gradient = parameter.grad
            assert gradient is not None
            if self.kind == "dtensor":
                partial = DTensor.from_local(gradient, self.grid, [self.placement_of(name)], run_check=False)
                parameter.grad = partial.redistribute(placements=[Replicate()]).to_local().clone()
            elif self.kind == "lists":
                works.append((name, dist.all_reduce(gradient, group=self.group_of(name), async_op=True)))
            else:
                dist.all_reduce(gradient.div_(self.divisor_of(name)), group=self.group_of(name))
        for name, work in works:
            if self.waits(name):
                work.wait()

    def clip(self) -> None:
        """To a norm that is summed over ranks, as that of what each rank has a part of."""
        squares = torch.stack([p.grad.square().sum() for p in self.model.parameters() if p.grad is not None]).sum()
        if self.sums_norm:
            dist.all_reduce(squares)
        scale = (self.max_norm / squares.sqrt()).clamp(max=1.0)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take one step, and yield each value as it is computed."""
        self.before_step(index)
        tokens = torch.randint(1, VOCABULARY, (4, 9), generator=self.data)
        if self.kind == "padded":
            tokens[0, 5:], tokens[3, 3:] = PADDING, PADDING
        yield "loss", "loss", self.losses(tokens)
        if self.kind != "megatron":
            self.reduce()
        if self.kind in ("reduced", "megatron"):
            self.clip()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield "grad", name, parameter.grad
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, parameter
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", value
        if self.evaluates is not None:
            yield "loss", "evaluated", self.evaluated(tokens)
        self.optimizer.zero_grad()

    def evaluated(self, tokens: Tensor) -> Tensor:
        """One norm's answer by its running statistics, as a number."""
        norm = self.evaluates
        assert norm is not None
        x = self.model.embedding(tokens).detach().flatten(0, 1)
        mean, variance = self.running() if self.running else (norm.running_mean, norm.running_var)
        return nn.functional.batch_norm(x, mean, variance, training=False).abs().sum()


def twice(trainer: Trainer) -> None:
    """A table that is found under both of its names is summed over ranks twice, and divided once."""
    trainer.reduced = trainer.reduced | {"output.weight": trainer.model.embedding.weight}
    trainer.divisor_of = lambda name: 1 if name == "output.weight" else trainer.world


def one_step_on(trainer: Trainer) -> None:
    """An optimizer that has counted one step more."""

    def before(index: int) -> None:
        for state in trainer.optimizer.state.values() if index == 1 else ():
            state["step"] += 1

    trainer.before_step = before


def exchanged_moments(trainer: Trainer) -> None:
    """Two parameters of one shape whose first moments stand in each other's place in the lists."""

    def before(index: int) -> None:
        one, other = (trainer.optimizer.state.get(block.bias) for block in trainer.model.blocks)
        if index == 1 and one is not None and other is not None:
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    trainer.before_step = before


def stale_statistics(trainer: Trainer) -> None:
    """Statistics as they were when the trainer was made."""
    norm = trainer.model.blocks[0].norm
    kept = norm.running_mean.clone(), norm.running_var.clone()
    trainer.running = lambda: kept


def drawn_before(trainer: Trainer) -> None:
    """One number drawn too many, before the first step."""
    trainer.before_step = lambda index: None if index else void(torch.rand(1))


def other_eps_again(trainer: Trainer) -> None:
    """Another eps of a norm, where backward computes it again."""

    def set_eps(norm: nn.Module, _: object) -> None:
        norm.eps = 1e-3 if is_backward_running() else 1e-5

    trainer.model.blocks[1].norm.register_forward_pre_hook(set_eps)


def set_block(number: int, name: str, value: object) -> Callable[[Trainer], None]:
    """Another value for one block's attribute."""
    return lambda t: setattr(t.model.blocks[number], name, value)


BIAS = "blocks.1.bias"
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
REDUCE = ("allreduce_", "all_reduce")
DRAWS = ("native_dropout", "bernoulli", "rand")

DEFECTS: dict[tuple[str, str], Defect] = {
    ("reduced", "tied_twice"): Defect(twice, None, UPDATE, (*REDUCE, "div_")),
    ("reduced", "wrong_group"): Defect(
        lambda t: setattr(t, "group_of", lambda name: t.alone if name == BIAS else None), None, UPDATE, REDUCE
    ),
    ("reduced", "one_left_out"): Defect(lambda t: void(t.reduced.pop(BIAS)), None, UPDATE, (*REDUCE, "div_")),
    ("reduced", "local_norm"): Defect(lambda t: setattr(t, "sums_norm", False), None, UPDATE, REDUCE),
    ("reduced", "step_on_rank_1"): Defect(on_rank(1, one_step_on), None, UPDATE, ("add_",), 1),
    ("megatron", "not_summed_back"): Defect(set_block(1, "sums", False), "blocks.1", BACKWARD, REDUCE),
    ("megatron", "bias_first"): Defect(set_block(0, "bias_first", True), "blocks.0", FORWARD, ("add",)),
    ("padded", "own_count"): Defect(lambda t: setattr(t, "divisor", lambda own, _: own), "", FORWARD, ("div", "sum")),
    ("padded", "mask_lost"): Defect(
        lambda t: setattr(t, "masks", lambda number: number != 1), "", FORWARD, ("mul", "sum")
    ),
    ("dropout", "one_seed"): Defect(
        on_rank(1, lambda _: void(torch.manual_seed(10))), "blocks.0.drop", FORWARD, DRAWS, 1
    ),
    ("dropout", "drawn_before"): Defect(on_rank(0, drawn_before), "", FORWARD, DRAWS, 0),
    ("dropout", "other_recomputation"): Defect(
        lambda t: setattr(t.model, "keeps_state", False), "blocks.1.drop", BACKWARD, DRAWS
    ),
    ("dropout", "other_eps_again"): Defect(other_eps_again, "blocks.1.norm", BACKWARD, ("native_layer_norm",)),
    ("statistics", "stale"): Defect(stale_statistics, "", FORWARD, ("native_batch_norm", "batch_norm")),
    ("dtensor", "sum_for_mean"): Defect(
        lambda t: setattr(t, "placement_of", lambda name: Partial("sum" if name == BIAS else "avg")),
        None,
        UPDATE,
        (*REDUCE, "div"),
    ),
    ("dtensor", "replicated"): Defect(
        lambda t: setattr(t, "placement_of", lambda name: Replicate() if name == BIAS else Partial("avg")),
        None,
        UPDATE,
        (*REDUCE, "div"),
    ),
    ("dtensor", "greatest"): Defect(
        lambda t: setattr(t, "placement_of", lambda name: Partial("max") if name == BIAS else Partial("avg")),
        None,
        UPDATE,
        REDUCE,
    ),
    ("broken", "tanh_gelu"): Defect(set_block(1, "approximate", "tanh"), "blocks.1", FORWARD, ("gelu",)),
    ("lists", "exchanged_moments"): Defect(exchanged_moments, None, UPDATE, ("_fused_adamw_",)),
    ("lists", "not_awaited"): Defect(lambda t: setattr(t, "waits", lambda name: name != BIAS), None, UPDATE, REDUCE),
}


def __getattr__(name: str) -> Any:
    """The factory of a system: a kind, then two underscores and a defect, any number of times."""
    kind, defects = asked_for(name, KINDS, DEFECTS)
    return partial(Trainer, kind=kind, defects=defects)
