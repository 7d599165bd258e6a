"""Attention over a sequence that is split over several ranks, compared with a whole sequence, as systems.

    bitproof run -k context_parallel

    whole       a single rank has the sequence
    ring        keys and values are sent from rank to rank, part by part
    gathered    each rank gathers all keys and values at once, and uses the parts in the same order

Every sum has a fixed order:

- Forward: a rank uses its own part of keys and values first, then the previous rank's, and so on. For example, rank 2
  of 4 uses parts 2, 1, 0; the causal mask excludes part 3.
- A part's result is merged into the running result. The weights of the two follow from the scores' sums of
  exponentials.
- Backward: each part visits the ranks in ascending order, beginning with its own, and its gradients are added in that
  order. Then an all-reduce sums the gradient of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy, gelu

from bitproof import Case, Mesh

VOCABULARY, DIM, HEADS, SEQUENCES, LENGTH = 61, 16, 2, 2, 32
"""Default sizes, which the case's options `dim`, `rows` and `length` override."""

Parts = tuple[Tensor, ...]


@dataclass
class SequenceRing:
    """The ranks that share a sequence. Each has a part of equal length.

    - `rank`: this process's index among them.
    - `ranks`: their number.
    - `is_gathered`: True if a rank gets all parts at once. Otherwise parts are sent from rank to rank.
    """

    rank: int
    ranks: int
    is_gathered: bool = False

    def turn(self, tensors: Parts) -> Parts:
        """Send tensors to the next rank, and return those of the previous rank."""
        if self.ranks == 1:
            return tensors
        found = tuple(torch.empty_like(x) for x in tensors)
        calls = [dist.P2POp(dist.isend, x, (self.rank + 1) % self.ranks) for x in tensors]
        calls += [dist.P2POp(dist.irecv, x, (self.rank - 1) % self.ranks) for x in found]
        # One batch for all sends and receives: ranks that each send first would wait for each other.
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return found

    def parts(self, tensors: Parts) -> Iterator[tuple[int, Parts]]:
        """Yield (rank, its tensors) in descending order from this rank. On rank 1 of 4, the order is 1, 0, 3, 2.

        All tensors are contiguous, as rounding may depend on strides.
        """
        tensors = tuple(x.contiguous() for x in tensors)
        if self.is_gathered:
            everyone = [self._gather(x) for x in tensors]
            for turn in range(self.ranks):
                owner = (self.rank - turn) % self.ranks
                yield owner, tuple(of_ranks[owner] for of_ranks in everyone)
            return
        for turn in range(self.ranks):
            yield (self.rank - turn) % self.ranks, tensors
            if turn + 1 < self.ranks:
                tensors = self.turn(tensors)

    def _gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(found, x) if self.ranks > 1 else found[0].copy_(x)
        return found

    def returned(self, shares: dict[int, Parts]) -> Parts:
        """Return the gradient of this rank's part of the sequence: the sum of every rank's share of it.

        `shares[i]` is this rank's share for rank i. Rank 1 of 4 adds the shares of ranks 1, 2, 3, 0.
        """
        total = shares[self.rank]
        for turn in range(1, self.ranks):
            # Each rank sends to the rank `turn` before it, and so receives from the rank `turn` behind it.
            there, here = (self.rank - turn) % self.ranks, (self.rank + turn) % self.ranks
            found = tuple(torch.empty_like(x) for x in total)
            calls = [dist.P2POp(dist.isend, x.contiguous(), there) for x in shares[there]]
            calls += [dist.P2POp(dist.irecv, x, here) for x in found]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            total = tuple(a + b for a, b in zip(total, found, strict=True))
        return total


def scores_of(q: Tensor, k: Tensor, owner: int, rank: int) -> Tensor:
    """Return causal scores (.., L, L), for the queries of the rank `rank` and the keys of the rank `owner`.

    `q` and `k` are their parts of the sequence, (.., L, D).
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    own, other = (torch.arange(q.shape[-2]) + at * q.shape[-2] for at in (rank, owner))
    return scores.masked_fill(other[None, :] > own[:, None], -torch.inf)


class RingAttention(torch.autograd.Function):
    """Computes softmax(q kᵀ) v, one part of the keys after another.

    Tensors are (sequences, heads, length of a part, D).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: SequenceRing) -> Tensor:
        """Return the output for this rank's queries. The results of the parts of keys are merged in ring order."""
        out, total = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        for owner, (k_part, v_part) in ring.parts((k, v)):
            if owner > ring.rank:
                continue  # the causal mask excludes all of these keys
            scores = scores_of(q, k_part, owner, ring.rank)
            part = scores.logsumexp(-1, keepdim=True)
            # `total` and `part` are logarithms of sums of exponentials. Both results are rescaled to the merged sum.
            merged = torch.logaddexp(total, part)
            out = out * (total - merged).exp() + ((scores - part).exp() @ v_part) * (part - merged).exp()
            total = merged
        ctx.save_for_backward(q, k, v, out, total)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of q, k and v.

        Keys and values go around the ring again. Then each rank sends its share of a part's gradients to the rank with
        the part.
        """
        (q, k, v, out, total), ring, grad = ctx.saved_tensors, ctx.ring, grads[0]
        # As in FlashAttention's backward: the gradient of the softmax's sum, from the output alone.
        inner = (grad * out).sum(-1, keepdim=True)
        dq, shares = torch.zeros_like(q), dict[int, Parts]()
        for owner, (k_part, v_part) in ring.parts((k, v)):
            weights = (scores_of(q, k_part, owner, ring.rank) - total).exp()
            ds = weights * (grad @ v_part.transpose(-1, -2) - inner) * q.shape[-1] ** -0.5
            dq = dq + ds @ k_part
            shares[owner] = ds.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
        dk, dv = ring.returned(shares)
        return dq, dk, dv, None


def plain_attention(q: Tensor, k: Tensor, v: Tensor, ring: SequenceRing) -> Tensor:
    return scores_of(q, k, 0, 0).softmax(-1) @ v


class Attend(nn.Module):
    """A module that splits its input into queries, keys and values, and applies an attention function to them."""

    def __init__(self, ring: SequenceRing, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.ring, self.attend = ring, attend

    def forward(self, qkv: Tensor) -> Tensor:
        """Map (sequences, length, 3 * HEADS * D) to (sequences, length, HEADS * D)."""
        # (sequences, length, 3, heads, D) to 3 tensors (sequences, heads, length, D).
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, self.ring).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """A residual layer of causal attention."""

    def __init__(self, dim: int, attend: Attend) -> None:
        super().__init__()
        self.norm, self.qkv, self.attend, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            attend,
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(self.attend(self.qkv(self.norm(x))))
        return y


class Mlp(nn.Module):
    """A residual MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return y


class RingLoop:
    """A training run on this rank's part of each sequence.

    It stores every module's output, and the output's gradient.
    """

    def __init__(self, case: Case, mesh: Mesh, attend: Callable[..., Tensor], *, is_gathered: bool = False) -> None:
        size = {"dim": DIM, "rows": SEQUENCES, "length": LENGTH, **case.options}
        self.rows, self.length = size["rows"], size["length"]
        self.ring = SequenceRing(mesh.rank, case.parallelism.world_size, is_gathered)
        self.independent_ranks = self.ring.ranks == 1
        dim = size["dim"]
        layers = [layer for _ in range(2) for layer in (Attention(dim, Attend(self.ring, attend)), Mlp(dim))]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, dim), *layers, nn.Linear(dim, VOCABULARY, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.data = torch.Generator().manual_seed(1000 + case.seed)
        self.grid = init_device_mesh("cpu", (self.ring.ranks,))
        self.shown: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if name:
                # `name` as a default: the closure would otherwise read the loop's last name.
                module.register_forward_hook(lambda module, args, out, name=name: self.note(name, out))

    def note(self, name: str, out: Tensor) -> None:
        self.shown[f"{name}@forward"] = out.detach()
        out.register_hook(lambda grad: self.shown.update({f"{name}@backward": grad.detach()}))

    def batch(self) -> Tensor:
        # All ranks draw the whole text.
        tokens = torch.randint(VOCABULARY, (self.rows, self.length + 1), generator=self.data)
        share = self.length // self.ring.ranks
        # One token more: it is the label of the part's last token.
        return tokens[:, self.ring.rank * share : (self.ring.rank + 1) * share + 1]

    def backward(self) -> Tensor:
        """Compute the gradients of the mean loss over all ranks' tokens. Returns that loss."""
        tokens = self.batch()
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        # Divided by all ranks' tokens, so that the sum over ranks is the mean.
        loss = loss / (self.rows * self.length)
        loss.backward()
        total = loss.detach().clone()
        for x in [total, *(p.grad for p in self.model.parameters())] if self.ring.ranks > 1 else []:
            dist.all_reduce(x)
        return total

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take a step, and yield (kind, name, tensor) for each value."""
        self.shown.clear()
        loss = self.backward()
        for name, x in self.shown.items():
            yield "activation", name, DTensor.from_local(x.contiguous(), self.grid, [Shard(1)])
        yield "loss", "loss", loss
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield "grad", name, parameter.grad
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, parameter
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", value
        yield "buffer", "data@after_optimizer", self.data.get_state()
        self.optimizer.zero_grad()


def whole(case: Case, mesh: Mesh) -> RingLoop:
    return RingLoop(case, mesh, plain_attention)


def ring(case: Case, mesh: Mesh) -> RingLoop:
    return RingLoop(case, mesh, RingAttention.apply)


def gathered(case: Case, mesh: Mesh) -> RingLoop:
    return RingLoop(case, mesh, RingAttention.apply, is_gathered=True)
