import struct
from typing import ClassVar

import pytest
import torch
import xxhash

from bitproof.harness.capture.digest import digest, digest_and_constant, tensor_bytes
from bitproof.harness.capture.dtypes import DTYPES
from bitproof.harness.capture.xxh3 import LEAF_BYTES
from bitproof.harness.errors import RecordingError

LARGE = 3 * LEAF_BYTES + 1000


def of_bits(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32).view(torch.float32)


def enlarge(x: torch.Tensor) -> torch.Tensor:
    """Copies of a tensor that are hashed by leaves."""
    return x.repeat(LARGE, *[1] * (x.dim() - 1))


def digest_by_hand(header: str, content: bytes) -> str:
    """The definition again, in three lines."""
    leaves = [content[start : start + LEAF_BYTES] for start in range(0, len(content), LEAF_BYTES)]
    root = content if len(leaves) < 2 else b"".join(map(xxhash.xxh3_128_digest, leaves))
    return xxhash.xxh3_128_hexdigest(header.encode() + root)


class OnGpu(torch.Tensor):
    """A tensor in host memory that takes a GPU tensor's way."""

    is_cuda, is_cpu = True, False
    fetched: ClassVar[list[int]] = []
    """Bytes of each tensor that came to the host."""

    def cpu(self):
        OnGpu.fetched.append(self.nbytes)
        return super().cpu()

    def copy_(self, other):
        OnGpu.fetched.append(other.nbytes)
        return super().copy_(other)


GPU_WAYS = [lambda tensor: tensor.as_subclass(OnGpu)]
if torch.cuda.is_available():
    GPU_WAYS.append(torch.Tensor.cuda)


def test_a_digest_is_32_hexadecimal_digits_that_never_change():
    # Pinned: recordings of different days and machines are compared.
    assert digest(torch.arange(4, dtype=torch.float32)) == "62113c3c0de444b40ae18917c34b5369"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_of_every_dtype_counts(dtype):
    tensor = torch.tensor([0, 1, 1, 0] * 4, dtype=torch.uint8).view(dtype)
    original = digest(tensor)
    octets = tensor.view(torch.uint8)
    bits = 1 if dtype is torch.bool else 8
    for octet in range(octets.numel()):
        for bit in range(bits):
            octets[octet] ^= 1 << bit
            assert digest(tensor) != original
            octets[octet] ^= 1 << bit
    assert digest(tensor) == original


@pytest.mark.parametrize(
    ("one", "other", "seen_by_hash_tensor"),
    [
        pytest.param(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 1.0, 2.0]), False, id="permutation"),
        pytest.param(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0]), False, id="swapped pair"),
        pytest.param(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]), False, id="paired sign flips"),
        pytest.param(torch.zeros(2), torch.ones(2), False, id="paired changes"),
        pytest.param(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), True, id="a sign of zero"),
        pytest.param(torch.tensor([0.0, 0.0]), torch.tensor([-0.0, -0.0]), False, id="two signs of zero"),
        pytest.param(of_bits(0x7FC00000), of_bits(0x7FC00001), True, id="NaN payload"),
        pytest.param(of_bits(0x7F800001), of_bits(0x7FC00001), False, id="signaling and quiet NaN"),
        pytest.param(torch.arange(6.0), torch.arange(6.0).reshape(2, 3), False, id="shape"),
        pytest.param(torch.arange(4), torch.arange(4).view(torch.float64), False, id="dtype with the same bytes"),
        pytest.param(torch.zeros(4), torch.zeros(4, dtype=torch.int32), False, id="dtype of zeros"),
    ],
)
def test_what_an_xor_of_bits_misses_is_seen(one, other, seen_by_hash_tensor):
    assert bool(torch.hash_tensor(one) != torch.hash_tensor(other)) == seen_by_hash_tensor
    assert digest(one) == digest(one.clone()) != digest(other)
    assert digest(enlarge(one)) == digest(enlarge(one)) != digest(enlarge(other))


def test_dtype_and_shape_count_when_all_bytes_agree():
    flat = torch.arange(6, dtype=torch.int32)
    others = [flat.view(torch.float32), flat.reshape(2, 3), flat.reshape(3, 2), flat.reshape(1, 6)]
    assert len({digest(t) for t in [flat, *others]}) == 5


def test_empty_tensors_differ_by_shape_and_a_scalar_differs_from_a_vector_of_one():
    assert digest(torch.empty(0, 3)) == digest(torch.empty(0, 3))
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))


def test_strides_do_not_count():
    dense = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert digest(dense.t().contiguous()) == digest(dense.t())
    assert digest(dense[:, ::2].clone()) == digest(dense[:, ::2])
    assert digest(torch.ones(3, 4)) == digest(torch.ones(1).expand(3, 4))


def test_a_lazily_conjugated_tensor_counts_by_its_values():
    x = torch.tensor([1 + 2j])
    assert digest(x.conj()) == digest(x.conj().resolve_conj()) != digest(x)
    assert digest(x.conj().imag) == digest(torch.tensor([-2.0]))


def test_a_single_element_with_a_stride_of_its_own_is_read_whole():
    column = torch.arange(6, dtype=torch.float32).reshape(3, 2)[1:2, 1]
    assert digest(column) == digest(torch.tensor([3.0]))


def test_a_parameter_that_requires_grad_has_its_values_digest():
    x = torch.randn(3)
    assert digest(torch.nn.Parameter(x)) == digest(x)


@pytest.mark.parametrize("num_bytes", [1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES, LARGE])
def test_more_than_one_leaf_is_hashed_leaf_by_leaf_on_every_way(num_bytes):
    octets = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    expected = digest_by_hand(f"uint8[{num_bytes}]", octets.numpy().tobytes())
    assert digest(octets) == expected
    assert {digest(way(octets)) for way in GPU_WAYS} == {expected}


def test_a_large_tensors_digest_never_changes():
    # Pinned, as above: values of three leaves and a part of one.
    assert digest(torch.arange(LARGE // 4, dtype=torch.int32)) == "211c41029d0966a8ea4d92fe6785a507"


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype is not torch.bool], ids=str)
def test_a_gpus_way_comes_to_the_same_for_every_dtype_and_stride(dtype):
    dense = torch.randint(256, (3 * LEAF_BYTES,), dtype=torch.uint8).view(dtype).view(-1, 32)
    for tensor in (dense, dense.t(), dense[1:, 3:], dense[:, ::2], dense.view(-1)[1:]):
        assert tensor.nbytes > LEAF_BYTES
        assert {digest(way(tensor)) for way in GPU_WAYS} == {digest(tensor)}


@pytest.mark.parametrize(
    ("num_bytes", "fetched"), [(LEAF_BYTES, LEAF_BYTES), (LARGE, 3 * 16 + 1000), (LEAF_BYTES * 4, 64)]
)
def test_a_gpu_hands_over_16_bytes_a_leaf_and_what_is_left_in_one_copy(num_bytes, fetched):
    OnGpu.fetched.clear()
    digest(torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(OnGpu))
    assert OnGpu.fetched == [fetched]


def test_every_leaf_and_every_end_of_one_counts():
    octets = torch.zeros(LARGE, dtype=torch.uint8)
    seen = {digest(octets)}
    ends = [0, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES - 1, 3 * LEAF_BYTES - 1, 3 * LEAF_BYTES, LARGE - 1]
    for index in ends:
        changed = octets.clone()
        changed[index] = 1
        assert {digest(way(changed)) for way in GPU_WAYS} == {digest(changed)}
        seen.add(digest(changed))
    assert len(seen) == 1 + len(ends)


def test_leaves_that_change_places_are_seen():
    leaves = torch.randint(256, (3, LEAF_BYTES), dtype=torch.uint8)
    assert digest(leaves) != digest(leaves[[1, 0, 2]])


def test_a_tensor_that_holds_anothers_leaf_digests_is_not_taken_for_it():
    octets = torch.randint(256, (LARGE,), dtype=torch.uint8)
    leaves = [octets[start : start + LEAF_BYTES].numpy().tobytes() for start in range(0, LARGE, LEAF_BYTES)]
    digests = torch.frombuffer(bytearray(b"".join(map(xxhash.xxh3_128_digest, leaves))), dtype=torch.uint8)
    assert digest(digests) != digest(octets)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(torch.Tensor):
    """A tensor whose values only its class knows, such as torch's FakeTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # torch announces the end of quantized, and the youth of nested, tensors
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (quantized, "a quantized tensor of dtype torch.qint8"),
        (lambda: torch.ones(3, device="meta"), "a meta tensor"),
        (lambda: torch.Tensor._make_wrapper_subclass(Wrapper, (3,)), "a Wrapper"),
        (freed, "a tensor without memory, such as a freed one"),
    ],
    ids=["sparse", "nested", "quantized", "meta", "wrapper", "freed"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused(make, found):
    with pytest.raises(RecordingError) as error:
        digest(make())
    assert str(error.value) == (
        "RecordingError: a tensor without bytes of its own has no digest\n"
        "  expected: a dense tensor with memory\n"
        f"  found: {found}\n"
        "  fix: observe its values as a dense tensor, such as x.to_dense(), x.dequantize() or each part"
    )


def test_the_bytes_of_a_tensor_without_memory_are_refused_and_not_read():
    with pytest.raises(RecordingError, match="without memory"):
        tensor_bytes(freed())


def test_tensor_bytes_are_row_major_and_copied_only_where_they_must_be():
    dense = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert bytes(tensor_bytes(dense.t())) == dense.t().contiguous().numpy().tobytes()
    dense[0, 0] = 7
    view = tensor_bytes(dense)
    dense[0, 0] = 8
    assert view[0] == 8


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_zeros_of_nan_or_without_a_finite_value_are_known_whatever_their_signs(dtype):
    def constant(*values, repeat=1):
        return digest_and_constant(torch.tensor(values, dtype=dtype).repeat(repeat))[1]

    for repeat in (1, 50_000):
        assert constant(0.0, -0.0, repeat=repeat) == "zero"
        assert constant(NAN, -NAN, repeat=repeat) == "nan"
        assert constant(INF, -INF, repeat=repeat) == constant(NAN, -INF, repeat=repeat) == "inf"
    for values in ((), (0.0, 1.0), (NAN, 1.0), (NAN, 0.0), (INF, 1.0), (-INF, 0.0), (0.0, INF), (1.0, 0.0)):
        assert constant(*values) is None


def test_integers_have_zeros_and_no_nan():
    assert digest_and_constant(torch.zeros(3, dtype=torch.int64))[1] == "zero"
    assert digest_and_constant(torch.tensor([0, 1]))[1] is None
    assert digest_and_constant(torch.tensor([-1, -1]))[1] is None


def test_the_digest_is_the_same_with_what_is_reported_beside_it():
    for tensor in (torch.randn(7), torch.zeros(100, 100).t(), torch.randn(9000)):
        assert digest_and_constant(tensor)[0] == digest(tensor)


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(6.0), lambda: torch.arange(12.0)[::2] / 2], ids=["dense", "gaps"]
)
def test_bytes_can_be_read_when_nobody_else_holds_their_tensor(make):
    content = tensor_bytes(make())
    others = [torch.full((6,), -1.0) for _ in range(100)]  # would be given memory that was let go
    assert struct.unpack("6f", content) == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert len(others) == 100


def test_a_storage_can_be_resized_after_its_bytes_were_read():
    tensor = torch.ones(4)
    assert len(tensor_bytes(tensor)) == 16
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)
