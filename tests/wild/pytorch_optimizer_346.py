"""pytorch-optimizer's ADOPT divides by a second moment that has this step's gradient: https://github.com/kozistr/pytorch_optimizer/issues/346"""

import torch
from loops import mlp, squared_error, trained
from pytorch_optimizer import ADOPT


class Right(ADOPT):
    """The update of the paper: the second moment takes in a gradient after the step by it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                average, square = state["exp_avg"], state["exp_avg_sq"]
                if group["step"] == 1:
                    square.addcmul_(grad, grad)
                    continue
                limit = group["step"] ** 0.25
                normed = grad.div(square.sqrt().clamp_(min=group["eps"])).clamp_(-limit, limit)
                average.lerp_(normed, weight=1.0 - group["betas"][0])
                parameter.add_(average, alpha=-group["lr"])
                square.mul_(group["betas"][1]).addcmul_(grad, grad, value=1.0 - group["betas"][1])


def reference(case, mesh, kind=Right):
    return trained(mesh, mlp(), squared_error, kind)


def candidate(case, mesh):
    return reference(case, mesh, ADOPT)
