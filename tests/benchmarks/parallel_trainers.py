"""Parallel trainers that people write by hand, with one defect each: `parallel_trainers.py:owners__wrong_owner`.

As `handwritten_trainers`, for what that has not. Kinds:

owners      each parameter is updated by one rank, which then broadcasts it
shards      flat shards of each block, gathered before forward and reduced after backward
stages      a pipeline of two micro-batches, with one table for both ends
scaled      autocast, a scaled loss, gradients clipped once they are unscaled
unsynced    DistributedDataParallel that sums gradients over ranks in the last of two micro-batches alone
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh
from tests.benchmarks.defective_trainers import BACKWARD, FORWARD, UPDATE, Defect, asked_for, on_rank
from tests.benchmarks.handwritten_trainers import REDUCE

STEPS = 2
VOCABULARY, DIM = 32, 16
KINDS = ("owners", "shards", "stages", "scaled", "unsynced")


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.read: Callable[[Tensor], Tensor] = lambda x: x
        self.after_up: Callable[[Tensor], object] = lambda _: None
        self.casts = True

    def forward(self, x: Tensor) -> Tensor:
        """The block's input plus what it computes of it."""
        with nullcontext() if self.casts else torch.autocast("cpu", enabled=False):
            normed = self.norm(self.read(x))
            y = self.up(normed)
            self.after_up(normed)
            return x + self.down(gelu(y))


class Model(nn.Module):
    """Predicts each token from the one before, with one table for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.t()


class Trainer:
    """One rank; a defect is put in when all else is built."""

    def __init__(self, case: Case, mesh: Mesh, kind: str, defects: Sequence[str] = ()) -> None:
        self.kind, self.rank, self.world = kind, mesh.rank, case.parallelism.world_size
        self.model = Model()
        self.name_of = {parameter: name for name, parameter in self.model.named_parameters()}
        self.run: nn.Module = DistributedDataParallel(self.model) if kind == "unsynced" else self.model
        self.owners = {name: number % self.world for number, name in enumerate(self.name_of.values())}
        self.senders = dict(self.owners)
        self.shards = [self.shard_of(block) for block in self.model.blocks] if kind == "shards" else []
        self.updated = {n: p for p, n in self.name_of.items() if kind != "owners" or self.owners[n] == self.rank}
        if kind == "shards":
            self.updated = {"embedding.weight": self.model.embedding.weight}
            self.updated |= {f"shards.{number}": shard for number, shard in enumerate(self.shards)}
        self.optimizer = torch.optim.AdamW(self.updated.values(), lr=1e-2, foreach=False)
        self.data = torch.Generator().manual_seed(0 if kind == "stages" else self.rank)
        self.text = random.Random(self.rank)
        self.gathered = [torch.zeros(shard.numel() * self.world) for shard in self.shards]
        self.gathers: Callable[[int, int], bool] = lambda block, step: True
        self.operation_of: Callable[[str], Any] = lambda _: dist.ReduceOp.SUM
        self.order_back = [0, 1]
        self.sums_table, self.scale = True, 1024.0
        self.unscales: Callable[[str], bool] = lambda _: True
        self.max_norm, self.clips_first = 0.1, False
        self.change_batch: Callable[[Tensor], Tensor] = lambda tokens: tokens
        self.syncs: Callable[[int], bool] = lambda part: part == 1
        self.part = self.number = 0
        if kind == "unsynced":
            lessen(self)
        for defect in defects:
            DEFECTS[kind, defect].put_in(self)

    def shard_of(self, block: nn.Module) -> nn.Parameter:
        """This rank's part of a block's parameters, laid one after the other."""
        flat = torch.cat([parameter.detach().flatten() for parameter in block.parameters()])
        return nn.Parameter(flat.chunk(self.world)[self.rank].clone())

    def gather(self) -> None:
        """Each block's parameters from all ranks' shards."""
        for number, (block, shard) in enumerate(zip(self.model.blocks, self.shards, strict=True)):
            if self.gathers(number, self.number):
                dist.all_gather_into_tensor(self.gathered[number], shard.detach())
            flat = self.gathered[number]
            for parameter in block.parameters():
                part, flat = flat[: parameter.numel()], flat[parameter.numel() :]
                parameter.data.copy_(part.view_as(parameter))

    def scatter(self) -> None:
        """The mean of all ranks' gradients, of each shard and of what is in no block."""
        for number, (block, shard) in enumerate(zip(self.model.blocks, self.shards, strict=True)):
            flat = torch.cat([parameter.grad.flatten() for parameter in block.parameters()])  # type: ignore[union-attr]
            part = torch.zeros_like(shard)
            dist.reduce_scatter_tensor(part, flat, op=self.operation_of(f"blocks.{number}"))
            shard.grad = part.div_(self.world)
        table = self.model.embedding.weight
        assert table.grad is not None
        dist.all_reduce(table.grad.div_(self.world))

    def loss_of(self, tokens: Tensor) -> Tensor:
        """Of one micro-batch, divided by how many there are."""
        logits = self.run(tokens[:, :-1]).flatten(0, 1)
        return cross_entropy(logits.float(), tokens[:, 1:].flatten()) / 2

    def losses(self, tokens: Tensor) -> Tensor:
        """Forward and backward of two micro-batches."""
        found = []
        for self.part, part in enumerate(tokens.chunk(2)):
            waits = self.kind == "unsynced" and not self.syncs(self.part)
            assert isinstance(self.run, DistributedDataParallel) or not waits
            with self.run.no_sync() if waits else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16) if self.kind == "scaled" else nullcontext():
                    loss = self.loss_of(part)
                (loss * self.scale if self.kind == "scaled" else loss).backward()
            found.append(loss.detach())
        return torch.stack(found).sum()

    def pipelined(self, tokens: Tensor) -> Tensor | None:
        """Rank 0 has the first block, rank 1 the second and the loss: all of forward, then all of backward."""
        parts, kept, losses = tokens.chunk(2), [], []
        for part in parts:
            if self.rank == 0:
                x = self.model.blocks[0](self.model.embedding(part[:, :-1]))
                dist.send(x.detach(), 1)
                kept.append(x)
                continue
            x = torch.zeros(*part[:, :-1].shape, DIM)
            dist.recv(x, 0)
            kept.append(x.requires_grad_())
            logits = (self.model.blocks[1](x) @ self.model.embedding.weight.t()).flatten(0, 1)
            losses.append(cross_entropy(logits, part[:, 1:].flatten()) / 2)
        for number in [0, 1]:
            if self.rank == 1:
                losses[number].backward()
        for number in [0, 1]:
            if self.rank == 0:
                gradient = torch.zeros_like(kept[number])
                dist.recv(gradient, 1)
                kept[number].backward(gradient)
            else:
                gradient = kept[self.order_back[number]].grad
                assert gradient is not None
                dist.send(gradient, 0)
        table = self.model.embedding.weight.grad
        assert table is not None
        if self.sums_table:
            dist.all_reduce(table)
        return torch.stack(losses).sum().detach() if losses else None

    def reduce(self) -> None:
        """Each gradient, averaged over ranks."""
        for parameter, name in self.name_of.items():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=self.operation_of(name))
            parameter.grad.div_(self.world)

    def unscale(self) -> None:
        """Gradients as those of the loss itself."""
        for parameter, name in self.name_of.items():
            assert parameter.grad is not None
            if self.unscales(name):
                parameter.grad.mul_(1 / self.scale)

    def clip(self) -> None:
        """All gradients to one norm."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, foreach=False)

    def update(self) -> None:
        """The optimizer's step, and what owners send of it."""
        self.optimizer.step()
        for parameter, name in self.name_of.items() if self.kind == "owners" else ():
            dist.broadcast(parameter.data, self.senders[name])

    def after_backward(self) -> None:
        """What a kind does to gradients before the update."""
        if self.kind == "shards":
            self.scatter()
        if self.kind == "owners":
            self.reduce()
        if self.kind == "scaled":
            for each in (self.clip, self.unscale) if self.clips_first else (self.unscale, self.clip):
                each()

    def drawn(self) -> Tensor:
        """A batch of tokens by chance."""
        return torch.randint(1, VOCABULARY, (4, 9), generator=self.data)

    def read(self) -> Tensor:
        """The batch that a rank's own text gives."""
        return torch.tensor([[self.text.randrange(1, VOCABULARY) for _ in range(9)] for _ in range(4)])

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take one step, and yield each value as it is computed."""
        self.number = index
        if self.kind == "shards":
            self.gather()
        tokens = self.change_batch(self.read() if self.kind == "scaled" else self.drawn())
        loss = self.pipelined(tokens) if self.kind == "stages" else self.losses(tokens)
        if loss is not None:
            yield "loss", "loss", loss
        self.after_backward()
        shown = {name: parameter for parameter, name in self.name_of.items()} | self.updated
        for name, parameter in shown.items():
            if parameter.grad is not None:
                yield "grad", name, parameter.grad
        self.update()
        for name, parameter in shown.items():
            yield "param", name, parameter
        for name, parameter in self.updated.items():
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", value
        for parameter in shown.values():
            parameter.grad = None


def max_for_sum(wanted: str) -> Callable[[Trainer], None]:
    """One gradient's greatest over ranks in place of its sum."""
    return lambda t: setattr(t, "operation_of", lambda n: dist.ReduceOp.MAX if n == wanted else dist.ReduceOp.SUM)


def wrong_owner(trainer: Trainer) -> None:
    """One parameter is sent by a rank that has not updated it."""
    trainer.senders[UP] = 1 - trainer.owners[UP]


def decay_on_a_norm(trainer: Trainer) -> None:
    """A norm decays more than it should."""
    [group] = trainer.optimizer.param_groups
    wanted = trainer.model.get_parameter(NORM)
    if any(parameter is wanted for parameter in group["params"]):
        group["params"] = [parameter for parameter in group["params"] if parameter is not wanted]
        trainer.optimizer.add_param_group({"params": [wanted], "lr": 1e-2, "weight_decay": 0.5})


def scaled_in_the_second(trainer: Trainer) -> None:
    """One gradient, times a little more than 1, in the second micro-batch."""
    trainer.model.get_parameter(UP).register_hook(lambda gradient: gradient * 1.01 if trainer.part else gradient)


def lessen(trainer: Trainer) -> None:
    """A hook that makes one gradient smaller, as all of these trainers have one."""
    trainer.model.get_parameter("blocks.1.down.weight").register_hook(lambda gradient: gradient * 0.3)


def written_over(trainer: Trainer) -> None:
    """A norm's output is written to once it was read, though backward reads it again."""
    trainer.model.blocks[1].after_up = lambda x: x.data.mul_(1.01)


def detached(trainer: Trainer) -> None:
    """No gradient goes back through a block's branch."""
    trainer.model.blocks[1].read = lambda x: x.detach()


def one_more_number(trainer: Trainer) -> None:
    """A generator that gave one number too many before the second step's batch."""
    inner = trainer.change_batch

    def change(tokens: Tensor) -> Tensor:
        torch.rand(1, generator=trainer.data)
        return inner(tokens)

    trainer.change_batch = change


UP, NORM = "blocks.0.up.weight", "blocks.1.norm.weight"

DEFECTS: dict[tuple[str, str], Defect] = {
    ("owners", "wrong_owner"): Defect(wrong_owner, None, UPDATE, ("broadcast_",)),
    ("owners", "decay_on_a_norm"): Defect(decay_on_a_norm, None, UPDATE, ("mul_",)),
    ("owners", "max_for_sum"): Defect(max_for_sum(UP), None, UPDATE, REDUCE),
    ("shards", "stale_gather"): Defect(
        lambda t: setattr(t, "gathers", lambda block, step: not (block and step)),
        "",
        FORWARD,
        ("_allgather_base_", "copy_"),
    ),
    ("shards", "max_for_sum"): Defect(max_for_sum("blocks.1"), None, UPDATE, ("_reduce_scatter_base_",)),
    ("stages", "exchanged_back"): Defect(
        lambda t: setattr(t, "order_back", [1, 0]), "", BACKWARD, ("send", "recv_"), None
    ),
    ("stages", "detached"): Defect(detached, "blocks.1.norm", BACKWARD, ("native_layer_norm_backward",), 1),
    ("stages", "table_not_summed"): Defect(lambda t: setattr(t, "sums_table", False), None, UPDATE, REDUCE),
    ("scaled", "clipped_before_unscaling"): Defect(
        lambda t: setattr(t, "clips_first", True), None, UPDATE, ("mul", "linalg_vector_norm")
    ),
    ("scaled", "one_not_unscaled"): Defect(
        lambda t: setattr(t, "unscales", lambda name: name != UP), None, UPDATE, ("mul_",)
    ),
    ("scaled", "one_block_in_float32"): Defect(
        lambda t: setattr(t.model.blocks[1], "casts", False), "blocks.1.up", FORWARD, ("_to_copy", "mm", "addmm")
    ),
    ("scaled", "text_of_rank_0"): Defect(
        # Python draws the text outside torch: the first effect is the row that the embedding reads.
        on_rank(1, lambda t: setattr(t, "text", random.Random(0))),
        "embedding",
        FORWARD,
        ("embedding",),
        1,
    ),
    ("unsynced", "synced_twice"): Defect(
        lambda t: setattr(t, "syncs", lambda _: True), "blocks.1.down", BACKWARD, ("mul.out",)
    ),
    ("unsynced", "scaled_in_the_second"): Defect(scaled_in_the_second, "blocks.0.up", BACKWARD, ("mul",)),
    ("unsynced", "hook_twice"): Defect(lessen, "blocks.1.down", BACKWARD, ("mul",)),
    ("unsynced", "shuffled_on_rank_1"): Defect(
        on_rank(1, lambda t: setattr(t, "change_batch", lambda x: x[[1, 0, 3, 2]])), "", FORWARD, ("index",), 1
    ),
    ("unsynced", "drawn_on_rank_1"): Defect(on_rank(1, one_more_number), "", FORWARD, ("rand",), 1),
    ("unsynced", "written_over"): Defect(written_over, "blocks.1", FORWARD, ("mul_",)),
    ("unsynced", "detached"): Defect(detached, "blocks.1.norm", BACKWARD, ("native_layer_norm_backward",)),
}


def __getattr__(name: str) -> Any:
    """The factory of a system: a kind, then two underscores and a defect, any number of times."""
    kind, defects = asked_for(name, KINDS, DEFECTS)
    return partial(Trainer, kind=kind, defects=defects)
