"""Attention over parts of a sequence: what each rank's share comes to, against the whole, without ranks."""

import pytest
import torch

from bitproof.builtin_cases.examples.ring_attention import RingAttention, SequenceRing, plain_attention

LENGTH = 12


class Alone(SequenceRing):
    """A rank that is handed every rank's part, and keeps what it computed for each."""

    def __init__(self, rank, ranks, everyone):
        super().__init__(rank, ranks)
        self.everyone, self.shares = everyone, {}

    def parts(self, tensors):
        for turn in range(self.ranks):
            owner = (self.rank - turn) % self.ranks
            yield owner, tuple(x.chunk(self.ranks, -2)[owner] for x in self.everyone)

    def returned(self, shares):
        self.shares = shares
        return shares[self.rank]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_add_up_to_a_whole_sequence_forward_and_backward(ranks):
    generator = torch.Generator().manual_seed(ranks)
    q, k, v, grad = (torch.randn(2, 2, LENGTH, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    wholes = [x.clone().requires_grad_() for x in (q, k, v)]
    out = plain_attention(*wholes, SequenceRing(0, 1))
    out.backward(grad)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rank in range(ranks):
        ring = Alone(rank, ranks, (k, v))
        parts = [x.chunk(ranks, -2)[rank].clone().requires_grad_() for x in (q, k, v)]
        share = RingAttention.apply(*parts, ring)
        torch.testing.assert_close(share, out.chunk(ranks, -2)[rank])
        share.backward(grad.chunk(ranks, -2)[rank])
        torch.testing.assert_close(parts[0].grad, wholes[0].grad.chunk(ranks, -2)[rank])
        for owner, (of_keys, of_values) in ring.shares.items():
            dk.chunk(ranks, -2)[owner].add_(of_keys)
            dv.chunk(ranks, -2)[owner].add_(of_values)
    torch.testing.assert_close(dk, wholes[1].grad)
    torch.testing.assert_close(dv, wholes[2].grad)
