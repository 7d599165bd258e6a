"""Makes values wrong, by 1 ULP in an element or grossly, and compares values bit by bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(x: Any, y: Any) -> bool:
    """Return whether two values agree in every bit: tensors in dtype, shape and content, other values by equality."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x is y:
            return True
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(as_integers(x), as_integers(y))
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(same, x, y))
    return type(x) is type(y) and bool(x == y)


def as_integers(x: Tensor) -> Tensor:
    """View a tensor's memory as integers; a complex element becomes two integers. A bool tensor stays unchanged."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.element_size()]) if x.dtype != torch.bool else x


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides, storage offset and alignment, since a kernel may be chosen by these."""
    # The whole storage, since `clone` of the tensor would drop its offset and its strides.
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value or nested list, in order, without empty tensors."""
    if isinstance(value, Tensor):
        return [value] if value.numel() else []
    return [x for item in value for x in tensors_of(item)] if isinstance(value, (tuple, list)) else []


def replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(item, old, new) for item in value)
    return value


def is_safe(value: Any) -> bool:
    """Return whether kernels access only valid memory even if elements of this value are wrong.

    Only floating-point tensors are safe, since integers may be indices or sizes.
    """
    return all(x.is_floating_point() or x.is_complex() for x in tensors_of(value)) and bool(tensors_of(value))


def by_one_ulp(value: Any, chance: random.Random) -> Any:
    """Return a copy of a value in which an element is off by 1 ULP; None if there is neither an element nor a number.

    - `chance`, a random generator, chooses the element: a finite nonzero element, if there is one.
    - An integer, or a Python number, changes by 1. Integers stay in the range of the tensor's values, unless all are
      equal.
    - Elements that share memory, as along an expanded dim, change together.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value + chance.choice((-1, 1)) if value else value + 1
    found = tensors_of(value)
    if not found:
        return None
    x = chance.choice(found)
    wrong = copied(x)
    where = _element(x, chance)
    # All elements are zero: the next number is a subnormal, which would vanish in any sum. So the element becomes the
    # ULP of 1.
    if x.is_floating_point() and not bool(x.any()):
        wrong[where] = torch.finfo(x.dtype).eps
        return replaced(value, x, wrong)
    # As integers, neighbouring floats of one sign differ by 1.
    bits = as_integers(wrong)
    # A complex element is two integers: either its real or its imaginary part changes.
    place = (*where, chance.randrange(2)) if x.is_complex() else where
    bits[place] = _off_by_one(x, bits[place].item(), chance)
    return replaced(value, x, wrong)


def _off_by_one(x: Tensor, bits: Any, chance: random.Random) -> Any:
    if x.dtype == torch.bool:
        return not bits
    if x.is_floating_point() or x.is_complex():  # sign and magnitude: adding 1 moves away from zero
        # The bits of infinity: its exponent is all ones, and so it is the first number that is not finite.
        infinity = int(as_integers(torch.tensor(float("inf"), dtype=x.real.dtype)))
        magnitude = bits & ((1 << (infinity.bit_length())) - 1)
        # A finite number must stay finite: an infinity would be seen everywhere, unlike 1 ULP.
        if magnitude == 0 or magnitude + 1 >= infinity:  # the largest finite number, and infinity, become smaller
            return bits + (1 if magnitude == 0 else -1)
        return bits + chance.choice((-1, 1))
    # An integer may be an index or a count: outside the tensor's range it could be invalid.
    return bits - 1 if bits == int(x.max()) and bits > int(x.min()) else bits + 1


def _element(x: Tensor, chance: random.Random) -> tuple[int, ...]:
    flat = x.detach().reshape(-1)
    usual = (flat != 0) & flat.isfinite() if flat.is_floating_point() or flat.is_complex() else None
    if usual is None or not bool(usual.any()) or bool(usual.all()):
        number = chance.randrange(flat.numel())
    else:
        places = usual.nonzero().reshape(-1)
        number = int(places[chance.randrange(places.numel())])
    where: list[int] = []
    for size in reversed(x.shape):
        number, rest = divmod(number, size)
        where.append(rest)
    return tuple(reversed(where))


def grossly(value: Any, chance: random.Random) -> Any:
    """Return a copy of a value in which every element is far from the original. A value without elements is unchanged.

    Finite elements stay finite. Integers are drawn from the range of the tensor's values. A Python number grows by 1.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value + 1
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    for x in tensors_of(value):
        wrong = copied(x)
        if x.dtype == torch.bool:
            new = ~x
        elif x.is_floating_point() or x.is_complex():
            real = torch.randn(x.shape, generator=generator, dtype=torch.float64) * 2
            # At least 1 from zero, so every finite element moves by at least 1 + |x|.
            away = real + real.sign()
            new = torch.where(x.isfinite(), x + (away * (1 + x.abs())).to(x.dtype), x)
        else:
            low, high = int(x.min()), int(x.max())
            drawn = torch.randint(low, high + 1, x.shape, generator=generator)
            # If all integers are equal, their range has no other value.
            new = (drawn if high > low else x + 1).to(x.dtype)
        once = tuple(
            slice(0, 1) if s == 0 else slice(None) for s in x.stride()
        )  # elements of an expanded dim share memory
        wrong[once] = new[once]
        value = replaced(value, x, wrong)
    return value
