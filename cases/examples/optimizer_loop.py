"""The loop of `mesh_loop` with AdamW or Muon in several forms, as systems.

    bitproof run -k optimizers

    adamw            parameter by parameter
    adamw_foreach    all parameters at once
    adamw_fused      a fused kernel for each parameter, which multiplies in another order
    muon             every rank orthogonalizes every matrix
    muon_by_layer    each rank orthogonalizes its share of the matrices and sends them to all
    muon_fsdp        parameters and momentum are sharded; each matrix is gathered to orthogonalize it
    muon_fsdp_tp     sharded over data ranks, and each layer split over `tp` ranks; each matrix is gathered from both

All forms of AdamW must compute the same step, and so must all forms of Muon.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh
from bitproof.builtin_cases.examples.mesh_loop import MeshLoop, MixedModel, sharded, split_and_sharded

MOMENTUM, LR = 0.95, 1e-2


def orthogonal(matrix: Tensor, turns: int = 5) -> Tensor:
    """Return a matrix with its singular values moved close to 1, by `turns` Newton-Schulz iterations of degree five.

    The coefficients are those of https://kellerjordan.github.io/posts/muon.
    """
    # So that x @ x.T has the smaller of the two dims.
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(turns):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if wide is not matrix else x


class Muon(torch.optim.Optimizer):
    """The Muon optimizer. It orthogonalizes the momentum of the matrices of hidden layers.

    With `by_layer`, ranks share this work: on two ranks, rank 0 orthogonalizes matrices 0, 2 and 4, and sends them to
    rank 1.
    """

    def __init__(self, model: nn.Module, lr: float, *, by_layer: bool = False) -> None:
        named = dict(model.named_parameters())
        super().__init__(list(named.values()), {"lr": lr})
        self.by_layer = by_layer
        self.matrices = [p for name, p in named.items() if "blocks" in name and p.dim() == 2]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        turn = {matrix: index for index, matrix in enumerate(self.matrices)}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].mul_(MOMENTUM).add_(parameter.grad)
                if parameter in turn:
                    update = self.direction(update, turn[parameter])
                parameter.add_(update, alpha=-group["lr"])

    def direction(self, update: Tensor, turn: int) -> Tensor:
        """Return the orthogonalized `update` of the matrix with index `turn`, in the layout of `update`."""
        if isinstance(update, DTensor):
            # Every rank computes the whole matrix, and keeps its own part.
            alike = [Replicate()] * update.device_mesh.ndim
            whole = DTensor.from_local(orthogonal(update.full_tensor()), update.device_mesh, alike)
            return whole.redistribute(placements=update.placements)
        if not self.by_layer:
            return orthogonal(update)
        owner = turn % dist.get_world_size()
        # Gradients are averaged over ranks, so the owner has the same momentum as all others.
        made = orthogonal(update) if dist.get_rank() == owner else torch.empty_like(update)
        dist.broadcast(made, owner)
        return made


def _loop(case: Case, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharers: int = 1) -> MeshLoop:
    loop = MeshLoop(case, mesh, model, sharers=sharers)
    loop.optimizer = optimizer  # type: ignore[assignment]
    loop.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return loop


def adamw(case: Case, mesh: Mesh, *, foreach: bool = False, fused: bool = False) -> MeshLoop:
    # Parameter by parameter, unless `foreach` or `fused`.
    model = DistributedDataParallel(MixedModel())
    return _loop(case, mesh, model, torch.optim.AdamW(model.parameters(), lr=LR, foreach=foreach, fused=fused))


def adamw_foreach(case: Case, mesh: Mesh) -> MeshLoop:
    return adamw(case, mesh, foreach=True)


def adamw_fused(case: Case, mesh: Mesh) -> MeshLoop:
    return adamw(case, mesh, fused=True)


def muon(case: Case, mesh: Mesh, *, by_layer: bool = False) -> MeshLoop:
    model = DistributedDataParallel(MixedModel())
    return _loop(case, mesh, model, Muon(model, LR, by_layer=by_layer))


def muon_by_layer(case: Case, mesh: Mesh) -> MeshLoop:
    return muon(case, mesh, by_layer=True)


def muon_fsdp(case: Case, mesh: Mesh) -> MeshLoop:
    model = sharded(MixedModel(), init_device_mesh("cpu", (case.parallelism.world_size,)))
    return _loop(case, mesh, model, Muon(model, LR))


def muon_fsdp_tp(case: Case, mesh: Mesh) -> MeshLoop:
    model = split_and_sharded(MixedModel(), case)
    return _loop(case, mesh, model, Muon(model, LR), sharers=case.parallelism.tp)
