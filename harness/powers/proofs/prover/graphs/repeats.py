"""Runs each distinct call on fake values only once, because the layers of a model repeat the same calls.

1. A tensor is stored as its layout and the number of its memory. Its fake value is created only if a call needs it.
2. Two calls are equal if operator and arguments are equal, and their tensors have equal layouts and share memory in the
   same way. Their results have equal layouts.
3. So a later call that equals a remembered call does not run. Its results get the same layouts, in the memory of its
   arguments or in new memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from bitproof.harness.graph import operators
from bitproof.harness.torch_compat import OpOverload
from bitproof.harness.torch_operators import storage_key


class TensorLayout(NamedTuple):
    """The dtype, device and memory layout of a tensor."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def fields(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
        """The layout as the fields of `proof_data.Tensor`, without `storage`: dtype, device, shape, strides, offset."""
        return str(self.dtype).removeprefix("torch."), self.device.type, self.shape, self.strides, self.offset


class Result(NamedTuple):
    """A remembered result of a call: its layout, and its memory.

    `place` is the index of this memory among the memories that the call reads; None for new memory.
    """

    layout: TensorLayout
    place: int | None


@dataclass(eq=False)
class StoredTensor:
    """A tensor stored as its layout and the number of its memory. `fake` is None until a call needs the fake value."""

    layout: TensorLayout
    memory: int
    fake: Tensor | None = None


class _OpenError(Exception):
    """An argument has no key: it is neither a plain tensor with fixed sizes nor a constant."""


class Repeats:
    """Stores the values of a graph, and remembers the results of its calls. Use it within the graph's fake mode.

    A plain tensor with fixed sizes is stored as a `StoredTensor` (its layout), any other value unchanged.
    """

    def __init__(self) -> None:
        self._remembered: dict[Hashable, Any] = {}  # by a call's key, a Result for each of its results
        self._keys: dict[Node, tuple[Hashable, list[int]]] = {}  # by node that runs, its key and the memories it reads
        self._numbers = itertools.count()
        self._memories: dict[int, int] = {}  # by key of a fake storage, the number of the memory
        self._firsts: dict[int, StoredTensor] = {}  # by memory, the first value in it
        self._of_fake: dict[int, StoredTensor] = {}  # by id of a fake value, which stays alive

    def stored(self, value: Any) -> Any:
        """Return a call's result after replacing each plain tensor with fixed sizes by a `StoredTensor`."""
        if type(value) in (tuple, list):
            return type(value)(map(self.stored, value))
        layout = _layout(value) if isinstance(value, Tensor) else None
        if layout is None:
            return value
        known = self._of_fake.setdefault(id(value), StoredTensor(layout, self.memory_of(value), value))
        known.layout = layout  # a call may change its argument's layout and return it
        self._firsts.setdefault(known.memory, known)
        return known

    def memory_of(self, value: Any) -> int:
        if isinstance(value, StoredTensor):
            return value.memory
        key = storage_key(value)
        if key not in self._memories:
            self._memories[key] = next(self._numbers)
        return self._memories[key]

    def fake(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self.fake, value))
        if not isinstance(value, StoredTensor):
            return value
        if value.fake is None:
            dtype, device, shape, strides, offset = value.layout
            # The first value in a memory spans all of it; later values there are views of the first.
            first = self._firsts[value.memory]
            if first is value:
                value.fake = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                self._memories[storage_key(value.fake)] = value.memory
            else:
                memory = self.fake(first)
                if memory.dtype != dtype:  # e.g. a complex tensor's memory viewed as pairs of real numbers
                    count = memory.untyped_storage().nbytes() // memory.itemsize
                    memory = torch.as_strided(memory, (count,), (1,), 0).view(dtype)
                value.fake = torch.as_strided(memory, shape, strides, offset)
            self._of_fake[id(value.fake)] = value
        return value.fake

    def again(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Return the results of a node's call if it repeats a remembered call; None if the call must run."""
        if not isinstance(node.target, OpOverload) or operators.written_arguments(node):
            return None
        memories: list[int] = []
        try:
            key = node.target, _key((node.args, *sorted(node.kwargs.items())), values, memories)
        except _OpenError:
            return None
        # The call must run. `remember` then stores its results under this key.
        if key not in self._remembered:
            self._keys[node] = key, memories
            return None
        return _mapped(self._remembered[key], lambda given: self._stored_tensor(given, memories))

    def _stored_tensor(self, given: Result, memories: list[int]) -> StoredTensor:
        found = StoredTensor(given.layout, next(self._numbers) if given.place is None else memories[given.place])
        self._firsts.setdefault(found.memory, found)
        return found

    def remember(self, node: Node, value: Any) -> None:
        """Remember the results of a node's call, after the call ran.

        All results must be plain tensors with fixed sizes. Each must be in an argument's memory, or alone in new
        memory.
        """
        if node not in self._keys:
            return
        key, memories = self._keys.pop(node)
        results = [x for x in (value if type(value) in (tuple, list) else (value,)) if x is not None]
        # Results in new memory must not share it with each other: a `Result` only names an argument's memory.
        own = [x.memory for x in results if isinstance(x, StoredTensor) and x.memory not in memories]
        if results and all(_is_known(x, memories) for x in results) and len({*own}) == len(own):
            places = {memory: place for place, memory in enumerate(memories)}
            self._remembered[key] = _mapped(value, lambda x: Result(x.layout, places.get(x.memory)))


def _layout(x: Tensor) -> TensorLayout | None:
    if x.layout != torch.strided or x.is_conj() or x.is_neg() or x.is_quantized:
        return None
    shape, strides, offset = tuple(x.shape), tuple(x.stride()), x.storage_offset()
    is_closed = all(type(n) is int for n in (*shape, *strides, offset))
    return TensorLayout(x.dtype, x.device, shape, strides, int(offset)) if is_closed else None


def _is_known(x: Any, memories: list[int]) -> bool:
    # A result in new memory must fill it from the start to the end.
    if not isinstance(x, StoredTensor) or x.fake is None:
        return False
    _, _, shape, strides, offset = x.layout
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else (last + 1) * x.layout.dtype.itemsize
    return x.memory in memories or (offset == 0 and x.fake.untyped_storage().nbytes() == size)


def _key(x: Any, values: Mapping[Node, Any], memories: list[int]) -> Hashable:
    """Return the key of an argument, which is equal for arguments of equal layout. Raises _OpenError if there is none.

    The key of a tensor has the index of its memory in `memories`. A memory that is not yet in `memories` is appended.
    """
    match x:
        case Node():
            return _key(values[x], values, memories)
        case StoredTensor():
            if x.memory not in memories:
                memories.append(x.memory)
            return x.layout, memories.index(x.memory)
        case list() | tuple():
            return type(x), *(_key(item, values, memories) for item in x)
        case bool() | int() | float() | str() | None:
            return type(x), repr(x)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return x
    raise _OpenError


def _mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(None if x is None else of(x) for x in value)
    return of(value)
