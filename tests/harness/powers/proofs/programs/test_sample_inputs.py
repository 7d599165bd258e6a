import io
import pickle
import zipfile

import pytest
import torch

from bitproof.harness.powers.proofs.prover.programs.plain_tensors import TensorError
from bitproof.harness.powers.proofs.prover.programs.sample_inputs import SampleError, read


def saved(value):
    content = io.BytesIO()
    torch.save(value, content, pickle_protocol=2)
    return content.getvalue()


def with_pickle(pickled):
    """What torch.save writes of one tensor, with another pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(((torch.ones(3),), {})))) as old, zipfile.ZipFile(content, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return content.getvalue()


def test_nested_tensors_and_plain_values_are_read():
    x = torch.randn(3, 4)
    values = ((x, [x.t()[1:], 1, -(1 << 40), 2.5], "text"), {"n": None, "b": (True, x[0, 0], torch.zeros(0, 2))})
    own = read(memoryview(saved(values)))
    assert torch.equal(own[0][0], x) and torch.equal(own[0][1][0], x.t()[1:]) and own[0][1][0].stride() == (1, 4)
    assert own[0][1][1:] == [1, -(1 << 40), 2.5] and own[0][2] == "text" and own[1]["n"] is None
    assert own[0][0].untyped_storage().data_ptr() == own[0][1][0].untyped_storage().data_ptr()


class Planted:
    def __reduce__(self):
        return (exec, ("open('RAN', 'w').close()",))


@pytest.mark.parametrize("value", [((Planted(),), {}), ((), {"x": Planted()}), Planted(), (torch.nn.Linear, {})])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SampleError):
        read(memoryview(saved(value)))
    assert not (tmp_path / "RAN").exists()


def twice(depth):
    """Containers that each hold the one before twice: 2 ** depth leaves."""
    value = [1]
    for _ in range(depth):
        value = [value, value]
    return pickle.dumps(((value,), {}), 2)


def itself():
    value = []
    value.append(value)
    return pickle.dumps(((value,), {}), 2)


def nested(depth):
    return b"\x80\x02" + b"(" * depth + b"t" * depth + b"."


@pytest.mark.parametrize(
    "pickled",
    [
        *(twice(60), itself(), nested(100_000)),
        *(b"", b"\x80\x02", b"\x80\x02.", b"\x80\x02N.N.", b"cos\nsystem\n.", b"\xff"),
        *(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00exittR.", b"\x80\x02}(K\x01u.", b"\x80\x02K\x01K\x02a."),
    ],
)
def test_a_pickle_that_is_damaged_or_grows_without_end_is_refused(pickled):
    with pytest.raises(SampleError):
        read(memoryview(with_pickle(pickled)))


def test_a_tensor_that_reaches_beyond_its_bytes_is_refused():
    data = saved(((torch.ones(3),), {}))
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        pickled = old.read(next(name for name in old.namelist() if name.endswith("data.pkl")))
    forged = pickled.replace(b"K\x03\x85", b"K\x09\x85")
    assert forged != pickled
    with pytest.raises(TensorError, match="needs 9 elements, and the file has 3"):
        read(memoryview(with_pickle(forged)))
