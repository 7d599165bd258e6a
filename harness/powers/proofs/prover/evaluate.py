"""Computes terms and graphs on values, to find wrong proofs.

The term of every PROVED output is computed on random inputs, operator by operator. On every rank, the result must have
the same bits as the output in both graphs. All ranks run in this process: a value is a list with an entry per rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.graph import operators as graph_operators
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.in_one_process import NotEvaluatedError, collective
from bitproof.harness.graph.symbols import source_of
from bitproof.harness.powers.proofs.prover.graphs.constants import digest_of
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.known_operators import ARITHMETIC, PYTHON, UPDATES
from bitproof.harness.powers.proofs.prover.proof_data import Term, terms_in
from bitproof.harness.powers.proofs.prover.terms import Table
from bitproof.harness.powers.proofs.prover.windows import row_major

Values = dict[str, object]


class FailsError(RefusedError):
    """A call of a graph fails on real values."""


def run_graph(
    module: GraphModule,
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Partition],
    *,
    late: bool = False,
    watch: Callable[[Node, Sequence[Any]], None] = lambda node, values: None,
) -> tuple[list[Any], list[list[Tensor]]]:
    """Run a graph on every rank. Returns (results, final values of the inputs), each as a list with an entry per rank.

    - `inputs`: for each rank, the list of its inputs. They are copied.
    - `groups`: the process groups by name.
    - `late`: run each collective again at its wait. The result then changes if an input was written since the launch.
    - `watch`: a function that is called with each node, and a list of its results per rank.

    Raises FailsError, which names the node, if a call fails on these values. Raises NotEvaluatedError if a call cannot
    be computed in a single process.
    """
    ranks = range(len(inputs))
    held = [[_copied(x) for x in own] for own in inputs]
    env: dict[Node, list[Any]] = {}
    launches: dict[Node, Callable[[], list[Any]]] = {}
    num_inputs = 0
    # The graph has its backward as calls, so autograd has nothing to record.
    with torch.no_grad():
        for node in module.graph.nodes:
            given = [_arguments_of(node, env, rank) for rank in ranks]
            if node.op == "placeholder":
                env[node] = [own[num_inputs] for own in held]
                num_inputs += 1
            elif node.op == "get_attr":
                env[node] = [functools.reduce(getattr, str(node.target).split("."), module) for _ in ranks]
            elif node.op == "output":
                return [args[0] for args, _ in given], held
            else:
                with _naming(node):
                    if graph_operators.is_wait(node):
                        launch = node.all_input_nodes[0]
                        # Run the collective again: inputs written since the launch then change its result.
                        if late and launch in launches:
                            env[launch] = launches.pop(launch)()
                        env[node] = env[launch]
                    elif graph_operators.is_collective(node):
                        # A real collective may read and write memory at any time from its launch to its wait. Here it
                        # runs at the launch. Its last argument is the name of its group.
                        own = [args[:-1] for args, _ in given]
                        launches[node] = functools.partial(
                            collective, str(node.target), groups[str(node.args[-1])], own
                        )
                        env[node] = launches[node]()
                    else:
                        env[node] = [node.target(*args, **kwargs) for args, kwargs in given]
            watch(node, env[node])
    raise AssertionError("a graph has an output")


def _copied(x: Any) -> Any:
    # A copy with the same layout: a kernel may choose its code path by strides.
    return with_layout(x.detach(), x.shape, x.stride(), 0) if isinstance(x, Tensor) else x


@contextlib.contextmanager
def _naming(node: Node) -> Iterator[None]:
    try:
        yield
    except NotEvaluatedError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        what = f"a call that passes on fake values and fails on real ones: {type(error).__name__}: {reason}"
        raise FailsError(f"{what} (`{node.name}`, {node.target})", where=source_of(node)) from error


def _arguments_of(node: Node, env: Mapping[Node, list[Any]], rank: int) -> Any:
    return map_arg((node.args, node.kwargs), lambda x: env[x][rank])


class Evaluator:
    """Computes the terms of a table on every rank, each term once.

    - `inputs`: for each rank, the values of its inputs by name.
    - `constants`: the tensors that are part of the graphs.
    """

    def __init__(self, table: Table, inputs: Sequence[Mapping[str, Any]], constants: Iterable[Tensor] = ()) -> None:
        self.table = table
        self.constants = {(digest_of(x), str(x.dtype).removeprefix("torch."), tuple(x.shape)): x for x in constants}
        self.inputs = inputs
        self._known: dict[int, list[Any]] = {}

    def __call__(self, place: int) -> list[Any]:
        """Return the values of the term with index `place`, a value per rank.

        Raises NotEvaluatedError if the term cannot be computed in a single process.
        """
        missing, stack = set(), [place]
        while stack:
            top = stack.pop()
            if top not in missing and top not in self._known:
                missing.add(top)
                stack.extend(terms_in(self.table[top]))
        for below in sorted(missing):  # a term's parts have lower indices
            self._known[below] = self._compute(self.table[below])
        return self._known[place]

    def _compute(self, term: Term) -> list[Any]:
        known, ranks = self._known, range(len(self.inputs))
        match term:
            # The term has a new first dim for the ranks, but the operator extends the first dim: so it gets one of 1.
            case ("gather", place, partition):
                gathered = collective("c10d.all_gather_into_tensor", partition, [(x[None],) for x in known[place]])
                return gathered
            case ("reduce", place, operation, partition):
                rows = [(x, operation.split()[0]) for x in known[place]]
                return [x[0] for x in collective("c10d.reduce_scatter_tensor", partition, rows)]
            case ("op", op, arguments, _, _) if op.startswith("_c10d_functional."):
                values = [self._arguments(dict(arguments), rank) for rank in ranks]
                partition = cast(Partition, values[0].pop("group_name"))
                return collective(
                    op, partition, [[x for key, x in own.items() if key != "group_name"] for own in values]
                )
        return [self._on_rank(term, rank) for rank in ranks]

    def _on_rank(self, term: Term, rank: int) -> Any:
        known = self._known
        match term:
            case ("input", name, _, _):
                return self.inputs[rank][name]
            case ("constant", digest, dtype, shape) if (digest, dtype, shape) in self.constants:
                return self.constants[digest, dtype, shape].detach()
            case ("number", dtype, text):
                return torch.tensor(float.fromhex(text), dtype=getattr(torch, dtype))
            case ("op" | "move", op, arguments, _, _):
                return self._call(op, dict(arguments), rank)
            case ("seed",):
                return None  # not computed: a random draw that nothing reads
            case ("out", place, index, _, _):
                return _each(known[place][rank])[index]
            case ("view", place, shape, strides, offset):
                return _flat(known[place][rank]).as_strided(shape, strides, offset)
            case ("cat", places, dim):
                return torch.cat([known[place][rank] for place in places], dim)
            case ("exact", "cast", dtype, _, (place,)):
                return known[place][rank].to(getattr(torch, dtype))
            case ("exact", name, _, _, places):
                return getattr(torch, name)(*(known[place][rank] for place in places))
            case ("item", place):
                return int(known[place][rank])
            case ("rows", sizes):
                return sum(self._size(size, rank) for size in sizes)
            case ("extent", place, index):
                value = known[place][rank]
                # `index` counts the sizes of all results in sequence, as `Symbols.name_extents` does.
                values = value if isinstance(value, (tuple, list)) else [value]
                return [n for x in values if x is not None for n in x.shape][index]
        raise NotEvaluatedError(f"a term of kind {term[0]}")

    def _call(self, op: str, arguments: Mapping[str, Any], rank: int) -> Any:
        if "generator" in arguments or op.startswith("higher_order."):
            raise NotEvaluatedError(op)
        values = self._arguments(arguments, rank)
        # A `move` term's operator is "reshape" for each of the operators that reshape.
        if op == "reshape":
            return cast(Tensor, values["self"]).reshape(cast(list[int], values["shape"]))
        if op.startswith(PYTHON):
            return torch.tensor(_number(op.removeprefix(PYTHON))(*values.values()), dtype=torch.float64)
        # An optimizer's kernel walks memory linearly, so it needs row-major lists; a term does not fix strides.
        if op in UPDATES:
            values = {name: [y.contiguous() for y in x] if isinstance(x, list) else x for name, x in values.items()}
        return _operator(op)(**values)

    def _arguments(self, arguments: Mapping[str, Any], rank: int) -> Values:
        return {name: self._argument(value, rank) for name, value in arguments.items()}

    def _argument(self, value: Any, rank: int) -> Any:
        match value:
            # A Python number, which is recorded as a tensor without dims.
            case ("tensor", place, *_) if self._is_number(place):
                return self._known[place][rank].item()
            case ("tensor", place, _, _, shape, strides, alignment):
                sizes = [[self._size(n, rank) for n in numbers] for numbers in (shape, strides, [alignment])]
                return with_layout(self._known[place][rank], sizes[0], sizes[1], sizes[2][0])
            case ("value", place):
                return self._known[place][rank]
            case ("list", *items):
                return [self._argument(item, rank) for item in items]
            case ("float", text):
                return float.fromhex(text)
            case ("bool", text):
                return text == "True"
            case ("none",):
                return None
            case ("str" | "device", text):
                return text
            case ("dtype", text):
                return getattr(torch, text)
            case ("enum", text):
                return getattr(torch, text.removeprefix("torch."))
            case ("size", *_):
                return self._size(value, rank)
            case ("ranks", partition):
                return partition
        return value

    def _is_number(self, place: int) -> bool:
        term = self.table[place]
        # Operators take such a term as a Python number, not as a tensor.
        return term[0] == "op" and term[1].startswith(PYTHON)

    def _size(self, size: Any, rank: int) -> int:
        if isinstance(size, int):
            return size
        products = ([coefficient, *(self._known[x][rank] for x in symbols)] for coefficient, *symbols in size[1:])
        return sum(math.prod(product) for product in products)


def with_layout(values: Tensor, shape: Sequence[int], strides: Sequence[int], alignment: int) -> Tensor:
    """Return a copy of `values` with this shape and these strides.

    The first element of the copy is `alignment` bytes after the start of newly allocated memory.
    """
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    lead = alignment // values.element_size()
    memory = torch.zeros(lead + reach, dtype=values.dtype)
    # All indices of a dim with stride 0 are the same element, and torch refuses to copy into such a tensor.
    distinct = [slice(0, 1) if s == 0 else slice(None) for s in strides]
    once = values.reshape(list(shape))[tuple(distinct)] if shape else values.reshape([])
    memory.as_strided(once.shape, strides, lead).copy_(once)
    return memory.as_strided(list(shape), strides, lead)


def _flat(x: Tensor) -> Tensor:
    # A window counts elements in row-major order from the start of the memory, so others are copied.
    same = tuple(x.stride()) == row_major(tuple(x.shape)) and x.storage_offset() == 0
    return x if same else x.clone(memory_format=torch.contiguous_format)


def _each(results: Any) -> list[Any]:
    # A result may itself be a list, as of an optimizer's kernel.
    return [x for value in results for x in (value if isinstance(value, list | tuple) else [value])]


def _number(name: str) -> Callable[..., Any]:
    return next(function for function in (float, *ARITHMETIC) if function.__name__ == name)


@functools.cache
def _operator(name: str) -> Callable[..., Any]:
    found: Any = functools.reduce(getattr, name.split("."), cast(Any, torch.ops))
    return cast(Callable[..., Any], found)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits. All NaNs count as equal."""
    return x.dtype == y.dtype and x.shape == y.shape and not bool(differing(x, y).any())


def differing(x: Tensor, y: Tensor) -> Tensor:
    """Return a mask of the elements in which two tensors of equal dtype and shape differ. All NaNs count as equal."""
    if x.is_complex():
        return differing(torch.view_as_real(x), torch.view_as_real(y)).any(-1)
    if not x.is_floating_point():
        return x != y
    # As integers, since 0.0 and -0.0 have other bits, but are equal as real numbers.
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    same = x.contiguous().view(integers) == y.contiguous().view(integers)
    return ~(same | (x.isnan() & y.isnan()))
