import builtins
import logging

import pytest
import torch

from bitproof.harness.capture import leaves, xxh3
from bitproof.harness.capture.leaves import hashes_known_leaves, leaf_hasher
from bitproof.harness.errors import MachineError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_chosen_yet():
    leaf_hasher.cache_clear()
    yield
    leaf_hasher.cache_clear()


def wrong(leaves_LW):
    """Digests that see no order of words."""
    return leaves_LW.sum(1, keepdim=True).expand(-1, 2).contiguous()


def right(leaves_LW):
    return xxh3.hash_leaves(leaves_LW)


def test_a_kernel_that_is_right_is_taken_without_a_word(monkeypatch, caplog):
    monkeypatch.setattr(leaves, "load_kernel", lambda: right)
    assert leaf_hasher(CPU) is right
    assert caplog.records == []


def test_without_triton_torchs_operators_are_taken_and_the_log_says_so(monkeypatch, caplog):
    def refuse(name, *args, **kwargs):
        if name.startswith("triton") or name.endswith("xxh3_kernel"):
            raise ModuleNotFoundError("No module named 'triton'")
        return importing(name, *args, **kwargs)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.WARNING):
        assert leaf_hasher(CPU) is xxh3.hash_leaves
    assert caplog.messages == [
        "digests on cpu are computed by torch's operators, for lack of Triton's kernel: "
        "ModuleNotFoundError: No module named 'triton'"
    ]


def test_a_kernel_that_hashes_the_first_leaf_alone_is_not_believed():
    assert hashes_known_leaves(right, CPU)
    assert not hashes_known_leaves(lambda leaves_LW: right(leaves_LW[:1]).expand(len(leaves_LW), -1).contiguous(), CPU)


def test_a_kernel_that_gives_wrong_digests_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(leaves, "load_kernel", lambda: wrong)
    with caplog.at_level(logging.WARNING):
        assert leaf_hasher(CPU) is xxh3.hash_leaves
    assert caplog.messages == [
        "digests on cpu are computed by torch's operators, for lack of Triton's kernel: "
        "ValueError: a known leaf came out wrong"
    ]


def test_where_nothing_gives_right_digests_none_is_given(monkeypatch):
    monkeypatch.setattr(leaves, "load_kernel", lambda: wrong)
    monkeypatch.setattr(leaves, "load_operators", lambda: wrong)
    with pytest.raises(MachineError) as error:
        leaf_hasher(CPU)
    assert str(error.value) == (
        "MachineError: no digest can be computed on cpu\n"
        "  found: Triton's kernel: ValueError: a known leaf came out wrong; "
        "torch's operators: ValueError: a known leaf came out wrong"
    )


@pytest.mark.parametrize("word", [0, 127, 128, 1920, 2047])
def test_a_hasher_that_overlooks_a_word_does_not_know_the_known_leaf(word):
    def careless(leaves_LW):
        seen = leaves_LW.clone()
        seen[:, word] = 0
        return xxh3.hash_leaves(seen)

    assert hashes_known_leaves(xxh3.hash_leaves, CPU)
    assert not hashes_known_leaves(careless, CPU)
