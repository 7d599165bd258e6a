"""Compare a model with its implementation in transformers: same weights, same tokens, logits and gradients.

B batch, S sequence, E experts, H hidden dim of experts, D model dim
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitproof.reference.loss import cross_entropy

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "moe": "mlp",
    "router": "gate",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "layers": "model.layers",
}
"""Our name of a part of the tree, and theirs."""

Tensors = dict[str, Tensor]


def in_their_layout(ours: Tensors, names: dict[str, str] = NAMES) -> Tensors:
    """Our parameters (or gradients) under their names; of the experts, gate and up are one tensor."""
    theirs = {}
    for name, value in ours.items():
        if ".experts.w" not in name:
            theirs[".".join(names.get(part, part) for part in name.split("."))] = value
        elif name.endswith("w2"):
            theirs[_experts(name) + ".down_proj"] = value
        elif name.endswith("w1"):
            up_EHD = ours[name.removesuffix("w1") + "w3"]
            theirs[_experts(name) + ".gate_up_proj"] = torch.cat((value, up_EHD), dim=1)
    return theirs


def _experts(name: str) -> str:
    return f"model.layers.{name.split('.')[1]}.mlp.experts"


def with_halves_rotated(ours: Tensors, head_dim: int) -> Tensors:
    """Query and key rows, of each head, in the order of a rotation that pairs halves: evens first, then odds."""

    def reordered(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    parts = {"wq", "wk", "q_norm", "k_norm"}
    return {name: reordered(x) if name.split(".")[-2] in parts else x for name, x in ours.items()}


def assert_logits_and_gradients_agree(
    ours: nn.Module, theirs: Any, vocab_size: int, layout: Callable[[Tensors], Tensors]
) -> None:
    """Give `theirs` our weights through `layout` and compare both on 2 x 40 random tokens, in float32."""
    parameters = layout(dict(ours.named_parameters()))
    assert parameters.keys() == dict(theirs.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(parameters[name])

    draw = torch.Generator().manual_seed(0)
    tokens_BS, labels_BS = torch.randint(0, vocab_size, (2, 2, 40), generator=draw).unbind(0)
    our_logits = ours(tokens_BS, torch.arange(40).repeat(2, 1))
    their_logits = theirs(tokens_BS, use_cache=False).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-4, atol=1e-5)

    cross_entropy(our_logits, labels_BS).backward()
    cross_entropy(their_logits, labels_BS).backward()
    our_grads = layout({name: value.grad for name, value in ours.named_parameters() if value.grad is not None})
    their_grads = {name: value.grad for name, value in theirs.named_parameters()}
    assert our_grads.keys() == their_grads.keys()
    # One dict at a time: a failure then names the parameter.
    torch.testing.assert_close(our_grads, their_grads, rtol=1e-3, atol=1e-6)
