"""Names beside casts: what goes through is the tensor itself."""

from __future__ import annotations

import torch

from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.layers.wide import wides


def test_a_tensor_comes_out_as_it_went_in_under_each_name():
    x, made = torch.ones(2, requires_grad=True), wides("a", "b")
    assert made["a"](x) is x and made["b"](x) is x
    assert [name for name, _ in made.named_modules()] == ["", "a", "b"] and not made.state_dict()


def test_what_a_norm_rounds_forward_and_backward_has_names():
    norm, x = RMSNorm(8).bfloat16(), torch.randn(4, 8).bfloat16().requires_grad_()
    seen = {}

    def hook(name):
        def note(module, args, output):
            seen[name] = output
            output.register_hook(lambda gradient: seen.update({f"{name} backward": gradient}))

        return note

    for name in ("x", "weight", "y"):
        norm.wide[name].register_forward_hook(hook(name))
    y = norm(x)
    y.float().square().mean().backward()
    assert {value.dtype for value in seen.values()} == {torch.float32} and len(seen) == 6
    assert torch.equal(seen["y"].bfloat16(), y)
    assert torch.equal(seen["x backward"].bfloat16(), x.grad)
    assert torch.equal(seen["weight backward"].bfloat16(), norm.weight.grad)
    assert list(norm.state_dict()) == ["weight"]
