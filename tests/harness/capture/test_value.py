import pytest
import torch

from harness.capture.digest import digest
from harness.capture.value import load_value, save_value
from harness.errors import RecordingError


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
def test_a_value_comes_back_in_every_bit(tmp_path, tensor):
    save_value(tmp_path / "deep" / "value", tensor)
    assert digest(load_value(tmp_path / "deep" / "value")) == digest(tensor)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["value"]


def test_a_truncated_value_is_refused(tmp_path):
    path = tmp_path / "value"
    save_value(path, torch.zeros(4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordingError) as error:
        load_value(path)
    assert str(error.value) == (
        f"RecordingError: {path} is cut short or too long\n"
        "  expected: 16 bytes of float32 of shape (4,)\n"
        "  found: 15 bytes"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04K\x01.", b"[]\n", b'{"dtype": "os", "shape": []}\n', b'{"dtype": "int8", "shape": [-1]}\n'],
)
def test_what_is_no_value_is_refused_naming_the_file(tmp_path, content):
    (tmp_path / "value").write_bytes(content)
    with pytest.raises(RecordingError, match=f"^RecordingError: {tmp_path / 'value'} holds no tensor"):
        load_value(tmp_path / "value")
