import pytest
import torch

from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.value import pack_value, unpack_value
from bitproof.harness.errors import RecordingError


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor(-0.0),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
    ],
    ids=lambda t: f"{t.dtype}",
)
def test_a_value_comes_back_in_every_bit(tensor):
    assert digest(unpack_value(pack_value(tensor), "value")) == digest(tensor)


def test_a_truncated_value_is_refused():
    with pytest.raises(RecordingError) as error:
        unpack_value(pack_value(torch.zeros(4))[:-1], "replay.zip")
    assert str(error.value) == (
        "RecordingError: replay.zip is cut short or too long\n"
        "  expected: 16 bytes of float32 of shape (4,)\n"
        "  found: 15 bytes"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04K\x01.", b"[]\n", b'{"dtype": "os", "shape": []}\n', b'{"dtype": "int8", "shape": [-1]}\n'],
)
def test_what_is_no_value_is_refused_naming_its_place(content):
    with pytest.raises(RecordingError, match=r"^RecordingError: replay.zip holds no tensor"):
        unpack_value(content, "replay.zip")
