import pytest
import torch

from harness.capture.digest import digest

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def test_a_digest_is_32_hexadecimal_digits_that_never_change():
    # Pinned: recordings of different days and machines are compared.
    assert digest(torch.arange(4, dtype=torch.float32)) == "62113c3c0de444b40ae18917c34b5369"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_counts(dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
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
    ("values", "others"),
    [
        pytest.param([1.0, 2.0, 3.0], [3.0, 1.0, 2.0], id="permutation"),
        pytest.param([1.0, 2.0, 3.0], [2.0, 1.0, 3.0], id="swapped pair"),
        pytest.param([1.0, 2.0, 3.0], [-1.0, -2.0, 3.0], id="two flipped signs"),
        pytest.param([0.0, 1.0], [-0.0, 1.0], id="sign of zero"),
    ],
)
def test_equal_sums_of_bits_do_not_make_equal_digests(values, others):
    assert digest(torch.tensor(values)) != digest(torch.tensor(others))


def test_nan_payloads_count():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(quiet) == digest(quiet.clone())
    assert digest(quiet) != digest(other)


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


def test_a_sparse_tensor_is_refused():
    with pytest.raises(TypeError, match=r"a digest needs a dense tensor, not one of layout torch\.sparse_coo"):
        digest(torch.eye(2).to_sparse())
