"""Reads the inputs with which a program was exported, without unpickling them.

torch.save writes a zip with the bytes of tensors, and a pickle that describes how the tensors are nested. A pickle is a
program. Only its instructions for containers, numbers, texts and tensors are followed here. No class or function is
looked up or called.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.powers.proofs.prover.programs.plain_archive import ArchiveError, files_of
from bitproof.harness.powers.proofs.prover.programs.plain_tensors import TensorError, memory_of, with_layout

LARGEST = 1 << 24
"""The maximum size of the pickle in bytes."""

DEEPEST = 100
"""The maximum nesting of containers."""

_STORAGES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
    "torch ComplexFloatStorage": torch.complex64,
    "torch ComplexDoubleStorage": torch.complex128,
}
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_PLAIN = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Mapping[str, type] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("BINGET", "LONG_BINGET")


class SampleError(ValueError):
    """The sample inputs contain something other than tensors, numbers and texts."""


@dataclass(frozen=True)
class _Global:
    """A class or a function that the pickle names. It is never looked up."""

    name: str


class _Mark:
    """A mark on the pickle's stack. Everything above it becomes the items of a container."""


def read(content: memoryview) -> tuple[Any, Any]:
    """Return (positional inputs, named inputs) from the content of a file.

    Raises SampleError if they are not plain data, and ArchiveError if the file is damaged.
    """
    files = {name.partition("/")[2]: data for name, data in files_of(bytes(content)).items()}
    if bytes(files.get("byteorder", b"little")) != b"little" or "data.pkl" not in files:
        raise SampleError("its sample inputs were not written by torch.save on this kind of machine")
    found = _Machine(files).run(bytes(files["data.pkl"]))
    if type(found) is not tuple or len(found) != 2 or type(found[0]) is not tuple or type(found[1]) is not dict:
        raise SampleError("its sample inputs are no tuple of positional and named inputs")
    return found


class _Machine:
    """Interprets a pickle without running any code. It only builds containers and tensors."""

    def __init__(self, files: Mapping[str, memoryview]) -> None:
        self.files = files
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.memories: dict[str, Tensor] = {}
        self.depths: dict[int, int] = {}
        self.kept: list[Any] = []

    def run(self, pickled: bytes) -> Any:
        if len(pickled) > LARGEST:
            raise SampleError(f"its sample inputs have a pickle of more than {LARGEST} bytes")
        try:
            for code, argument, at in pickletools.genops(pickled):
                if code.name == "STOP":
                    # Bytes after the end could mean something to another reader.
                    if len(self.stack) != 1 or at != len(pickled) - 1:
                        raise SampleError("its sample inputs end too early or too late")
                    return self.stack.pop()
                self._step(code.name, argument)
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, SampleError | TensorError | ArchiveError):
                raise
            raise SampleError(f"its sample inputs are damaged: {str(error)[:200]}") from error
        raise SampleError("its sample inputs do not end")

    def _step(self, name: str, argument: Any) -> None:
        # Each instruction pops its operands from the stack and pushes its result, as in pickle's own machine.
        stack = self.stack
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = self._marked() if name == "TUPLE" else [stack.pop() for _ in range(int(name[5:]))][::-1]
            stack.append(self._checked(tuple(items), items))
        elif name in ("APPEND", "APPENDS"):
            items = self._marked() if name == "APPENDS" else [stack.pop()]
            self._top(list).extend(self._checked(items, items, stack[-1]))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._marked() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            keys = items[::2]
            if len(items) % 2 or not all(type(key) in (str, int) for key in keys):
                raise SampleError("its sample inputs have a dictionary whose keys are no texts and no integers")
            self._top(dict).update(zip(keys, self._checked(items[1::2], items[1::2], stack[-1]), strict=True))
        # Only the name is kept: looking it up would import a module.
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name in _PUTS:
            # MEMOIZE has no argument: it takes the next index.
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._reused(self.memo[argument]))
        elif name == "BINPERSID":
            stack.append(self._memory(stack.pop()))
        elif name == "REDUCE":
            given, called = stack.pop(), stack.pop()
            stack.append(self._rebuilt(called, given))
        elif name != "PROTO":
            raise SampleError(f"its sample inputs hold a pickle that does more than list tensors ({name})")

    def _marked(self) -> list[Any]:
        items = []
        while not isinstance(item := self.stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise SampleError("its sample inputs add to what is no container")
        return self.stack[-1]

    def _checked(self, items: Any, inner: list[Any], holder: Any = None) -> Any:
        """Check `items`, which were read from a pickle, and return them.

        - `inner`: a list of the items.
        - `holder`: the container to which they are added; None if `items` itself is the container.

        Raises SampleError if an item is a mark (the file is damaged), or if the container is nested too deep.
        """
        if any(isinstance(x, _Mark) for x in inner):
            raise SampleError("its sample inputs are damaged: a container without items")
        depth = 1 + max((self.depths.get(id(x), 0) for x in inner), default=0)
        if depth > DEEPEST:
            raise SampleError(f"its sample inputs are nested more than {DEEPEST} deep")
        container = items if holder is None else holder
        self.depths[id(container)] = max(depth, self.depths.get(id(container), 0))
        self.kept.append(container)  # an id is only unique while its object is alive
        return items

    def _reused(self, value: Any) -> Any:
        # Several tensors may have the same tuple as their sizes or strides.
        # Any other container that is used twice could contain itself, or grow exponentially when it is walked.
        is_numbers = type(value) is tuple and all(type(x) is int for x in value)
        if isinstance(value, tuple | list | dict) and not is_numbers:
            raise SampleError("its sample inputs use a container twice")
        return value

    def _memory(self, persistent_id: Any) -> Tensor:
        kind, storage, key, _, num = persistent_id
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in _STORAGES:
            raise SampleError("its sample inputs have a tensor of another kind of memory")
        if not isinstance(key, str) or not re.fullmatch(r"\d{1,9}", key, re.ASCII):
            raise SampleError("its sample inputs have a tensor without a number")
        dtype, file = _STORAGES[storage.name], f"data/{key}"
        if file not in self.files:
            raise SampleError(f"its sample inputs have no {file}")
        memory = self.memories.get(file)
        if memory is None:
            memory = self.memories[file] = memory_of(self.files[file], dtype, f"sample inputs' {file}")
        if memory.dtype != dtype or memory.numel() != num:
            raise SampleError(f"its sample inputs say that {file} has {num} elements of {dtype}, and it has not")
        return memory

    def _rebuilt(self, called: Any, given: Any) -> Any:
        if not isinstance(called, _Global) or type(given) is not tuple:
            raise SampleError("its sample inputs call something")
        if called.name == _ORDERED and given == ():
            return {}
        if called.name != _REBUILD or len(given) not in (6, 7):
            raise SampleError(f"its sample inputs call {called.name[:200]}, which is not called")
        memory, offset, sizes, strides, requires_grad, hooks, *_ = given
        are_numbers = all(type(x) is tuple and all(type(n) is int for n in x) for x in (sizes, strides))
        if not isinstance(memory, Tensor) or type(offset) is not int or not are_numbers or hooks != {}:
            raise SampleError("its sample inputs have a tensor that is not plain")
        tensor = with_layout(memory, sizes, strides, offset, "a sample input")
        return tensor.requires_grad_(requires_grad is True and (tensor.is_floating_point() or tensor.is_complex()))
