"""What every file has in it: two tensors compared to the bit, and inputs that come back as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitproof.harness.powers.shrink.standalone import template
from bitproof.harness.powers.shrink.standalone.template import describe_difference


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), None),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            "1 of 1 elements differ; element 0 is 0x00000000 against 0x80000000",
        ),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.tensor(1), torch.tensor(1.0), "torch.int64 () against torch.float32 ()"),
        (torch.ones(2, 3), torch.ones(3, 2), "torch.float32 (2, 3) against torch.float32 (3, 2)"),
        (
            torch.eye(2, dtype=torch.bfloat16),
            torch.ones(2, 2, dtype=torch.bfloat16).t(),
            "2 of 4 elements differ; element 1 is 0x0000 against 0x3f80",
        ),
        (torch.ones(0), torch.ones(0), None),
        (torch.ones(1, 8, dtype=torch.bfloat16).t(), torch.ones(8, 1, dtype=torch.bfloat16), None),
    ],
)
def test_bits_dtypes_and_shapes_are_compared(first: Tensor, second: Tensor, found: str | None) -> None:
    assert describe_difference(first, second) == found


def test_inputs_come_back_with_their_bits_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"few": ("int64", (2, 2), (1, 2), [[1, 2, 3, 4], [5, 6, 7, 8]]), "drawn": ("float32", (3,), (1,), [])}
    monkeypatch.setattr(template, "INPUTS", values)
    few = template.make_input("few", 1)
    assert (few.tolist(), few.stride()) == ([[5, 6], [7, 8]], (1, 2))
    drawn = [template.make_input("drawn", rank) for rank in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
