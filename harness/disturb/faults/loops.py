"""Faults in built-in training loops: when the layout changes, at a resume, and in the division of a batch.

Each fault replaces a method of the loop on every rank, as if the loop's author had made the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bitproof.harness.case import Kind
from bitproof.harness.disturb.entry import ANY, Need, Site, row
from bitproof.harness.disturb.faults.clock import NOW

Loop = Any
"""A training loop of `cases/examples`: a `MeshLoop`, a `RingLoop`, or a watched `pipelined.StagedRun`."""


def _candidate(*names: str) -> Need:
    endings = tuple(f".examples.{name}" for name in names)
    return Need(lambda case: case.candidate.endswith(endings), f"the candidate {' or '.join(names)}")


EXPERTS = _candidate("mesh_loop:ep")
SHARDED = _candidate("mesh_loop:fsdp", "mesh_loop:fsdp_tp", "mesh_loop:hsdp")
REPLICATED = _candidate("mesh_loop:hsdp")
MESH = _candidate("mesh_loop:ddp", "mesh_loop:fsdp", "mesh_loop:fsdp_tp", "mesh_loop:hsdp", "mesh_loop:ep")
UNEVEN = _candidate("mesh_loop:uneven_halves")
RING = _candidate("ring_attention:ring")
STAGES = _candidate("pipelined:gpipe", "pipelined:one_f_one_b")
GOES_ON = Need(lambda case: case.resume_at is not None, "a candidate that ends and goes on")
GOES_THROUGH = Need(lambda case: case.resume_at is None, "a candidate that does not end half-way")

_SEEN: tuple[Kind, ...] = ("activation", "loss", "grad")


def _after_backward(loop: Loop, change: Callable[[], Any]) -> None:
    own = loop.backward

    def backward() -> Any:
        total = own()
        change()
        return total

    loop.backward = backward


def _after_load(loop: Loop, change: Callable[[], Any]) -> None:
    own = loop.load

    def load(folder: Any) -> None:
        import torch

        own(folder)
        with torch.no_grad():
            change()

    loop.load = load


def _shard_of_neighbour(part: Any) -> Any:
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(NOW.world_size)]
    dist.all_gather(parts, part.clone())
    return parts[(NOW.rank + 1) % NOW.world_size]


@row(
    "ours: a number of ranks that is another group's",
    runner=True,
    needs=(EXPERTS,),
    kinds=("grad",),
    sites=(Site("blocks.1", "backward", None, ANY),),
)
def expert_gradient_doubled(loop: Loop) -> None:
    """experts' gradients are divided by a group's size instead of the world size."""
    # As if divided by the size of a group of half of the ranks.
    _after_backward(loop, lambda: loop.experts.weight.grad.mul_(2))


@row(
    "TTrace's kind: a missing all-reduce of a parameter that ranks share",
    runner=True,
    needs=(EXPERTS,),
    kinds=("grad",),
    sites=(Site("blocks.1.norm", "backward", None, ANY),),
)
def norm_gradient_not_summed(loop: Loop) -> None:
    """each rank has only its own gradient of a norm, without the sum over ranks."""
    # The hook keeps this rank's own gradient, before the loop sums it over ranks.
    norm, found = loop.experts.norm.weight, list[Any]()
    norm.register_hook(lambda grad: found.append(grad.clone()))
    _after_backward(loop, lambda: norm.grad.copy_(found.pop() / loop.world))


@row(
    "ours: parts by the wrong coordinate",
    runner=True,
    needs=(SHARDED, GOES_THROUGH),
    kinds=_SEEN,
    sites=(Site("blocks.0", "forward", None, ANY), Site("blocks.0.up", "forward", None, ANY)),
)
def shards_exchanged(loop: Loop) -> None:
    """each rank starts with its neighbour's shard of a matrix."""
    import torch

    part = loop.model.blocks[0].up.weight.to_local()
    with torch.no_grad():
        part.copy_(_shard_of_neighbour(part))


@row(
    "ours: parts of a gradient by the wrong coordinate",
    runner=True,
    needs=(SHARDED, GOES_THROUGH),
    kinds=("grad",),
    sites=(Site("blocks.0.up", "backward", None, ANY), Site(None, "update", None, ANY)),
)
def gradient_shards_exchanged(loop: Loop) -> None:
    """each rank has its neighbour's shard of a matrix's gradient."""

    def exchange() -> None:
        part = loop.model.blocks[0].up.weight.grad.to_local()
        part.copy_(_shard_of_neighbour(part))

    _after_backward(loop, exchange)


@row(
    "ours: rows of a part in another order, which leaves every norm as it is",
    runner=True,
    needs=(SHARDED, GOES_THROUGH),
    kinds=_SEEN,
    sites=(Site("blocks.0", "forward", None, ANY), Site("blocks.0.up", "forward", None, ANY)),
)
def shard_rows_reversed(loop: Loop) -> None:
    """each rank starts with the rows of its shard of a matrix in reverse order."""
    import torch

    part = loop.model.blocks[0].up.weight.to_local()
    with torch.no_grad():
        part.copy_(part.flip(0))


@row(
    "ours: rows of a gradient's part in another order, which leaves every norm as it is",
    runner=True,
    needs=(SHARDED, GOES_THROUGH),
    kinds=("grad",),
    sites=(Site("blocks.0.up", "backward", None, ANY), Site(None, "update", None, ANY)),
)
def gradient_rows_reversed(loop: Loop) -> None:
    """each rank has the rows of its shard of a matrix's gradient in reverse order."""

    def reverse() -> None:
        part = loop.model.blocks[0].up.weight.grad.to_local()
        part.copy_(part.flip(0))

    _after_backward(loop, reverse)


@row(
    "ours: one group of replicas numbers its ranks otherwise",
    runner=True,
    needs=(REPLICATED, GOES_THROUGH),
    kinds=("grad",),
    sites=(Site("blocks.0.up", "backward", None, ANY),),
)
def one_replica_exchanges_shards(loop: Loop) -> None:
    """ranks of the first replica exchange shards of a gradient, so replicas diverge."""

    def exchange() -> None:
        part = loop.model.blocks[0].up.weight.grad.to_local()
        # All ranks call this collective, also those that do not use its result.
        other = _shard_of_neighbour(part)
        if 2 * NOW.rank < NOW.world_size:
            part.copy_(other)

    _after_backward(loop, exchange)


@row(
    "ours: a loader that one batch was taken from",
    runner=True,
    needs=(MESH, GOES_THROUGH),
    kinds=_SEEN,
    sites=(Site("embedding", "forward", None, ANY), Site("", "forward", None, ANY)),
)
def loader_one_batch_late(loop: Loop) -> None:
    """the loader has lost its first batch."""
    loop.batch()  # drawn, but used by no step


_DATA = tuple(Site(module, "forward", None, "randint") for module in ("embedding", "", None))
"""The sites of the operator call that draws a batch."""


@row(
    "Megatron-LM #6858: generators wrong on 252 of 256 ranks after a resume",
    runner=True,
    needs=(GOES_ON,),
    kinds=_SEEN,
    sites=_DATA,
)
def generator_not_restored(loop: Loop) -> None:
    """the data's generator restarts from its initial state after a resume."""
    begun = loop.data.get_state()
    _after_load(loop, lambda: loop.data.set_state(begun))


@row("ours: what a loader read ahead is lost", runner=True, needs=(GOES_ON,), kinds=_SEEN, sites=_DATA)
def batch_lost_by_a_resume(loop: Loop) -> None:
    """the loader loses a batch at a resume."""
    # The batch that it draws is dropped.
    _after_load(loop, loop.batch)


_MOMENTS = (Site("blocks.0.up", "update", None, "lerp_"), Site(None, "update", None, "lerp_"))
"""The sites of the first calls that read AdamW's first moments."""


@row(
    "ours: rows of an optimizer state's part in another order",
    runner=True,
    needs=(GOES_ON, SHARDED),
    kinds=("param", "optimizer"),
    sites=_MOMENTS,
)
def moment_rows_reversed(loop: Loop) -> None:
    """after a resume, the rows of each rank's shard of a first moment are in reverse order."""

    def reverse() -> None:
        part = loop.optimizer.state[loop.model.blocks[0].up.weight]["exp_avg"].to_local()
        part.copy_(part.flip(0))

    _after_load(loop, reverse)


@row(
    "ours: optimizer state of another part",
    runner=True,
    needs=(GOES_ON, SHARDED),
    kinds=("param", "optimizer"),
    sites=_MOMENTS,
)
def moments_of_the_wrong_shard(loop: Loop) -> None:
    """after a resume, each rank has its neighbour's shard of a first moment."""

    def exchange() -> None:
        part = loop.optimizer.state[loop.model.blocks[0].up.weight]["exp_avg"].to_local()
        part.copy_(_shard_of_neighbour(part))

    _after_load(loop, exchange)


@row(
    "Megatron-LM #7177: a learning rate that a restart does not restore",
    runner=True,
    needs=(GOES_ON,),
    kinds=("param", "optimizer"),
    sites=(Site("embedding", "update", None, "mul_"), Site(None, "update", None, "mul_")),
)
def schedule_not_restored(loop: Loop) -> None:
    """after a resume, the learning rate warms up a second time."""

    def restart() -> None:
        import torch

        # A new schedule counts from step 0 again.
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: min(1.0, (step + 1) / 4))

    _after_load(loop, restart)


@row(
    "https://huggingface.co/blog/gradient_accumulation: a mean of means",
    runner=True,
    needs=(UNEVEN,),
    kinds=("loss", "grad"),
    sites=(Site("", "forward", None, ANY),),
)
def mean_of_means(loop: Loop) -> None:
    """the means of micro-batches have equal weights in the loss, although their numbers of tokens differ."""
    own = loop.mean
    # Each micro-batch divides by its own number of tokens, as if all micro-batches had as many.
    loop.mean = lambda rows, tokens: own(rows, loop.count(rows) * loop.micro * loop.world)


@row(
    "ours: an accumulation that ends one early",
    runner=True,
    needs=(UNEVEN,),
    kinds=("loss", "grad"),
    sites=(Site("", "forward", None, ANY),),
)
def last_micro_batch_counts_half(loop: Loop) -> None:
    """the last micro-batch of a step has half its weight in the loss."""
    # A list, as the function below counts in it.
    own, turn = loop.mean, [0]

    def mean(rows: Any, tokens: Any) -> Any:
        turn[0] += 1
        return own(rows, tokens) * (0.5 if turn[0] % loop.micro == 0 else 1.0)

    loop.mean = mean


def _in_last_attention(*operators: str) -> tuple[Site, ...]:
    return tuple(Site(module, "backward", None, each) for module in ("3.attend", "3.qkv") for each in operators)


def _parts_in_backward(loop: Loop, other: Callable[[list[Any]], list[Any]]) -> None:
    own, ring = loop.ring.parts, loop.ring

    def parts(tensors: Any) -> Iterator[Any]:
        from bitproof.harness.torch_operators import backward_number

        # A part is the keys and values of a rank.
        found = own(tensors)
        # The number is -1 outside of backward.
        return found if backward_number() < 0 else iter(other(list(found)))

    ring.parts = parts


@row(
    "ours: a buffer that a ring hands on too early",
    runner=True,
    needs=(RING,),
    kinds=("activation", "grad"),
    sites=_in_last_attention("transpose", "bmm", "sub"),
)
def stale_keys_in_backward(loop: Loop) -> None:
    """the backward of ring attention uses each rank's values with the keys of the rank before it in the ring."""

    def stale(parts: list[Any]) -> list[Any]:
        # A part is `(owner, (keys, values))`. The first has no part before it, and keeps its own keys.
        keys = [parts[max(turn - 1, 0)][1][0] for turn in range(len(parts))]
        return [(owner, (k, v)) for k, (owner, (_, v)) in zip(keys, parts, strict=True)]

    _parts_in_backward(loop, stale)


@row(
    "ours: gradients that a ring returns to the wrong rank",
    runner=True,
    needs=(RING,),
    kinds=("activation", "grad"),
    sites=_in_last_attention("add", "stack"),
)
def gradients_of_keys_kept(loop: Loop) -> None:
    """the gradients of a rank's keys and values lack the shares that other ranks computed."""
    own = loop.ring.returned

    def returned(shares: Any) -> Any:
        # The exchange still runs, since the other ranks take part in it.
        own(shares)
        return shares[loop.ring.rank]

    loop.ring.returned = returned


@row(
    "ours: a ring that takes a turn too many",
    runner=True,
    needs=(RING,),
    kinds=("activation", "loss"),
    sites=tuple(Site("1.attend", "forward", None, operator) for operator in ("logaddexp", "_unsafe_view")),
)
def part_merged_twice(loop: Loop) -> None:
    """ring attention merges a rank's own keys and values a second time."""
    own = loop.ring.parts

    def parts(tensors: Any) -> Iterator[Any]:
        yield loop.ring.rank, tensors
        yield from own(tensors)

    loop.ring.parts = parts


@row(
    "ours: messages are found by an index",
    runner=True,
    needs=(STAGES,),
    kinds=("loss", "grad"),
    # The hook's own calls are of the layer that is about to run.
    sites=(Site("layer4", "forward", None, "sub"), Site("layer4", "forward", None, "add")),
)
def stage_reads_the_micro_batch_before(loop: Loop) -> None:
    """a stage computes with the previous micro-batch's activation."""
    # The first stage receives no activation.
    if NOW.rank == 0:
        return
    last: list[Any] = []
    # The stage's first layer is the one that reads the received activation.
    first = next(iter(loop.model.children()))

    def read(module: Any, args: Any) -> Any:
        last.append(args[0].detach())
        # The value of the micro-batch before, but the gradient of this input.
        return (args[0] + (last[max(len(last) - 2, 0)] - args[0]).detach(),)

    first.register_forward_pre_hook(read)
