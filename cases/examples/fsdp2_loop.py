"""A training loop in plain PyTorch with FSDP2, as a system; and three variants that look equivalent.

    bitproof run -k loop

    plain           the loop
    checkpointed    backward recomputes each block's activations: the same bits
    kept_gathered   parameters stay gathered from forward to backward: the same bits
    bf16_reduce     gradients are summed over ranks in bfloat16: other bits

In `Loop.step`, only the lines with `yield` are for bitproof. Gradients and parameters are DTensors, and each rank
yields its own shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from bitproof import Case, Mesh

VOCABULARY, DIM = 64, 32


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class LanguageModel(nn.Module):
    """Predicts each token from the previous token."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.output(x)
        return logits


class Loop:
    """A rank of the training run. Only its `yield` statements are for bitproof."""

    def __init__(
        self,
        case: Case,
        mesh: Mesh,
        *,
        checkpointed: bool = False,
        reshard_after_forward: bool = True,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        self.device = mesh.device
        # bitproof seeds torch with the case's seed on every rank, so all ranks start from the same parameters.
        self.model = LanguageModel(checkpointed).to(self.device)
        # The blocks first: what is left of the model then gets a group of its own.
        for module in (*self.model.blocks, self.model):
            fully_shard(
                module,
                mesh=init_device_mesh(self.device.type, (case.parallelism.world_size,)),
                mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce),
                reshard_after_forward=reshard_after_forward,
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=case.optimizer.lr)
        self.batch = case.batch
        self.data = torch.Generator().manual_seed(1000 * case.seed + mesh.rank)

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take a step, and yield (kind, name, tensor) for each value."""
        size = (self.batch.sequences, self.batch.seq_len + 1)
        text = torch.randint(VOCABULARY, size, generator=self.data).to(self.device)
        logits = self.model(text[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        yield "loss", "loss", loss
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield "grad", name, parameter.grad

        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, parameter
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", value
        self.optimizer.zero_grad()


def plain(case: Case, mesh: Mesh) -> Loop:
    return Loop(case, mesh)


def checkpointed(case: Case, mesh: Mesh) -> Loop:
    return Loop(case, mesh, checkpointed=True)


def kept_gathered(case: Case, mesh: Mesh) -> Loop:
    return Loop(case, mesh, reshard_after_forward=False)


def bf16_reduce(case: Case, mesh: Mesh) -> Loop:
    return Loop(case, mesh, reduce=torch.bfloat16)
