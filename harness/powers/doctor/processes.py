"""Checks that typical calls of a training step, forward and backward, have the same bits in every process.

For example, a kernel that is chosen by timing may differ between two starts of the same program.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from bitproof.harness.capture.digest import digest
from bitproof.harness.powers.doctor import grouped
from bitproof.harness.powers.doctor.checks import attend
from bitproof.harness.powers.doctor.setting import Answer, Setting

GENERATIONS = 2
"""How often the processes are started. All must compute the same bits."""


def compute(setting: Setting, rank: int) -> Answer:
    """Return True, and a text with a digest for each kind of call, made on the device of `rank`.

    For example, `attention 0f3a..; layers in float32 77c1..`.
    """
    device = setting.device_of(rank)
    found = {"attention": "".join(attend(device, torch.bfloat16, 64, 64)[1])}
    for counts in grouped.COUNTS_E:
        found["grouped products"] = found.get("grouped products", "") + _digests(*grouped.products(device, counts))
    for dtype in (torch.bfloat16, torch.float32):
        found[f"layers in {str(dtype).removeprefix('torch.')}"] = _digests(*layers(device, dtype))
    return True, "; ".join(f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}" for name, text in found.items())


def layers(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the loss and the gradients of a small model: embedding, norm, linear layers and cross entropy.

    The embedding's gradient adds the rows of equal tokens. The other gradients add over all tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    # 97 tokens for 512 places: most tokens occur several times, so the embedding's gradient adds rows.
    tokens = torch.randint(0, 97, (4, 129), generator=generator).to(device)
    table, scale, up, down = drawn(97, 128), drawn(128), drawn(512, 128), drawn(97, 512)
    x = functional.rms_norm(functional.embedding(tokens[:, :-1], table), (128,), scale)
    logits = functional.linear(functional.silu(functional.linear(x, up)), down)
    loss = nn.CrossEntropyLoss()(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, (table, scale, up, down))]


def _digests(*tensors: Tensor) -> str:
    return "".join(digest(x) for x in tensors)


def first_unlike(said: list[str]) -> str | None:
    """Compare `said`, the text that `compute` returned in each process, with the text of process 0.

    Returns a text that names the first process that differs, and a kind of call that differs there. None if all are
    equal.
    """
    for number, text in enumerate(said):
        if text != said[0]:
            pairs = zip(text.split("; "), said[0].split("; "), strict=False)
            of = next((mine for mine, first in pairs if mine != first), text)
            # The last word is the digest, and the words before it are the kind of call.
            return f"process {number} has other bits of {of.rpartition(' ')[0] or of}"
    return None
