"""The loss in pieces: its value and gradients, one piece's logits at a time, and what it does not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from bitproof.reference.layers.vocabulary import Output
from bitproof.reference.loss import cross_entropy

B, S, D, V = 2, 8, 2, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Output, Tensor, Tensor]:
    """A projection, hidden states, and labels."""
    generator = torch.Generator().manual_seed(0)
    output = Output(D, V, bias=False).to(dtype)
    output.weight.data = torch.randn(V, D, generator=generator).to(dtype)
    x_BSD = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    return output, x_BSD, torch.randint(V, (B, S), generator=generator)


def gradients(loss: Tensor, output: Output, x: Tensor, seed: float = 0.3) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (x, output.weight), torch.full_like(loss, seed))


def test_without_labels_it_is_a_linear_layer() -> None:
    output, x_BSD, _ = inputs()
    assert torch.equal(output(x_BSD), x_BSD @ output.weight.t())


@pytest.mark.parametrize("pieces", [2, 4, 16])
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(pieces: int) -> None:
    output, x_BSD, labels_BS = inputs(torch.float32)
    found, expected = output(x_BSD, labels_BS, pieces), cross_entropy(output(x_BSD), labels_BS)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, output, x_BSD), gradients(expected, output, x_BSD), strict=True):
        torch.testing.assert_close(one, other)


def test_folded_tokens_have_the_bits_of_their_rows() -> None:
    output, x_BSD, labels_BS = inputs(torch.float32)
    rows, folded = output(x_BSD, labels_BS, 4), output(x_BSD.flatten(0, 1), labels_BS.flatten(), 4)
    assert torch.equal(rows, folded)


def test_the_gradient_of_the_projection_is_added_in_float32_and_rounded_once() -> None:
    output, x_BSD, labels_BS = inputs(torch.bfloat16)
    x_PtD, labels_Pt = x_BSD.detach().view(4, 4, D), labels_BS.view(4, 4)
    total = torch.zeros(V, D)
    for x_tD, labels_t in zip(x_PtD, labels_Pt, strict=True):
        logs_tV = (x_tD @ output.weight.detach().t()).float().log_softmax(-1)
        grad_tV = (logs_tV.exp() - torch.nn.functional.one_hot(labels_t, V)) / 4 / 4
        total = total + (grad_tV.bfloat16().t() @ x_tD).float()
    _, found = gradients(output(x_BSD, labels_BS, 4), output, x_BSD, seed=1.0)
    assert torch.equal(found, total.bfloat16())


class _Sizes(TorchDispatchMode):
    """The largest first dim of a value as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 2 and found.shape[1] == V:
            self.rows = max(self.rows, found.shape[0])
        return found


def test_no_value_has_the_logits_of_more_than_a_piece_and_none_is_kept_for_backward() -> None:
    output, x_BSD, labels_BS = inputs()
    kept: list[tuple[int, ...]] = []
    with _Sizes() as sizes, saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):  # type: ignore[func-returns-value]
        gradients(output(x_BSD, labels_BS, 8), output, x_BSD)
    assert sizes.rows == B * S // 8
    assert sorted(kept) == [(V, D), (B * S, D)]
    with _Sizes() as sizes:
        gradients(cross_entropy(output(x_BSD), labels_BS), output, x_BSD)
    assert sizes.rows == B * S


def test_the_weight_is_read_once_however_many_pieces_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is sharded, a second read is a second all-gather."""
    output, x_BSD, labels_BS = inputs()
    reads, ordinary = [], torch.nn.Module.__getattr__

    def counting(module: torch.nn.Module, name: str) -> object:
        reads.append(name)
        return ordinary(module, name)

    monkeypatch.setattr(torch.nn.Module, "__getattr__", counting)
    output(x_BSD, labels_BS, 8)
    assert reads.count("weight") == 1
