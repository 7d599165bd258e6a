"""DeepSpeed's engine as a system: gradients, parameters and moments whole, as its own functions show them."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn

DIM = 16


def model_of():
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Engine:
    """An engine that takes a step by `backward(engine, index)`, which returns the loss."""

    def __init__(self, model, backward, **config):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config={**settings, **config}, dist_init_required=False
        )[0]
        self.model, self.backward = self.engine.module, backward

    def step(self, index):
        yield "loss", "loss", self.backward(self.engine, index)
        named = list(self.model.named_parameters())
        for name, parameter in named:
            whole = safe_get_full_grad(parameter)
            yield "grad", name, parameter.grad if whole is None else whole
        self.engine.step()
        for name, parameter in named:
            whole = safe_get_full_fp32_param(parameter)
            yield "param", name, parameter if whole is None else whole
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            if moment is not None:
                yield "optimizer", f"{name}.exp_avg", moment
        if self.engine.zero_optimization_stage() == 0:
            for turn, state in enumerate(self.engine.optimizer.optimizer.state.values()):
                yield "optimizer", f"{turn}.exp_avg", state["exp_avg"]


def batches(rank, dtype):
    """Of this rank, one after the other."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(2, DIM, generator=generator).to(dtype)


def accumulated(mesh, stage, parts=2, dtype=torch.float32, marked=False, **config):
    """Micro-batches, counted by DeepSpeed's own setting or marked by hand."""
    data = batches(mesh.rank, dtype)

    def backward(engine, index):
        total = 0.0
        for part in range(parts):
            x = next(data)
            if marked:
                engine.set_gradient_accumulation_boundary(part == parts - 1)
            loss = (engine(x) - x).float().square().mean()
            engine.backward(loss)
            total = total + loss.detach()
            if not marked and part < parts - 1:
                engine.step()
        return total / parts

    counted = {} if marked else {"gradient_accumulation_steps": parts}
    precision = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    zero = {"stage": stage, **config.pop("zero", {})}
    return Engine(model_of(), backward, zero_optimization=zero, **precision, **counted, **config)
