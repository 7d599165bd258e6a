"""Caches the results of calls on fake tensors, so that torch computes the shapes of equal layers only once.

torch has a cache as well, but it misses when symbol names differ, such as the number of rows of each layer's experts.
Here `mm` of [s3, 64] and [64, 8] has the same key as `mm` of [s7, 64] and [64, 8], if s3 and s7 have the same range.

- A key has the operator, the arguments' layouts with numbers instead of symbols, and the known facts about these
  symbols (ranges and conditions).
- A cached result stores its sizes as expressions of the numbered symbols. If a size is the same object as a size of an
  argument, it stays that object, since tracers compare sizes by identity.
- A call is cached only if it writes nothing, adds no fact about sizes, and its result, rebuilt from the cache, equals
  torch's.

Each fake mode has its own cache, so that traces do not affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import _NO_HINT, SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.torch_tracing import new_fake

_COLLECTIVES = frozenset(
    {
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::wait_tensor",
    }
)
"""Operators outside torch's own namespaces whose fake results depend only on the arguments' layouts."""

_READS_STORAGE = frozenset({"aten::as_strided", "aten::as_strided_scatter", "aten::as_strided_copy"})
"""Operators whose result depends on the size of a storage."""

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _NotCachedError(Exception):
    """Raised for a call that the cache cannot handle; torch computes it."""


class _Form(NamedTuple):
    """Properties of a symbolic size besides its expression."""

    kind: type
    hint: Any
    is_sorted_sum: Any


class _Size(NamedTuple):
    """A symbolic size of a cached result: either a size of an argument, or an expression.

    - `own`: index of the argument's size; None for an expression.
    - `template`: expression with numbered placeholders.
    - `numbers`: for each placeholder, the number of the call's symbol that replaces it.
    - `name`: sizes with the same name become the same SymNode.
    """

    own: int | None
    name: int = 0
    template: Any = None
    numbers: tuple[int, ...] = ()
    form: _Form | None = None


class _CachedTensor(NamedTuple):
    """The layout of a tensor in a cached result.

    - `shares`: whether the tensor shares the storage of the call's only tensor argument.
    - `is_closed`: whether the tensor has its own storage, and plain integers as sizes and strides.
    """

    sizes: tuple[int | _Size, ...]
    strides: tuple[int | _Size, ...]
    offset: int | _Size
    dtype: torch.dtype
    device: torch.device
    shares: bool
    is_closed: bool


class FakeResults:
    """A cache for the calls of a fake mode. `compute` is torch's function that computes a fake result."""

    def __init__(self, mode: FakeTensorMode, shape_env: ShapeEnv, compute: Callable[..., Any]) -> None:
        self._mode = mode
        self._env = shape_env
        self._compute = compute
        self._cache: dict[Hashable, tuple[type, list[_CachedTensor]]] = {}
        self._symbols = _Symbols(shape_env)
        self._may_be_cached: dict[Any, bool] = {}

    def __call__(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        may = self._may_be_cached.get(func)
        if may is None:
            may = self._may_be_cached[func] = _may_be_cached(func)
        # While a tracer records, the call must reach it.
        if not may or get_proxy_mode() is not None:
            return self._compute(func, types, args, kwargs)
        call = _Call(self._mode, self._symbols)
        facts = call.read_all(args, kwargs)
        if facts is None:
            return self._compute(func, types, args, kwargs)
        key = (func, *_switches(), *call.parts, facts)
        if (known := self._cache.get(key)) is not None:
            kind, tensors = known
            # Sizes that are one node in torch's result are one node here, too.
            sizes: dict[_Size, Any] = {}
            made = [self._rebuild(call, each, sizes) for each in tensors]
            return made[0] if kind is FakeTensor else kind(made)
        before = self._symbols.state()
        result = self._compute(func, types, args, kwargs)
        # If the call taught torch something about sizes, a result from the cache would not teach it that.
        if self._symbols.state() == before and call.facts() == facts:
            self._store(key, call, result)
        return result

    def _store(self, key: Hashable, call: _Call, result: Any) -> None:
        tensors = [result] if type(result) is FakeTensor else result if type(result) in (list, tuple) else []
        try:
            # A result is rebuilt once and compared, so that a layout which the cache cannot express is never used.
            kept = [call.kept(x) for x in tensors]
            if kept and all(
                _have_same_layout(x, self._rebuild(call, each, {})) for x, each in zip(tensors, kept, strict=True)
            ):
                self._cache[key] = type(result), kept
        except _NotCachedError:
            pass

    def _rebuild(self, call: _Call, kept: _CachedTensor, made: dict[_Size, Any]) -> FakeTensor:
        shape = [call.size(n, made) for n in kept.sizes]
        strides = [call.size(n, made) for n in kept.strides]
        # Making the tensor must add no guard of its own.
        # Without open sizes, and without another tensor's storage, no guard can be added.
        guards = nullcontext() if kept.is_closed else self._env.suppress_guards()
        with in_kernel_invocation_manager(self._mode), guards:
            empty = torch.empty_strided(shape, strides, dtype=kept.dtype, device="meta")
            if kept.shares:
                empty.set_(call.tensors[0].untyped_storage(), call.size(kept.offset, made), shape, strides)
        return new_fake(self._mode, empty, kept.device)


class _Call:
    """A call and its cache key: `parts` has the arguments, with numbers instead of symbols."""

    def __init__(self, mode: FakeTensorMode, symbols: _Symbols) -> None:
        self.tensors: list[FakeTensor] = []
        self.parts: list[Hashable] = []
        self._mode = mode
        self._known = symbols
        # The sizes in the arguments in the order of occurrence, and the index of each by identity.
        self._nodes: list[SymNode] = []
        self._place: dict[int, int] = {}
        # The numbers that replace symbols in the key.
        self._number: dict[sympy.Symbol, int] = {}
        # The sizes in the result that no argument has. Those that are one node have the same name.
        self._results: list[SymNode] = []
        self._name: dict[int, int] = {}

    def read_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...] | None:
        try:
            self.read(args)
            self.read(kwargs)
            return self.facts()
        except _NotCachedError:
            return None

    def read(self, value: Any) -> None:
        add = self.parts.append
        kind: Any = type(value)
        if kind is FakeTensor:
            self._read_tensor(value)
        elif kind is torch.SymInt:
            self._read_size(value)
        elif isinstance(value, list | tuple):
            add(kind)
            add(len(value))
            for each in value:
                self.read(each)
        elif isinstance(value, Mapping):
            add(tuple(value))
            for each in value.values():
                self.read(each)
        elif isinstance(value, _PLAIN):
            add(kind)  # 1, 1.0 and True are equal, but different arguments
            add(value)
        else:
            raise _NotCachedError

    def _read_tensor(self, x: FakeTensor) -> None:
        # A fake tensor with a constant or a real tensor has values, on which the result may depend.
        if x.fake_mode is not self._mode or x.constant is not None or x.real_tensor is not None:
            raise _NotCachedError
        self.tensors.append(x)
        sizes, strides = x.shape, x.stride()
        self.parts += (torch._C._dispatch_keys(x).raw_repr(), x.dtype, x.fake_device, x.requires_grad, len(sizes))
        for n in (*sizes, *strides, x.storage_offset()):
            if type(n) is int:
                self.parts.append(n)
            else:
                self._read_size(n)

    def _read_size(self, size: Any) -> None:
        node = size.node
        # Tracers compare sizes by identity, so two arguments with the same size object are another call than two
        # arguments whose sizes are equal.
        place = self._place.get(id(node))
        if place is None:
            place = self._place[id(node)] = len(self._nodes)
            self._nodes.append(node)
            template, symbols, form = self._known.template(node)
            self.parts.append((template, tuple([self._number_of(symbol) for symbol in symbols]), form))
        else:
            self.parts.append(("again", place))

    def _number_of(self, symbol: sympy.Symbol) -> int:
        return self._number.setdefault(symbol, len(self._number))

    def facts(self) -> tuple[Hashable, ...]:
        known: list[Hashable] = []
        listed: set[Any] = set()
        symbols = list(self._number)
        for symbol in symbols:  # the list grows during the loop
            known.append(self._known.facts_of(symbol))
            for condition in self._known.conditions(symbol):
                if condition not in listed:
                    listed.add(condition)
                    template, names = self._known.expression(condition)
                    known.append((template, tuple([self._number_of(name) for name in names])))
                    symbols += [name for name in names if name not in symbols]
        return tuple(known)

    def kept(self, x: Any) -> _CachedTensor:
        if type(x) is not FakeTensor or x.constant is not None or x.real_tensor is not None or x.requires_grad:
            raise _NotCachedError
        if x.fake_mode is not self._mode or x.layout is not torch.strided or any(x is y for y in self.tensors):
            raise _NotCachedError
        storage = x.untyped_storage()._cdata
        shares = any(storage == y.untyped_storage()._cdata for y in self.tensors)
        offset = self._cached_size(x.storage_offset())
        # With several tensors, the layout would not state whose storage is shared.
        if (shares and len(self.tensors) != 1) or (not shares and offset != 0):
            raise _NotCachedError
        sizes, strides = (tuple(map(self._cached_size, of)) for of in (x.shape, x.stride()))
        is_closed = not shares and all([type(n) is int for n in (*sizes, *strides)])
        return _CachedTensor(sizes, strides, offset, x.dtype, x.fake_device, shares, is_closed)

    def _cached_size(self, size: Any) -> int | _Size:
        if type(size) is int:
            return size
        if (place := self._place.get(id(size.node))) is not None:
            return _Size(place)
        template, symbols, form = self._known.template(size.node)
        if any(symbol not in self._number for symbol in symbols):
            raise _NotCachedError
        self._results.append(size.node)  # keep it alive, so that no other node gets its identity
        name = self._name.setdefault(id(size.node), len(self._name))
        return _Size(None, name, template, tuple([self._number[symbol] for symbol in symbols]), form)

    def size(self, kept: int | _Size, made: dict[_Size, Any]) -> Any:
        if type(kept) is int:
            return kept
        assert isinstance(kept, _Size)
        if kept.own is not None:
            return torch.SymInt(self._nodes[kept.own])
        if kept not in made:
            symbols = list(self._number)
            made[kept] = self._known.size(kept, tuple([symbols[n] for n in kept.numbers]))
        return made[kept]


class _Symbols:
    """torch's knowledge about the symbols of a ShapeEnv."""

    def __init__(self, env: ShapeEnv) -> None:
        self._env = env
        # From an expression to its form with placeholders and its symbols, and back.
        self._expressions: dict[Any, tuple[Any, tuple[sympy.Symbol, ...]]] = {}
        self._instances: dict[Any, Any] = {}
        # An index of torch's deferred conditions by symbol, made for this many conditions.
        self._conditions: dict[sympy.Symbol, list[Any]] = {}
        self._num_conditions = 0

    def state(self) -> Hashable:
        """Return a value that changes whenever torch learns a fact about sizes, except for a narrower range."""
        env = self._env
        # Their lengths show what torch adds; the version counter shows other changes.
        learned = (env.replacements, env.guards, env.axioms, env.divisible, env.var_to_range, env.size_like)
        fresh = env.unbacked_symint_counter, len(env.pending_fresh_unbacked_symbols)
        return env._version_counter, env.num_deferred_runtime_asserts, *map(len, learned), *fresh

    def template(self, node: SymNode) -> tuple[Any, tuple[sympy.Symbol, ...], _Form]:
        if type(node) is not SymNode or node.shape_env is not self._env or node.fx_node or node.constant is not None:
            raise _NotCachedError
        template, symbols = self.expression(node._expr)
        return template, symbols, _Form(node.pytype, node._hint, getattr(node, "_optimized_summation", None))

    def expression(self, expression: Any) -> tuple[Any, tuple[sympy.Symbol, ...]]:
        found = self._expressions.get(expression)
        if found is None:
            symbols = tuple(sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name)))
            template = expression.xreplace(dict(zip(symbols, self._numbers(symbols), strict=True)))
            found = self._expressions[expression] = template, symbols
            self._instances[found] = expression
        return found

    def size(self, kept: _Size, symbols: tuple[sympy.Symbol, ...]) -> torch.SymInt:
        form, written = kept.form, (kept.template, symbols)
        assert form is not None
        expression = self._instances.get(written)
        if expression is None:
            expression = kept.template.xreplace(dict(zip(self._numbers(symbols), symbols, strict=True)))
            self._instances[written] = expression
        hint = _NO_HINT if form.hint is None else form.hint
        return torch.SymInt(SymNode(expression, self._env, form.kind, hint, optimized_summation=form.is_sorted_sum))

    @staticmethod
    def _numbers(symbols: Sequence[sympy.Symbol]) -> list[sympy.Symbol]:
        # Placeholders have the assumptions of their symbols, such as positive, since sympy simplifies by assumptions.
        return [sympy.Symbol(f"n{i}", **dict(symbol._assumptions0)) for i, symbol in enumerate(symbols)]

    def facts_of(self, symbol: sympy.Symbol) -> Hashable:
        env = self._env
        if env.guards or env.divisible or symbol in env.backed_var_to_val:
            raise _NotCachedError
        extent = env.var_to_range.get(symbol)
        hinted = env.var_to_hint_override.get(symbol)
        return extent, hinted, symbol in env.size_like, symbol in env.unbacked_inputs

    def conditions(self, symbol: sympy.Symbol) -> Sequence[Any]:
        """Return the conditions that contain a symbol, in torch's order.

        If torch has replaced the symbol by an expression, the pair (symbol, expression) is added at the end.
        """
        # torch only adds conditions, so their number shows whether the index by symbol is up to date.
        if self._num_conditions != self._env.num_deferred_runtime_asserts:
            self._num_conditions = self._env.num_deferred_runtime_asserts
            self._conditions.clear()
            for checks in self._env.deferred_runtime_asserts.values():
                for check in checks:
                    for name in self.expression(check.expr)[1]:
                        self._conditions.setdefault(name, []).append(check.expr)
        conditions = self._conditions.get(symbol, [])
        stands_for_it = self._env.replacements.get(symbol)
        return conditions if stands_for_it is None else [*conditions, sympy.Tuple(symbol, stands_for_it)]


def _may_be_cached(func: Any) -> bool:
    # A cached result would not repeat the writes of an in-place operator.
    if type(func) is not OpOverload or func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return False
    if torch.Tag.data_dependent_output in func.tags:
        return False
    name = func._schema.name
    return (func.namespace in ("aten", "prims") and name not in _READS_STORAGE) or name in _COLLECTIVES


def _switches() -> tuple[Hashable, ...]:
    # A fake result may depend on these global settings.
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return torch.get_default_dtype(), torch._C._get_default_device(), grad, inference, deterministic


def _have_same_layout(x: FakeTensor, made: FakeTensor) -> bool:
    return _layout(x) == _layout(made)


def _layout(x: FakeTensor) -> Hashable:
    # The word separates sizes from strides, whose numbers would otherwise run together.
    sizes = *x.shape, "strides", *x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    written = tuple([(n.node._expr, n.node._hint) if isinstance(n, torch.SymInt) else n for n in sizes])
    return written, x.dtype, x.fake_device, torch._C._dispatch_keys(x).raw_repr(), x.requires_grad, type(x)
