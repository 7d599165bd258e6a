"""A convolution whose input is sharded by width: the input's gradient (pytorch #191926)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from bitproof import Case, Mesh


class Convolution:
    """Patches of an image, as a vision model embeds them; `dim` is the dim by which ranks share the image."""

    independent_ranks = True  # each has all that its patches need

    def __init__(self, dim: int | None) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.dim = dim
        self.model: nn.Module = nn.Conv2d(3, 8, 4, 4)
        if dim is not None:
            self.model = distribute_module(self.model, self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = torch.Generator().manual_seed(0)

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take one step, and yield each value as it is computed."""
        image = torch.randn(2, 3, 8, 32, generator=self.data)
        if self.dim is not None:
            image = distribute_tensor(image, self.mesh, [Shard(self.dim)])
        image.requires_grad_()
        loss = self.model(image).square().sum()
        loss.backward()
        yield "loss", "loss", whole(loss)
        assert image.grad is not None
        yield "grad", "image", image.grad
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield "grad", name, replicated(parameter.grad)
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, replicated(parameter)
            yield "optimizer", f"{name}.momentum", replicated(self.optimizer.state[parameter]["momentum_buffer"])
        self.optimizer.zero_grad()


def replicated(tensor: Tensor) -> Tensor:
    """A sum that torch has not taken yet, taken."""
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A number of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(case: Case, mesh: Mesh) -> Convolution:
    """Every rank has the whole image."""
    return Convolution(None)


def by_batch(case: Case, mesh: Mesh) -> Convolution:
    """Ranks share the images."""
    return Convolution(0)


def by_width(case: Case, mesh: Mesh) -> Convolution:
    """Ranks share each image by its width."""
    return Convolution(3)
