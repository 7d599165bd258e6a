"""Finds all objects that a call can reach, copies them, and finds the changes that a call makes to them.

    function, inputs ─► modules, optimizers, containers, objects, closures ─► tensors, plain values

Each object has a path, which leads to it from the function or an input: `module kept[0]`, `input 1['mask']`. Two
programs are only equal if they leave the same content at every path.

The content of an object is its attributes if its classes are written in Python, otherwise what pickle keeps. An object
without either, such as an open file, is refused.
"""

from __future__ import annotations

import abc
import collections
import copy
import copyreg
import dis
import enum
import functools
import gc
import hashlib
import itertools
import logging
import operator
import os
import sys
import sysconfig
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim import Optimizer

from bitproof import harness
from bitproof.harness.machine.determinism import read_switches
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.programs.side_effects import of_file, process_state
from bitproof.harness.torch_compat import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    hooks_of_gradients,
    module_attributes,
)
from bitproof.harness.torch_compile import is_of_compiler
from bitproof.harness.torch_operators import is_view, storage_key

GRADIENT = "gradient of "

MOST_BYTES = 80_000_000
"""The maximum size in bytes of the values that are drawn for tensors without values."""

Token = Any
"""The content of an object as data that can be compared.

These are exact numbers and texts; for a container, its kind and length.
"""

_CachedFunction = type(functools.lru_cache(len))
"""The class of functions that `functools.lru_cache` makes."""


class Reached:
    """All objects that can be reached from `roots`, in a fixed order. Each has a path, such as `input 1['mask']`.

    - `tokens`: the content at each path, as data that can be compared.
    - `tensors`: the tensors, by path.
    - `objects`: every object once.
    - `known`: names of tensors, by id. The path of such a tensor is its name.
    """

    def __init__(self, roots: Mapping[str, Any], known: Mapping[int, str] | None = None) -> None:
        self.tokens: dict[str, Token] = {}
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Any] = []
        self._known = known or {}
        self._first: dict[int, str] = {}
        stack = [*roots.items()][::-1]
        while stack:
            place, x = stack.pop()
            # Reversed, so that children are visited in their own order. `module .weight` becomes `module weight`.
            stack += reversed([*self._visit(place.replace(" .", " "), x)])

    def _visit(self, place: str, x: Any) -> Iterator[tuple[str, Any]]:
        if (token := plain_token(x)) is not None:
            self.tokens[place] = token
            return
        if isinstance(x, Tensor):
            self.tensors[place] = x
            if (name := self._known.get(id(x), place)) != place:
                self.tokens[place] = "tensor", name
                place = name
        # The object was found before, maybe in a cycle: note the sharing, and do not descend again.
        if (first := self._first.setdefault(id(x), place)) != place or place in self.tokens:
            self.tokens.setdefault(place, ("the same as", first))
            return
        self.objects.append(x)  # keeps it alive; otherwise another object could get its id
        if isinstance(x, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
            # Reading a generator empties it.
            raise RefusedError(f"{place} is a {type(x).__name__}, which no two runs can read", where="the inputs")
        self.tokens[place] = _token(x)
        self.tensors |= {place: x} if isinstance(x, Tensor) else {}
        yield from ((name, child) for name, child in _children(place, x, self._known))


def changed(before: Reached, after: Reached, *, without: str | None = None) -> dict[str, Token | Tensor]:
    """Return the paths whose content differs between `before` and `after`, each with its new content.

    Paths below the root `without` are left out. The new content is:

    - a tensor, if the path now has another tensor;
    - None, if the path now has nothing;
    - otherwise a token: data that can be compared.
    """
    found: dict[str, Token | Tensor] = {}
    for place in dict.fromkeys([*before.tokens, *after.tokens]):
        if without is not None and place.removeprefix(GRADIENT).startswith(without):
            continue
        x = after.tensors.get(place)
        if x is not None and before.tensors.get(place) is not x:
            found[place] = x
        elif before.tokens.get(place) != after.tokens.get(place):
            found[place] = after.tokens.get(place)
    return found


def plain_token(x: Any) -> Token:
    """Return data that identify a plain value, such as `("int", "3")` for 3; None for an object that is no plain value.

    Unequal values have unequal data: -0.0 is not 0.0, and True is not 1.
    """
    # An object of a subclass is no plain value, as it may have attributes.
    if isinstance(x, float) and type(x) is float:
        return "float", x.hex()
    if isinstance(x, complex) and type(x) is complex:
        return "complex", x.real.hex(), x.imag.hex()
    if isinstance(x, enum.Enum):
        return "enum", type(x).__qualname__, x.name
    if x is None or type(x) in _PLAIN:
        return type(x).__name__, repr(x)
    return None


_PLAIN = {
    *(bool, int, str, bytes, type(...), type(NotImplemented), range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
}


def _token(x: Any) -> Token:
    match x:
        case Tensor():
            memory = str(x.untyped_storage().nbytes()) if x.layout == torch.strided else None
            return "tensor", str(x.dtype), tuple(map(str, x.shape)), x.requires_grad, hooks_of_gradients(x), memory
        case numpy.ndarray() if x.dtype != object:
            return "array", str(x.dtype), x.shape, hashlib.sha256(numpy.ascontiguousarray(x).tobytes()).hexdigest()
        case torch.Generator():
            return "generator", hashlib.sha256(x.get_state().numpy().tobytes()).hexdigest()
        case bytearray() | memoryview():
            return type(x).__name__, bytes(x).hex()
        case set() | frozenset():
            # The order of a set may differ between two runs.
            return type(x).__name__, len(x), sorted(repr(plain_token(y) or type(y).__name__) for y in x)
        case weakref.ref():
            return "weak reference", x() is None
        case logging.Logger():
            known = {key: plain_token(value) for key, value in vars(x).items()}
            return "logger", len(x.handlers), len(x.filters), {key: y for key, y in known.items() if y is not None}
        case _ if isinstance(x, _LOCKS):
            return "lock", repr(x)
        case _CachedFunction() if not _is_atom(x):
            return "cache", None
        case types.FunctionType():
            annotations = {key: plain_token(value) for key, value in x.__annotations__.items()}
            return "function", x.__name__, x.__qualname__, x.__doc__, annotations, _is_atom(x) and id(x)
        case _ if _is_atom(x):
            return "object", type(x).__qualname__, id(x)
        case dict():
            return type(x).__qualname__, [repr(plain_token(key) or type(key).__name__) for key in x]
        case list() | tuple() | collections.deque():
            return type(x).__qualname__, len(x)
    return "object", type(x).__module__, type(x).__qualname__


def _is_atom(x: Any) -> bool:
    """Return whether an object is used as it is, without copying or inspecting it.

    Such objects are code, standard streams, modules and classes, for example.
    """
    if isinstance(x, types.FunctionType):
        return not (x.__closure__ or x.__defaults__ or x.__kwdefaults__ or vars(x)) or is_of_compiler(x)
    if isinstance(x, _CachedFunction):
        return not is_users_file(getattr(getattr(x, "__wrapped__", None), "__code__", _OF_NOBODY).co_filename)
    if isinstance(x, _BOUND):
        of = x.__self__
        return of is None or isinstance(of, types.ModuleType | type) or type(of).__name__ == "PyCapsule"
    if any(x is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return True
    return isinstance(x, _ATOMS)


_OF_NOBODY = (lambda: None).__code__
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
"""Methods written in C, bound to an object, such as `[].append`."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_ATOMS = (
    *(types.ModuleType, type, types.CodeType, property, classmethod, staticmethod),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(abc.ABC)["_abc_impl"])),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
    *(logging.Logger, Graph, Node, torch.TypedStorage, torch.UntypedStorage, torch.SymInt),
    *(OpOverload, OpOverloadPacket, HigherOrderOperator),
)


def _children(place: str, x: Any, known: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for each object directly inside `x`, which is at the path `place`.

    `known` maps ids of tensors to their names. Raises RefusedError if `x` has hidden state that even pickle does not
    store.
    """
    if _is_atom(x) or isinstance(x, torch.Generator):
        return
    match x:
        case Tensor():
            if (x.is_leaf or x.retains_grad) and x.grad is not None:
                yield f"{GRADIENT}{place}", x.grad
            # A fake tensor's attributes belong to torch, not to the user.
            if not isinstance(x, FakeTensor):
                yield from ((f"{place}.{key}", value) for key, value in vars(x).items())
            return
        case numpy.ndarray():
            yield from ((f"{place}[{i}]", y) for i, y in enumerate(x.reshape(-1).tolist() if x.dtype == object else []))
            return
        case weakref.ref():
            yield f"{place}()", x()
            return
        case types.FunctionType():
            names = x.__code__.co_freevars
            yield from ((f"{place} {name}", _content(c)) for name, c in zip(names, x.__closure__ or (), strict=True))
            yield f"{place} defaults", x.__defaults__
            yield f"{place} keyword defaults", x.__kwdefaults__
        case types.MethodType():
            yield f"{place} self", x.__self__
            yield f"{place} function", x.__func__
        case _ if isinstance(x, _BOUND):
            yield f"{place} self", x.__self__
            return
        case _CachedFunction():
            yield f"{place} function", x.__wrapped__
            yield from ((f"{place} result {i}", y) for i, y in enumerate(_cached_objects(x)))
            return
        case types.MappingProxyType():
            yield f"{place} of", dict(x)
            return
        case BaseException():
            yield from ((f"{place} {key}", getattr(x, key)) for key in ("__cause__", "__context__"))
            yield f"{place} lines", len([*traceback.walk_tb(x.__traceback__)])
        case functools.partial():
            yield from ((f"{place} {key}", getattr(x, key)) for key in ("func", "args", "keywords"))
        case nn.Module():
            yield from ((f"{place}.{key}", value) for key, value in module_attributes(x))
            return
        case Optimizer():
            yield from _optimizers(place, x, known)
            return
        case dict():
            for i, (key, value) in enumerate(x.items()):
                if (token := plain_token(key)) is None:
                    yield f"{place} key {i}", key
                yield f"{place}[{key!r}]" if token is not None else f"{place}[key {i}]", value
            yield from ([(f"{place} default", x.default_factory)] if isinstance(x, collections.defaultdict) else ())
        case list() | tuple() | collections.deque():
            yield from ((f"{place}[{i}]", y) for i, y in enumerate(x))
        case set() | frozenset():
            yield from ((f"{place} item {i}", y) for i, y in enumerate(x) if plain_token(y) is None)
    # Attributes, in the dictionary or in slots. For objects with hidden state, pickle has the rest.
    own = getattr(x, "__dict__", None)
    slots = [key for kind in type(x).__mro__ for key in _slots(kind) if hasattr(x, key)]
    yield from ((f"{place}.{key}", value) for key, value in (own.items() if isinstance(own, dict) else ()))
    yield from ((f"{place}.{key}", getattr(x, key)) for key in slots)
    if not isinstance(x, _LOOKED_INTO) and any(map(_has_more, type(x).__mro__)):
        if (state := _pickled_parts(x)) is None:
            what = f"{place} is a {type(x).__module__}.{type(x).__qualname__}, whose state nothing shows"
            raise RefusedError(what, where="the program or its inputs")
        yield from ((f"{place} part {i}", y) for i, y in enumerate(state[1:]))


_LOOKED_INTO = (
    *(dict, list, tuple, set, frozenset, collections.deque, bytearray, memoryview, numpy.ndarray),
    *(types.FunctionType, types.MethodType, functools.partial, *_LOCKS),
)


def _has_more(kind: type) -> bool:
    """Return whether objects of a class have hidden state, such as fields written in C.

    Attributes and the state of the base class do not count.
    """
    # A slot, the dictionary of attributes and the list of weak references each add a pointer; other state adds more.
    if (base := kind.__base__) is None or kind.__itemsize__ != base.__itemsize__:
        return kind is not object
    shown = [*_slots(kind), *(key for key in ("__dict__", "__weakref__") if key in vars(kind))]
    return kind.__basicsize__ - base.__basicsize__ > len(shown) * _POINTER


_POINTER = type("_", (), {"__slots__": ("x",)}).__basicsize__ - object.__basicsize__


def _cached_objects(cached: Any) -> Iterator[Any]:
    # Only the garbage collector can find them.
    for x in gc.get_referents(cached):
        for y in x.values() if isinstance(x, dict) and x is not vars(cached) else ():
            held = gc.get_referents(y) if type(y).__name__ == "_lru_list_elem" else [y]
            yield from (z for z in held if not isinstance(z, Tensor) and plain_token(z) is None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    # The cell is empty: its variable has no value yet.
    except ValueError:
        return None


def _slots(kind: type) -> Sequence[str]:
    own = vars(kind).get("__slots__", ())
    keys = [key for key in ([own] if isinstance(own, str) else own) if key not in ("__dict__", "__weakref__")]
    is_private = [key.startswith("__") and not key.endswith("__") for key in keys]
    prefix = f"_{kind.__name__.lstrip('_')}"  # Python stores `__key` of a class C as `_C__key`
    return [f"{prefix}{key}" if private else key for key, private in zip(keys, is_private, strict=True)]


def _pickled_parts(x: Any) -> tuple[Any, ...] | None:
    try:
        reducer = copyreg.dispatch_table.get(type(x))
        found = x.__reduce_ex__(4) if reducer is None else reducer(x)
    except Exception:
        return None
    # A text is the name of a global object.
    return (found,) if isinstance(found, str) else found if isinstance(found, tuple) else None


def _optimizers(place: str, x: Optimizer, known: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(x.param_groups):
        yield f"{place} groups", len(x.param_groups)
        yield from ((f"{place} group {number} {key}", value) for key, value in group.items())
    for number, (parameter, state) in enumerate(x.state.items()):
        name = known.get(id(parameter), f"{place} parameter {number}").removeprefix("parameter ")
        name = name if name.startswith("optimizer ") else f"optimizer {name}"
        if isinstance(state, dict):
            yield from ((f"{name}.{key}", value) for key, value in state.items())
        else:
            yield name, state
    yield f"{place} kind of state", [type(x.state), getattr(x.state, "__dict__", None)]
    yield from ((f"{place} {key}", value) for key, value in vars(x).items() if key not in ("param_groups", "state"))


# -- copies -------------------------------------------------------------------------------------------


def copied(roots: Mapping[str, Any], tensor: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Copy the objects in `roots`, replacing each tensor `x` by `tensor(x)`. Returns the copies by name.

    Objects that are shared stay shared in the copy. Raises RefusedError unless the copy has the same content at every
    path.
    """
    reached = Reached(roots)
    _refuse_shared([*reached.objects, *Reached(_around(reached.objects)[0]).objects])
    # Alone, deepcopy would leave out attributes that a class leaves out of its pickle, as optimizers do, and copies of
    # functions would share their closures. It takes the copy of an object from `memo`, by id, so such objects are put
    # there first. Functions, modules and optimizers start empty and are filled by `later`, as they may refer to each
    # other.
    memo: dict[int, Any] = {}
    later: list[Callable[[], None]] = []
    try:
        for x in reached.objects:
            if isinstance(x, Tensor):
                memo[id(x)] = tensor(x)
        for x in reached.objects:
            if isinstance(x, types.FunctionType) and not _is_atom(x):
                memo[id(x)] = _copy_function(x, memo, later)
            elif isinstance(x, nn.Module | Optimizer):
                memo[id(x)] = _copy_object(x, memo, later)
            elif _is_atom(x) or (not hasattr(x, "__dict__") and _pickled_parts(x) is None):
                memo[id(x)] = x
        for x in reached.objects:
            if type(x) is weakref.ref and x() is not None:
                memo[id(x)] = weakref.ref(copy.deepcopy(x(), memo))
            elif isinstance(x, _BOUND) and not _is_atom(x):
                memo[id(x)] = getattr(copy.deepcopy(x.__self__, memo), x.__name__)
        made = {name: copy.deepcopy(root, memo) for name, root in roots.items()}
        for each in later:
            each()
        for x in reached.objects:
            if isinstance(x, Tensor) and memo[id(x)] is not x:
                _copy_attributes(x, memo)
    except RefusedError:
        raise
    except Exception as error:
        what = f"it cannot be copied, so that nothing shows what it does: {type(error).__name__}: {error}"
        raise RefusedError(what.splitlines()[0], where="the program or its inputs") from error
    # A class may define its own `__deepcopy__`, so the copy is checked.
    again = Reached(made)
    if unlike := [x for x in {**reached.tokens, **again.tokens} if reached.tokens.get(x) != again.tokens.get(x)]:
        raise RefusedError(f"a copy of it is another at {unlike[0]}", where="the program or its inputs")
    return made


def _refuse_shared(objects: Sequence[Any]) -> None:
    # The copies of two objects that share memory would not share it. `Memories` keeps the sharing of tensors only.
    spans: dict[int, tuple[Any, object, int, int]] = {}
    for x in objects:
        try:
            if isinstance(x, Tensor):
                memory = x.untyped_storage() if has_values(x) and x.layout == torch.strided else None
                begin, size = (memory.data_ptr(), memory.nbytes()) if memory and x.device.type == "cpu" else (0, 0)
            else:
                octets = numpy.frombuffer(x, numpy.uint8) if not isinstance(x, numpy.ndarray) else x
                begin, end = numpy.lib.array_utils.byte_bounds(octets)
                size = end - begin
        except (TypeError, ValueError, RuntimeError):
            continue  # not an object with a buffer
        if size:
            spans[id(x)] = (x, *of_file(begin), size)
    for x, where, begin, size in spans.values():
        for y, its, start, length in spans.values() if not isinstance(x, Tensor) else ():
            if x is not y and where == its and begin < start + length and start < begin + size:
                what = f"a {type(x).__name__} and a {type(y).__name__} share memory: pass a copy of one"
                raise RefusedError(what, where="the program or its inputs")


def _copy_function(x: types.FunctionType, memo: dict[int, Any], later: list[Callable[[], None]]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in x.__closure__ or ())
    made = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
    made.__qualname__, made.__module__, made.__doc__ = x.__qualname__, x.__module__, x.__doc__
    made.__annotations__ = x.__annotations__

    def fill() -> None:
        for own, cell in zip(cells, x.__closure__ or (), strict=True):
            try:
                own.cell_contents = copy.deepcopy(cell.cell_contents, memo)
            except ValueError:
                continue  # a variable that has no value yet
        made.__defaults__ = copy.deepcopy(x.__defaults__, memo)
        made.__kwdefaults__ = copy.deepcopy(x.__kwdefaults__, memo)
        vars(made).update(copy.deepcopy(vars(x), memo))

    # Filled only later, since a closure may refer to the function itself.
    later.append(fill)
    return made


def _copy_object(x: Any, memo: dict[int, Any], later: list[Callable[[], None]]) -> Any:
    # Without `__init__`, which may do more than set attributes.
    made = object.__new__(type(x))
    later.append(lambda: vars(made).update({key: copy.deepcopy(value, memo) for key, value in vars(x).items()}))
    return made


def _copy_attributes(x: Tensor, memo: dict[int, Any]) -> None:
    made = memo[id(x)]
    if (x.is_leaf or x.retains_grad) and x.grad is not None:
        made.grad = memo[id(x.grad)]
    for key, value in vars(x).items():
        setattr(made, key, copy.deepcopy(value, memo))


class Memories:
    """Copies tensors. If tensors share memory, their copies share memory, with the same layouts.

    `made` maps the id of an original tensor to its copy.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self.made: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        name = f"a {type(x).__name__} of shape {list(x.shape)}"
        if hooks_of_gradients(x):
            raise RefusedError(f"{name} has hooks on its gradient, which no graph shows", where="the inputs")
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_quantized:
            raise RefusedError(f"{name} is not plain memory, and cannot be copied", where="the inputs")
        memory = storage_key(x)
        if memory not in self._copies:
            # The whole storage, as other tensors may view other parts of it.
            self._copies[memory] = x.untyped_storage().clone()
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        with torch.no_grad():
            made.set_(self._copies[memory], x.storage_offset(), x.shape, x.stride())
            # Autograd refuses some in-place writes to views, so the copy of a view must be a view.
            made = made.view_as(made) if is_view(x) else made
        made = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made
        self.made[id(x)] = made.requires_grad_(x.requires_grad)
        return made


def valued(roots: Mapping[str, Any]) -> dict[str, Any] | None:
    """Copy the objects in `roots`, replacing tensors without values by CPU tensors of zeros.

    Returns the copies by name; None if all tensors have values, or if the zeros would be too large. Raises RefusedError
    if copying fails.
    """
    lacking = {id(x): x for x in Reached(roots).objects if isinstance(x, Tensor) and not has_values(x)}
    if not lacking or sum(x.untyped_storage().nbytes() for x in lacking.values()) > MOST_BYTES:
        return None
    # Tensors that share memory stay views of one storage.
    memories: dict[object, Tensor] = {}

    def tensor(x: Tensor) -> Tensor:
        if id(x) not in lacking:
            return x
        if x.layout != torch.strided or x.grad_fn is not None:
            raise RefusedError(f"a {type(x).__name__} that is not plain memory", where="the inputs")
        memory = memories.setdefault(storage_key(x), torch.zeros(x.untyped_storage().nbytes(), dtype=torch.uint8))
        with torch.no_grad():
            made = memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        made = nn.Parameter(made) if isinstance(x, nn.Parameter) else made
        return made.requires_grad_(x.requires_grad)

    return copied(roots, tensor)


def has_values(x: Any) -> bool:
    """Return whether an object is a tensor with values: not a fake tensor, and not on the meta device."""
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.device.type != "meta"


# -- state shared by calls -----------------------------------------------------------------------------


class Around:
    """A snapshot of global state that a program may change: variables, class attributes, loggers, the process.

    Only variables and attributes that the user's code names are included. `in_place` is False while a program is
    traced: the elements of tensors are then not compared.
    """

    def __init__(self, reached: Reached, *, in_place: bool = True) -> None:
        self._objects = [*reached.objects]
        found, named = _around(self._objects)
        modules = [("", vars(x)) for name, x in [*sys.modules.items()] if _is_users_module(name)]
        self._variables = [(name, space, dict(space)) for name, space in (*modules, *named)]
        self._process, self._switches = process_state(), read_switches()
        self._loggers = _loggers()
        self._reached = Reached(found)
        # While a program is traced, the values of tensors in variables cannot change.
        real = {place: x for place, x in self._reached.tensors.items() if in_place and not isinstance(x, FakeTensor)}
        self._bits = {place: x.detach().clone() for place, x in real.items() if x.device.type != "meta"}

    def refuse_changes(self) -> None:
        # A variable is compared by identity here; the content of the user's own variables is in `now`, below.
        added = (
            f"the variable {name}{key}"
            for name, space, before in self._variables
            if not _is_unchanged(space, before)
            for key in dict.fromkeys([*space, *before])
            if key not in _PYTHONS and not isinstance(space.get(key), types.ModuleType)
            if space.get(key, space) is not before.get(key, before)
        )
        process = process_state()
        settings = (x for x, value in {**self._process, **process}.items() if self._process.get(x) != process.get(x))
        states = _loggers().items()
        loggers = (f"the logger {x!r}" for x, y in states if y != self._loggers.get(x, _NEW_LOGGER))
        now = Reached(_around(self._objects)[0])
        written = (
            place for place, was in self._bits.items() if not same_bits(was, self._reached.tensors[place].detach())
        )
        switches = read_switches()
        if switched := [f"{x} {was} -> {switches[x]}" for x, was in self._switches.items() if switches[x] != was]:
            raise RefusedError(f"it changes what holds for the whole process: {'; '.join(switched)}", where="it")
        if (
            place := next(itertools.chain(changed(self._reached, now), added, written, settings, loggers), None)
        ) is not None:
            raise RefusedError(f"it changes {place}, which is no input", where="it")


def _is_unchanged(space: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    # Most of hundreds of modules are: comparing them name by name would take most of a proof's time.
    return [*space] == [*before] and all(map(operator.is_, space.values(), before.values()))


def _loggers() -> dict[str, Token]:
    # Any code can find a logger by name, and keep a count in its handlers.
    known = [logging.root, *logging.Logger.manager.loggerDict.values()]
    loggers = {x.name: x for x in known if isinstance(x, logging.Logger)}
    tops = {name: name.partition(".")[0] for name in loggers}
    # torch removes a handler of its own when it first logs a trace.
    installed = {x for x in {*tops.values()} if x in sys.modules and not _is_users_module(x)}
    return {name: _logger_state(x) for name, x in loggers.items() if tops[name] not in installed}


def _logger_state(x: logging.Logger) -> Token:
    handlers = [(type(y).__qualname__, y.level, len(y.filters)) for y in x.handlers]
    if x is logging.root and len(handlers) < 2:
        handlers = []  # the first `logging.info` of a process adds a handler to the root
    return x.level, x.disabled, x.propagate, handlers, len(x.filters)


_NEW_LOGGER = _logger_state(logging.Logger("new"))

_PYTHONS = ("__annotations__", "__builtins__", "__warningregistry__", "__abstractmethods__", "__dynamo_disable")
"""Names that Python itself writes into modules and classes, and the compiler into functions."""


def _around(objects: Sequence[Any]) -> tuple[dict[str, Any], list[tuple[str, Mapping[str, Any]]]]:
    """Find the global state that the user's code among `objects` may use. Returns (variables, namespaces).

    - Variables: name -> value, for each variable that the code names.
    - Namespaces: (name, dict) for each class of an object, and for each object of an installed package that the code
      names. Only the identities of their entries are compared.
    """
    found: dict[str, Any] = {}
    spaces: dict[int, tuple[str, Mapping[str, Any]]] = {}
    seen: set[int] = set()
    stack = [*objects]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        # A call may also change its objects' classes, such as a counter that is a class attribute.
        kind = x if isinstance(x, type) else type(x)
        for each in kind.__mro__:
            if id(each) not in spaces:
                spaces[id(each)] = f"{each.__qualname__}.", vars(each)
                own = vars(each).items() if _is_users_module(each.__module__) else ()
                stack += [getattr(value, "__func__", value) for _, value in own]
                found |= {
                    f"{each.__qualname__}.{key}": getattr(value, "__func__", value)
                    for key, value in own
                    if not key.startswith("__") or isinstance(value, types.FunctionType)
                    if not isinstance(value, type)
                }
                spaces |= {id(x): (f"{x}.", vars(x)) for _, x in own if isinstance(x, enum.Enum)}
        if isinstance(x, property):
            stack += [f for f in (x.fget, x.fset) if f]
        if isinstance(x, types.MethodType):
            stack.append(x.__func__)
        if isinstance(x, types.FunctionType) and is_users_file(x.__code__.co_filename):
            _refuse_unreadable(x)
            stack += [_content(cell) for cell in x.__closure__ or ()]
            for name, value, is_users in _variables_of(x):
                is_function = isinstance(value, types.FunctionType)
                if not is_users or (is_function and not is_users_file(value.__code__.co_filename)):
                    space = value if isinstance(value, dict) else getattr(value, "__dict__", None)
                    # A container of an installed package is compared by its items' identities, without their content.
                    if isinstance(value, list | set | collections.deque):
                        found[f"the variable {name}"] = [*map(id, value)]
                    elif isinstance(space, Mapping):
                        spaces[id(value)] = f"{name}.", space
                    if is_function:  # e.g. the registry of functools.singledispatch
                        tables = {key: y for key, y in vars(value).items() if isinstance(y, types.MappingProxyType)}
                        found |= {f"the variable {name}.{key}": [*map(id, y.values())] for key, y in tables.items()}
                elif isinstance(value, type):
                    stack.append(value)
                elif is_function or isinstance(value, logging.Logger) or not _is_atom(value):
                    found[f"the variable {name}"] = value
                    stack.append(value)
    return found, [*spaces.values()]


def _refuse_unreadable(function: types.FunctionType) -> None:
    names = {*function.__code__.co_names}
    for word, beside in _UNREADABLE.items():
        if word in names and (not beside or beside & names):
            what = f"{function.__qualname__} reads {word}, where any code may keep something"
            raise RefusedError(what, where="the program or its inputs")


_UNREADABLE = {"__subclasses__": set[str](), "metadata": {"grad_fn", "next_functions", "get_gradient_edge"}}
"""Attributes that give access to state that is not compared.

If names are listed for an attribute, it only counts together with one of them: `metadata` together with `grad_fn`, as
an attribute of an autograd node.
"""


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, value, whether it is the user's) for each global or module variable that a function's code names.

    For code such as `globals()["count"]`, every container among the variables is yielded as well.
    """
    # `names` has every name in the code, `asked` the globals that it loads, and the first attribute that it takes.
    names, codes = set[str](), [function.__code__]
    asked = set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        loads = [x for x in dis.get_instructions(code) if x.opname.startswith(("LOAD_", "IMPORT_NAME"))]
        asked.update(str(x.argval) for x in loads if x.opname in ("LOAD_GLOBAL", "IMPORT_NAME"))
        asked.update(f"{x.argval}.{y.argval}" for x, y in itertools.pairwise(loads))
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    by_text = bool(asked & _BY_TEXT or names & _NAMESPACES)
    modules: dict[int, tuple[str, types.ModuleType]] = {}
    space = function.__globals__
    for name in sorted({*names, *(space if by_text else ())}):
        value = space.get(name, sys.modules.get(name))
        if isinstance(value, types.ModuleType):
            modules[id(value)] = name, value
        elif (name in names and name in space) or _is_container(name, value):
            yield name, value, True
        if "cache_info" in names and isinstance(value, _CachedFunction):
            yield f"{name}.cache_info()", [*value.cache_info()], True
    if by_text:
        modules |= {id(x): (name, x) for name, x in [*sys.modules.items()] if _is_users_module(name)}
    waiting = [*modules.values()]
    while waiting:
        name, module = waiting.pop()
        is_users = is_users_file(str(getattr(module, "__file__", None) or _INSTALLED[0]))
        is_users = is_users or _is_users_module(module.__name__)
        # torch.ops.aten is of another class, and creates attributes on access, so such modules are not read.
        is_users = is_users and type(module) is types.ModuleType
        if not is_users and type(module) is types.ModuleType:
            yield name, module, False
        for key in sorted({*names, *(vars(module) if is_users and by_text else ())}):
            value = vars(module).get(key)
            if isinstance(value, types.ModuleType) and id(value) not in modules:
                modules[id(value)] = f"{name}.{key}", value
                waiting.append(modules[id(value)])
            elif key in names and value is not None and not isinstance(value, types.ModuleType):
                yield f"{name}.{key}", value, is_users
            elif _is_container(key, value):
                yield f"{name}.{key}", value, True


_BY_TEXT = {"globals", "vars", "importlib", "__import__", "sys.modules"}
_NAMESPACES = {"f_globals", "__globals__"}


def _is_container(name: str, x: Any) -> bool:
    kinds = (dict, list, set, collections.deque, bytearray, numpy.ndarray, Tensor)
    return isinstance(x, kinds) and not name.startswith("__")


def _is_users_module(name: str) -> bool:
    module = sys.modules.get(name)
    if type(module) is not types.ModuleType:
        return False
    file, spec = (getattr(module, key, None) for key in ("__file__", "__spec__"))
    if file is None and spec is None and "." not in name:
        return True  # made by hand, by code of no package
    return name == "__main__" or (isinstance(file, str) and is_users_file(file))


@functools.cache  # asked of every loaded module, several times in a proof
def is_users_file(path: str) -> bool:
    """Return whether a file is the user's: neither of an installed package nor of bitproof."""
    # An environment may lie over others (`pip install --user`, `venv --system-site-packages`), each with a folder.
    return not path.startswith(_INSTALLED) and _FOLDERS_OF_PACKAGES.isdisjoint(path.split(os.sep)[:-1])


_FOLDERS_OF_PACKAGES = frozenset(("site-packages", "dist-packages"))
_PACKAGE = str(sys.modules[harness.__name__.partition(".")[0]].__file__)
_INSTALLED = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, harness.__file__, _PACKAGE)),
    "<frozen",
)
"""Folders of code that is not the user's. Interactive code and code made by `exec` are the user's."""
