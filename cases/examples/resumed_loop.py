"""The loop of `mesh_loop` with more state that a resumed run must restore, as systems that save and load.

    bitproof run -k resume

- Each rank draws its own dropout, if the case's options request it. A buffer depends on the text.
- Each step first yields the parameters and moments with which it begins.
- torch.distributed.checkpoint saves the state. The random generator of each rank has its own name, such as generator.3.
  With a common name, every rank would load the generator of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh
from bitproof.builtin_cases.examples.mesh_loop import (
    LENGTH,
    SEQUENCES,
    VOCABULARY,
    MeshLoop,
    MixedModel,
    sharded,
    split_and_sharded,
)


class ForgetfulModel(MixedModel):
    """MixedModel with dropout: each element of an embedding is zeroed with probability `share`.

    The buffer `text` is a running mean of the tokens, by position.
    """

    text: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("text", torch.zeros(LENGTH + 1))
        self.embedding.register_forward_hook(lambda module, args, x: dropout(x, self.share) if self.share else None)


class ResumedLoop(MeshLoop):
    """A training run that can be saved and resumed.

    - `own`: this rank's index among all ranks.
    - `taken`: the number of steps, including those before the run was resumed.
    """

    def __init__(self, case: Case, mesh: Mesh, model: nn.Module, *, sharers: int = 1) -> None:
        super().__init__(case, mesh, model, sharers=sharers)
        self.own = mesh.rank
        self.taken = 0
        # Only now: dropout differs from rank to rank, but initial parameters must not.
        torch.manual_seed(case.seed + 1 + mesh.rank)

    @property
    def bare(self) -> ForgetfulModel:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model  # type: ignore

    def batch(self) -> Tensor:
        # All ranks draw all rows, so that the states of their generators stay equal.
        rows = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=self.data)
        # From the whole batch, so that the buffer is equal on all ranks.
        self.bare.text.lerp_(rows.float().mean(0), 0.1)
        return rows.chunk(self.readers)[self.rank]

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take a step. Yields these values as (kind, name, tensor):

        - before the step, the parameters and the optimizer's moments;
        - the values that `MeshLoop.step` yields;
        - after the step, the buffers `text` and `taken`.
        """
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            yield "buffer", f"{name}@before_forward", parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                # Before the first step an optimizer has no state: its moments begin with zeros.
                yield "buffer", f"{name}.{moment}@before_forward", state.get(moment, torch.zeros_like(parameter))
        yield from super().step(index)
        self.taken += 1
        yield "buffer", "text@after_optimizer", self.bare.text
        yield "buffer", "taken@after_optimizer", torch.tensor(self.taken)

    def state(self) -> dict[str, Any]:
        """Return the state from which a run resumes. Its tensors share memory with this run's."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "data": self.data.get_state(),
            "taken": self.taken,
            f"generator.{self.own}": torch.get_rng_state(),
        }

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load a saved state, possibly from another layout or number of ranks."""
        own = f"generator.{self.own}"
        state = self.state()
        if not any(name.startswith(own) for name in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata):
            state.pop(own)  # saved by fewer ranks: this generator keeps its initial state
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.data.set_state(state["data"])
        self.taken = state["taken"]
        torch.set_rng_state(state.get(own, torch.get_rng_state()))


def _model(case: Case) -> ForgetfulModel:
    return ForgetfulModel(case.options.get("dropout", 0.0))


def ddp(case: Case, mesh: Mesh) -> ResumedLoop:
    return ResumedLoop(case, mesh, DistributedDataParallel(_model(case), broadcast_buffers=False))


def fsdp(case: Case, mesh: Mesh) -> ResumedLoop:
    return ResumedLoop(case, mesh, sharded(_model(case), init_device_mesh("cpu", (case.parallelism.world_size,))))


def hsdp(case: Case, mesh: Mesh) -> ResumedLoop:
    grid = init_device_mesh("cpu", (2, case.parallelism.world_size // 2), mesh_dim_names=("replicas", "shards"))
    return ResumedLoop(case, mesh, sharded(_model(case), grid))


def fsdp_tp(case: Case, mesh: Mesh) -> ResumedLoop:
    return ResumedLoop(case, mesh, split_and_sharded(_model(case), case), sharers=case.parallelism.tp)
