"""Megatron's sum over tensor-parallel ranks is lost where a gradient is not contiguous: https://github.com/NVIDIA/Megatron-LM/issues/5337"""

import torch
from loops import DIM
from megatron.core.tensor_parallel import mappings
from torch import distributed, nn

import bitproof


def right(rows, group):
    """The sum of what it is given, and not of a copy that nobody keeps."""
    rows = rows.contiguous()
    distributed.all_reduce(rows, group=group)
    return rows


class Parallel(nn.Module):
    """Two layers divided among the ranks by columns and by rows, behind one that all ranks have."""

    def __init__(self, mesh):
        super().__init__()
        ranks = distributed.get_world_size()
        self.encoder = nn.Linear(DIM, DIM)
        wide, narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.columns = nn.Parameter(wide.weight.detach().chunk(ranks, 0)[mesh.rank].clone())
        self.rows = nn.Parameter(narrow.weight.detach().chunk(ranks, 1)[mesh.rank].clone())

    def forward(self, x):
        """From (sequence, batch, DIM) to (batch, sequence, DIM), as heads outside of Megatron want it."""
        group = distributed.group.WORLD
        hidden = mappings.copy_to_tensor_model_parallel_region(self.encoder(x), group=group)
        hidden = hidden.transpose(0, 1).contiguous()
        partial = nn.functional.gelu(hidden @ self.columns.T) @ self.rows.T
        return mappings.reduce_from_tensor_model_parallel_region(partial, group=group)


def candidate(case, mesh):
    if case.options.get("mended"):
        mappings._reduce = right
    model = Parallel(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)  # all ranks have one batch

    def step(index):
        x = torch.randn(8, 2, DIM, generator=data)
        loss = (model(x) - x.transpose(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)


def reference(case, mesh):
    mappings._reduce = right
    return candidate(case, mesh)
