"""The digests of tensors that a graph holds."""

import torch

from bitproof.harness.powers.proofs.prover.graphs.constants import digest_of
from bitproof.harness.torch_compat import FakeTensorMode


def test_a_digest_is_of_the_elements_in_their_order_bit_for_bit():
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert digest_of(x.t()) == digest_of(x.t().contiguous()) != digest_of(x)
    assert digest_of(x) != digest_of(torch.tensor([[-0.0, 1.0], [2.0, 3.0]]))


def test_a_digest_is_taken_of_values_while_a_trace_makes_fakes():
    x = torch.arange(3.0)
    with FakeTensorMode():
        assert digest_of(x) == digest_of(torch.nn.Parameter(x))
