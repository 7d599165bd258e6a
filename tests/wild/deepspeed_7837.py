"""ZeRO-0 in bfloat16 keeps its gradients and divides them by a scale: https://github.com/deepspeedai/DeepSpeed/issues/7837"""

import torch
from zero import accumulated


def candidate(case, mesh):
    return accumulated(mesh, stage=0, parts=1, dtype=torch.bfloat16)


def reference(case, mesh):
    system = candidate(case, mesh)
    system.engine.optimizer.dynamic_loss_scale, system.engine.optimizer.cur_scale = False, 1.0
    take = system.engine.step

    def step():
        take()
        for parameter in system.model.parameters():
            parameter.grad = None

    system.engine.step = step
    return system
