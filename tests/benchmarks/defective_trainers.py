"""Trainers of eight kinds with one defect each, as systems: `defective_trainers.py:fsdp2` and `...:fsdp2__other_eps`.

What stands after the two underscores is one of `DEFECTS`; tests/benchmarks/bench_blame.py runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh, watch
from bitproof.harness.systems.watched_step import WatchedStep

STEPS = 1
VOCABULARY, DIM = 32, 16
LEFT_OUT = "blocks.1.up.weight"
KINDS = ("fsdp2", "ddp", "tp", "pipelined", "accumulating", "clipping", "compiled", "fused", "loop")


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.activation: Callable[[Tensor], Tensor] = gelu
        self.alpha = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The block's input plus what it computes of it."""
        return torch.add(x, self.down(self.activation(self.up(self.norm(x)))), alpha=self.alpha)


class Model(nn.Module):
    """Predicts each token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(x)
        return logits


class Trainer:
    """One rank of one kind of training run; a defect is put in when all else is built."""

    def __init__(self, case: Case, mesh: Mesh, kind: str, defects: Sequence[str] = ()) -> None:
        self.kind, self.rank = kind, mesh.rank
        self.model = Model()
        self.run: nn.Module = self.model
        grid = init_device_mesh("cpu", (case.parallelism.world_size,))
        if kind in ("fsdp2", "accumulating", "clipping"):
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=grid)
        elif kind == "tp":
            for block in self.model.blocks:
                parallelize_module(block, grid, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif kind == "compiled":
            for block in self.model.blocks:
                block.compile(backend="aot_eager")
        if kind in ("ddp", "compiled", "fused", "loop"):
            self.run = DistributedDataParallel(self.model)
        self.num_parts = 2 if kind == "accumulating" else 1
        self.max_norm = 0.1 if kind == "clipping" else None
        self.norm_type = 2.0
        self.optimizer = self.make_optimizer(list(self.model.parameters()))
        self.data = torch.Generator().manual_seed(0 if kind in ("tp", "pipelined") else mesh.rank)
        self.change_tokens: Callable[[list[Tensor]], list[Tensor]] = lambda parts: parts
        self.change_loss: Callable[[Tensor], Tensor] = lambda loss: loss / self.num_parts
        self.change_sent: Callable[[Tensor, str], Tensor] = lambda x, _: x
        self.between: Callable[[int], None] = lambda _: None
        self.after_clipping: Callable[[], None] = lambda: None
        for defect in defects:
            DEFECTS[kind, defect].put_in(self)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW, over lists or parameter by parameter."""
        if self.kind == "fused":
            return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=self.kind not in ("clipping", "tp"))

    def gradients_of(self, tokens: Tensor) -> Tensor | None:
        """Forward and backward of one part of the batch."""
        if self.kind == "pipelined":
            return self.pipelined(tokens)
        loss = self.change_loss(cross_entropy(self.run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        loss.backward()
        return loss.detach()

    def pipelined(self, tokens: Tensor) -> Tensor | None:
        """Rank 0 has the first block, rank 1 the second and the loss."""
        shape = (*tokens[:, :-1].shape, DIM)
        if self.rank == 0:
            x = self.model.blocks[0](self.model.embedding(tokens[:, :-1]))
            dist.send(self.change_sent(x.detach(), "forward"), 1)
            gradient = torch.zeros(shape)
            dist.recv(gradient, 1)
            x.backward(gradient)
            return None
        x = torch.zeros(shape)
        dist.recv(x, 0)
        x.requires_grad_()
        logits = self.model.output(self.model.blocks[1](x))
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert x.grad is not None
        dist.send(self.change_sent(x.grad, "backward"), 0)
        return loss.detach()

    def step(self, index: int) -> Tensor | None:
        """Take one step, and return the loss on a rank that has one."""
        tokens = torch.randint(VOCABULARY, (4, 9), generator=self.data)
        parts = self.change_tokens(list(tokens.chunk(self.num_parts)))
        losses = []
        for number, part in enumerate(parts):
            losses.append(self.gradients_of(part))
            self.between(number)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, self.norm_type, foreach=True)
            self.after_clipping()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if None in losses else torch.stack(losses).sum()  # type: ignore[arg-type]

    def loop(self) -> None:
        """Train for some steps, as a framework does that owns the loop."""
        for index in range(9):
            self.step(index)

    def watched(self) -> WatchedStep:
        """The system that shows what a step leaves."""
        if self.kind == "loop":
            return watch(train=self.loop, model=self.model)
        return watch(self.step, model=self.run, optimizer=self.optimizer)


class Defect(NamedTuple):
    """What is wrong, and which call is to blame for it: any of these operators, in this module and direction."""

    put_in: Callable[[Any], None]
    module: str | None
    direction: str
    operators: tuple[str, ...]
    rank: int | None = None


def on_rank(rank: int, put_in: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """The same on one rank alone."""
    return lambda trainer: put_in(trainer) if trainer.rank == rank else None


def tanh_gelu(block: int) -> Callable[[Trainer], None]:
    """Another approximation of an activation."""
    return lambda t: setattr(t.model.blocks[block], "activation", partial(gelu, approximate="tanh"))


def other_eps(block: int) -> Callable[[Trainer], None]:
    """A norm's other eps."""
    return lambda t: setattr(t.model.blocks[block].norm, "eps", 1e-3)


def setting(name: str, value: object) -> Callable[[Trainer], None]:
    """An optimizer's other setting."""
    return lambda t: t.optimizer.param_groups[0].update({name: value})


def scaled_input(module: str) -> Callable[[Trainer], None]:
    """What a module is given, times a little more than 1."""

    def put_in(trainer: Trainer) -> None:
        scale = lambda _, args: (args[0] * 1.01, *args[1:])  # noqa: E731
        trainer.model.get_submodule(module).register_forward_pre_hook(scale)

    return put_in


def scaled_gradient(parameter: str) -> Callable[[Trainer], None]:
    """A parameter's gradient, times a little more than 1."""
    return lambda t: void(t.model.get_parameter(parameter).register_hook(lambda grad: grad * 1.01))


def void(_: object) -> None:
    """Nothing of it."""


def without_sync(trainer: Trainer) -> None:
    """Gradients of which none is summed over ranks."""
    trainer.run.require_backward_grad_sync = False  # type: ignore[assignment]


def rounding_hook(trainer: Trainer) -> None:
    """Gradients rounded before they are summed."""

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        rounded = bucket.buffer().bfloat16().float().div_(2)
        dist.all_reduce(rounded)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(rounded)
        return done

    assert isinstance(trainer.run, DistributedDataParallel)
    trainer.run.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # which may have no types as words


def each_gradient(change: Callable[[Tensor], object]) -> Callable[[Trainer], None]:
    """Between two micro-batches, every gradient so far changed in place."""

    def between(trainer: Trainer, number: int) -> None:
        for parameter in trainer.model.parameters() if number == 0 else ():
            assert isinstance(parameter.grad, DTensor)
            change(parameter.grad._local_tensor)

    return lambda t: setattr(t, "between", partial(between, t))


def tanh_gelu_late(trainer: Trainer) -> None:
    """The second micro-batch has the other activation."""
    trainer.between = lambda _: tanh_gelu(1)(trainer)


def summed_not_averaged(trainer: Trainer) -> None:
    """One block's gradients, of which gloo has no scaled sum."""
    block: Any = trainer.model.blocks[1]
    block.set_gradient_divide_factor(1.0)
    block.set_force_sum_reduction_for_comms(True)


def reduced_once(trainer: Trainer) -> None:
    """Gradients of two micro-batches are summed on each rank first, and over ranks once."""
    model: Any = trainer.model
    model.set_requires_gradient_sync(False)
    trainer.between = lambda _: model.set_requires_gradient_sync(True)


def scaled_late(trainer: Trainer) -> None:
    """One gradient is changed once it was clipped."""

    def change() -> None:
        gradient = trainer.model.output.weight.grad
        assert isinstance(gradient, DTensor)
        gradient._local_tensor.mul_(1.01)

    trainer.after_clipping = change


def sent(direction: str, change: Callable[[Tensor], Tensor]) -> Callable[[Trainer], None]:
    """What one stage sends to the other, changed."""
    return lambda t: setattr(t, "change_sent", lambda x, way: change(x) if way == direction else x)


def left_out(trainer: Trainer) -> None:
    """A parameter that the update never sees."""
    kept = [p for name, p in trainer.model.named_parameters() if name != LEFT_OUT]
    trainer.optimizer = trainer.make_optimizer(kept)


def swapped(trainer: Trainer) -> None:
    """Two gradients change places in the bucket that FSDP2 reduces."""
    names, inner = ("blocks.1.norm.weight", "blocks.1.norm.bias"), param_group.foreach_reduce

    def reduce(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        found = [i for i, parameter in enumerate(parameters) if parameter._param_fqn in names]
        if len(found) == 2:
            first, second = found
            gradients[first], gradients[second] = gradients[second], gradients[first]
        return inner(parameters, gradients, *args, **kwargs)

    param_group.foreach_reduce = reduce


class RoundedReduce:
    """FSDP2's reduce-scatter, of rounded gradients."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As the default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Round, then reduce."""
        input_tensor.copy_(input_tensor.bfloat16())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduced_in_bfloat16(trainer: Trainer) -> None:
    """One block's gradients are rounded where FSDP2 reduces them."""
    block: Any = trainer.model.blocks[1]
    block.set_custom_reduce_scatter(RoundedReduce())


def exchanged_by_hook(trainer: Trainer) -> None:
    """Two gradients change places within DDP's bucket, before it is summed."""

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        norm = trainer.model.blocks[1].norm
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        found = [gradient for parameter, gradient in pairs if parameter is norm.weight or parameter is norm.bias]
        if len(found) == 2:
            kept = found[0].clone()
            found[0].copy_(found[1])
            found[1].copy_(kept)
        summed = bucket.buffer().div_(2)
        dist.all_reduce(summed)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(summed)
        return done

    assert isinstance(trainer.run, DistributedDataParallel)
    trainer.run.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def scaled_in_place(module: str) -> Callable[[Trainer], None]:
    """A module's output, written over by a hook."""
    return lambda t: void(t.model.get_submodule(module).register_forward_hook(lambda *given: given[2].mul_(1.01)))


def summed_again(module: str) -> Callable[[Trainer], None]:
    """A module's output, summed over ranks once more."""

    def again(_: nn.Module, args: object, output: Tensor) -> Tensor:
        summed = output.clone()
        dist.all_reduce(summed)
        return summed

    return lambda t: void(t.model.get_submodule(module).register_forward_hook(again))


def shard_of_rank_0(trainer: Trainer) -> None:
    """A rank that begins with another one's part of a weight."""
    weight = trainer.model.blocks[1].up.weight
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor()
    if trainer.rank == 1:
        with torch.no_grad():
            weight._local_tensor.copy_(whole[:DIM])


def one_lost(trainer: Trainer) -> None:
    """Of the first micro-batch one gradient is dropped."""

    def between(number: int) -> None:
        if number == 0:
            trainer.model.blocks[1].up.weight.grad = None

    trainer.between = between


def second_weighs_more(trainer: Trainer) -> None:
    """The micro-batches' losses are divided by 2, then by 1.9."""
    divisors = iter([2, 1.9])
    trainer.change_loss = lambda loss: loss / next(divisors)


def clipped_twice(trainer: Trainer) -> None:
    """The gradients are clipped again, to half of the norm."""
    trainer.after_clipping = lambda: void(nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.05, foreach=True))


def one_not_clipped(trainer: Trainer) -> None:
    """Clipping does not see the output's gradient."""
    kept = [p for name, p in trainer.model.named_parameters() if name != "output.weight"]
    trainer.model.parameters = lambda recurse=True: iter(kept)  # type: ignore[method-assign, assignment]


def other_gradient_alone(trainer: Trainer) -> None:
    """An activation that gives what it should, and another gradient."""
    trainer.model.blocks[1].activation = lambda x: gelu(x) + (x - x.detach())


GELU, NORM = ("gelu",), ("native_layer_norm",)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
MUL = ("mul",)
ADDCMUL = ("_foreach_mul_", "_foreach_addcmul_")  # of states that are zero still, the first gives what it should

DEFECTS: dict[tuple[str, str], Defect] = {
    ("fsdp2", "tanh_gelu"): Defect(tanh_gelu(1), "blocks.1", FORWARD, GELU),
    ("fsdp2", "other_eps"): Defect(other_eps(0), "blocks.0.norm", FORWARD, NORM),
    ("fsdp2", "scaled_on_rank_1"): Defect(on_rank(1, scaled_input("blocks.0.up")), "blocks.0.up", FORWARD, MUL, 1),
    ("fsdp2", "decay"): Defect(setting("weight_decay", 0.3), None, UPDATE, ("_foreach_mul_",)),
    ("fsdp2", "beta"): Defect(setting("betas", (0.8, 0.999)), None, UPDATE, ("_foreach_lerp_",)),
    ("fsdp2", "summed"): Defect(
        summed_not_averaged,
        "blocks.1",
        BACKWARD,
        ("_reduce_scatter_base_", "div", "mul"),
    ),
    ("fsdp2", "alpha"): Defect(lambda t: setattr(t.model.blocks[1], "alpha", 0.99), "blocks.1", FORWARD, ("add",)),
    ("fsdp2", "lr"): Defect(setting("lr", 2e-3), None, UPDATE, ("_foreach_mul_",)),  # which decays, by lr
    ("fsdp2", "reduced_in_bfloat16"): Defect(reduced_in_bfloat16, "blocks.1", BACKWARD, ("_to_copy", "copy_")),
    ("ddp", "exchanged_by_hook"): Defect(exchanged_by_hook, None, BACKWARD, ("copy_",)),
    ("ddp", "scaled_in_place"): Defect(scaled_in_place("embedding"), "embedding", FORWARD, ("mul_",)),
    ("ddp", "tanh_gelu"): Defect(tanh_gelu(0), "blocks.0", FORWARD, GELU),
    ("ddp", "no_sync"): Defect(without_sync, None, BACKWARD, ("allreduce_", "div_")),
    ("ddp", "other_tokens_on_rank_1"): Defect(
        on_rank(1, lambda t: setattr(t, "change_tokens", lambda parts: [part.flip(0) for part in parts])),
        "",
        FORWARD,
        ("flip",),
        1,
    ),
    ("ddp", "beta"): Defect(setting("betas", (0.9, 0.99)), None, UPDATE, ADDCMUL),
    ("ddp", "more_loss_on_rank_1"): Defect(
        on_rank(1, lambda t: setattr(t, "change_loss", lambda loss: loss * 1.01)), "", FORWARD, MUL, 1
    ),
    ("ddp", "scaled_gradient"): Defect(scaled_gradient("blocks.1.down.weight"), "blocks.1.down", BACKWARD, MUL),
    ("ddp", "rounded_bucket"): Defect(rounding_hook, None, BACKWARD, ("_to_copy",)),
    ("tp", "tanh_gelu"): Defect(tanh_gelu(0), "blocks.0", FORWARD, GELU),
    ("tp", "tanh_gelu_on_rank_1"): Defect(on_rank(1, tanh_gelu(0)), "blocks.0", FORWARD, GELU, 1),
    ("tp", "other_eps"): Defect(other_eps(1), "blocks.1.norm", FORWARD, NORM),
    ("tp", "scaled_gradient_on_rank_1"): Defect(
        on_rank(1, scaled_gradient("blocks.1.norm.weight")), "blocks.1.norm", BACKWARD, MUL, 1
    ),
    ("tp", "scaled_on_rank_1"): Defect(on_rank(1, scaled_input("blocks.0.down")), "blocks.0.down", FORWARD, MUL, 1),
    ("tp", "alpha"): Defect(lambda t: setattr(t.model.blocks[0], "alpha", 1.01), "blocks.0", FORWARD, ("add",)),
    ("tp", "summed_again"): Defect(summed_again("blocks.1.down"), "blocks.1.down", FORWARD, ("allreduce_", "clone")),
    ("tp", "shard_of_rank_0"): Defect(shard_of_rank_0, "blocks.1.up", FORWARD, ("mm",), 1),
    ("tp", "eps"): Defect(setting("eps", 1e-4), None, UPDATE, ("add",)),
    ("pipelined", "tanh_gelu"): Defect(tanh_gelu(1), "blocks.1", FORWARD, GELU, 1),
    ("pipelined", "other_eps"): Defect(other_eps(0), "blocks.0.norm", FORWARD, NORM, 0),
    ("pipelined", "sends_rounded"): Defect(
        sent("forward", lambda x: x.bfloat16().float()), "", FORWARD, ("_to_copy",), 0
    ),
    ("pipelined", "sends_back_more"): Defect(sent("backward", lambda x: x * 1.01), "", BACKWARD, MUL, 1),
    ("pipelined", "decay_on_rank_0"): Defect(
        on_rank(0, setting("weight_decay", 0.3)), None, UPDATE, ("_foreach_mul_",), 0
    ),
    ("accumulating", "not_divided"): Defect(
        lambda t: setattr(t, "change_loss", lambda loss: loss), "", FORWARD, ("div", "mul")
    ),
    ("accumulating", "one_lost"): Defect(one_lost, "blocks.1", BACKWARD, ("add", "add_")),
    ("accumulating", "second_weighs_more"): Defect(second_weighs_more, "", FORWARD, ("div", "mul")),
    ("accumulating", "repeated"): Defect(
        lambda t: setattr(t, "change_tokens", lambda parts: [parts[0], parts[0]]), "", FORWARD, ("slice", "embedding")
    ),
    ("accumulating", "first_is_lost"): Defect(each_gradient(lambda g: g.zero_()), None, BACKWARD, ("zero_",)),
    ("accumulating", "rounded"): Defect(
        each_gradient(lambda g: g.copy_(g.bfloat16())), None, BACKWARD, ("_to_copy", "copy_")
    ),
    ("accumulating", "reduced_once"): Defect(  # all modules' gradients, of which the output's is the first in backward
        reduced_once, "output", BACKWARD, ("_reduce_scatter_base_", "chunk_cat", "add_")
    ),
    ("accumulating", "tanh_gelu_in_the_second"): Defect(tanh_gelu_late, "blocks.1", FORWARD, GELU),
    ("clipping", "max_norm"): Defect(lambda t: setattr(t, "max_norm", 0.05), None, UPDATE, ("mul", "div")),
    ("clipping", "max_norm_of_rank_1"): Defect(
        on_rank(1, lambda t: setattr(t, "max_norm", 0.05)), None, UPDATE, ("mul", "div"), 1
    ),
    ("clipping", "norm_type"): Defect(
        lambda t: setattr(t, "norm_type", 1.0), None, UPDATE, ("_foreach_norm", "linalg_vector_norm")
    ),
    ("clipping", "clipped_twice"): Defect(
        clipped_twice, None, UPDATE, ("_foreach_norm", "linalg_vector_norm", *MUL, "_foreach_mul_")
    ),
    ("clipping", "one_not_clipped"): Defect(
        one_not_clipped, None, UPDATE, ("stack", "linalg_vector_norm", "_foreach_norm")
    ),
    ("clipping", "scaled_late"): Defect(scaled_late, None, UPDATE, ("mul_",)),
    ("clipping", "other_eps"): Defect(other_eps(1), "blocks.1.norm", FORWARD, NORM),
    ("clipping", "swapped"): Defect(swapped, "blocks.1", BACKWARD, ("chunk_cat",)),
    ("fused", "left_out_on_rank_1"): Defect(on_rank(1, left_out), None, UPDATE, ("_fused_adamw_",), 1),
    ("loop", "tanh_gelu"): Defect(tanh_gelu(1), "blocks.1", FORWARD, GELU),
    ("loop", "beta"): Defect(setting("betas", (0.9, 0.99)), None, UPDATE, ADDCMUL),
    ("compiled", "tanh_gelu"): Defect(tanh_gelu(1), "blocks.1", FORWARD, ("gelu",)),
    ("compiled", "other_eps"): Defect(other_eps(0), "blocks.0.norm", FORWARD, NORM),
    ("compiled", "rounded_gradient"): Defect(
        lambda t: void(t.model.blocks[0].up.weight.register_hook(lambda grad: grad.bfloat16().float())),
        "blocks.0.up",
        BACKWARD,
        ("_to_copy",),
    ),
    ("compiled", "other_gradient_alone"): Defect(other_gradient_alone, "blocks.1", BACKWARD, ("add", "sub", "neg")),
    ("compiled", "alpha"): Defect(lambda t: setattr(t.model.blocks[1], "alpha", 0.99), "blocks.1", FORWARD, ("add",)),
    ("compiled", "decay"): Defect(setting("weight_decay", 0.3), None, UPDATE, ("_foreach_mul_",)),
}


def asked_for(name: str, kinds: Iterable[str], known: Mapping[tuple[str, str], Defect]) -> tuple[str, list[str]]:
    """The kind and the defects in a factory's name. Raises AttributeError for an unknown kind or defect.

    Example: `ddp__tanh_gelu__beta` is a trainer of kind `ddp` with two independent defects.
    """
    kind, *defects = name.split("__")
    if kind not in kinds or any((kind, defect) not in known for defect in defects):
        raise AttributeError(name)
    return kind, defects


def __getattr__(name: str) -> Any:
    """The factory of a system: a kind, then two underscores and a defect, any number of times."""
    kind, defects = asked_for(name, KINDS, DEFECTS)
    return lambda case, mesh: Trainer(case, mesh, kind, defects).watched()
