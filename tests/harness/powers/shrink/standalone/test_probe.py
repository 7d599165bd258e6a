"""What a file that probes tells of each value."""

from __future__ import annotations

import base64
import zlib

import pytest
import torch

from bitproof.harness.powers.shrink.standalone import probe


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "seen", {})


def test_a_tensor_is_reported_with_its_layout_and_its_bytes() -> None:
    x = torch.tensor([[1, 2], [3, 4]]).t()
    probe.see("x", x)
    _, *layout, content = probe.seen["x"]
    assert layout == ["int64", [2, 2], [1, 2]]
    assert zlib.decompress(base64.b64decode(content)) == x.contiguous().numpy().tobytes()


def test_digests_distinguish_bits_and_layouts() -> None:
    values = {"zero": torch.zeros(2), "minus": -torch.zeros(2), "column": torch.zeros(2, 1), "again": torch.zeros(2)}
    for name, x in values.items():
        probe.see(name, x)
    digests = {name: value[0] for name, value in probe.seen.items()}
    assert digests["zero"] == digests["again"] and len(set(digests.values())) == 3


def test_a_large_tensors_bytes_stay_out_and_a_number_is_not_reported() -> None:
    probe.see("large", torch.zeros(probe.LARGEST))
    probe.see("number", 3)
    assert list(probe.seen) == ["large"] and probe.seen["large"][4] is None
