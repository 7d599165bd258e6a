import pytest
import torch
import xxhash

from bitproof.harness.capture import xxh3
from bitproof.harness.capture.xxh3 import LEAF_WORDS, fold, hash_leaves


def random_leaves(num_leaves: int) -> torch.Tensor:
    """Leaves of any words, and leaves of one extreme word each: no bits, all, the upper or lower half, the sign."""
    leaves = torch.randint(-(2**63), 2**63 - 1, (num_leaves, LEAF_WORDS))
    extremes = torch.tensor([0, -1, -(2**32), 2**32 - 1, -(2**63), 2**63 - 1])
    return torch.cat([leaves, extremes[:, None].expand(-1, LEAF_WORDS)])


def hashed_by_xxhash(leaves: torch.Tensor) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(leaf.numpy().tobytes()) for leaf in leaves]


def as_hex(digests_L2: torch.Tensor) -> list[str]:
    return [f"{upper & (2**64 - 1):016x}{lower & (2**64 - 1):016x}" for upper, lower in digests_L2.tolist()]


def test_operators_give_the_digests_of_xxhash():
    leaves = random_leaves(40)
    assert as_hex(hash_leaves(leaves)) == hashed_by_xxhash(leaves)


def test_slabs_do_not_change_a_digest(monkeypatch):
    leaves = random_leaves(1)
    whole = hash_leaves(leaves)
    monkeypatch.setattr(xxh3, "SLAB_LEAVES", 3)
    assert torch.equal(hash_leaves(leaves), whole)


def test_every_word_of_a_leaf_counts():
    leaves = torch.zeros(LEAF_WORDS + 1, LEAF_WORDS, dtype=torch.int64)
    leaves[1:].fill_diagonal_(1)
    assert len(set(as_hex(hash_leaves(leaves)))) == LEAF_WORDS + 1


@pytest.mark.parametrize("left", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
@pytest.mark.parametrize("right", [0, 1, -1, 2**32 - 1, -(2**63), -0x0FEDCBA987654321])
def test_a_product_is_folded_with_all_its_128_bits(left, right):
    product = (left % 2**64) * (right % 2**64)
    folded = fold(torch.tensor([left]), torch.tensor([right])).item()
    assert folded % 2**64 == (product >> 64) ^ (product % 2**64)
