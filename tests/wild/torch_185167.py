"""A weighted loss over a batch that is divided among the ranks: https://github.com/pytorch/pytorch/issues/185167

All numbers are multiples of powers of two, so that sums over ranks are exact in any order.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import bitproof

CLASSES, ROWS = 4, 8


def trained(divided):
    ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Linear(4, CLASSES, bias=False)
    nn.init.ones_(model.weight)
    distribute_module(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = distribute_tensor(torch.tensor([1.0, 2.0, 4.0, 1.0]), ranks, [Replicate()])
    target = distribute_tensor(torch.tensor([0, 0, 0, 0, 2, 2, 1, 1]), ranks, [Replicate()])
    data = torch.Generator().manual_seed(0)

    def step(index):
        x = torch.randint(-2, 3, (ROWS, 4), generator=data).float()
        scores = model(distribute_tensor(x, ranks, [Shard(0)]))
        if not divided:
            scores = scores.redistribute(placements=[Replicate()])
        loss = nn.functional.nll_loss(scores, target, weight=weight)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor()

    return bitproof.watch(step, model=model, optimizer=optimizer)


def reference(case, mesh):
    return trained(divided=False)


def candidate(case, mesh):
    return trained(divided=True)
