"""Programs that are not what a trace of them says: `python tests/benchmarks/unlike_traces.py [KIND[:NAME] ...]`.

Each attempt is a pair of functions and inputs, made anew each time. Both really run, alone, from two sets of values;
outputs, inputs afterwards, gradients, attributes, generators and switches are compared by code that shares nothing with
the prover. An attempt is UNSOUND if the pair is PROVED and differs, or if any number of steps is PROVED and the second
differs; it is lost if the pair is equal and is REFUSED. Prints a row a kind; returns 1 if one is unsound.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[2]))

Make = Callable[[], tuple[Any, Any, tuple[Any, ...]]]
"""Two programs and their inputs."""

KINDS: dict[str, dict[str, Make]] = collections.defaultdict(dict)


def attempt(kind: str, name: str, make: Make) -> None:
    """Add an attempt."""
    KINDS[kind][name] = make


def pair(kind: str, name: str, f: Any, g: Any, *shapes: Any) -> None:
    """An attempt of two functions of tensors of these shapes, each also against itself."""
    given = lambda: tuple(torch.randn(x, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(shapes))  # noqa: E731
    attempt(kind, name, lambda: (f, g, given()))


# -- (a) operators that trace as others ---------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() > 1 else x,
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 2 else x,
}
SHAPES = [((5,), (5,)), ((5,), (5, 6)), ((4, 5), (5,)), ((4, 5), (5, 6)), ((33,), (2, 33, 7)), ((3, 4, 5), (5,)),
          ((4, 5), (3, 5, 6)), ((3, 4, 5), (5, 6)), ((3, 4, 5), (3, 5, 6)), ((1, 4, 5), (3, 5, 6)),
          ((3, 1, 5), (3, 5, 6)), ((2, 3, 4, 5), (5, 6)), ((2, 3, 4, 5), (3, 5, 6)), ((5,), (2, 3, 5, 6)),
          ((2, 3, 4, 5), (5,)), ((2, 3, 4, 5), (2, 3, 5, 6))]  # fmt: skip


def traced_alike(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The graph that a trace through the Python dispatcher finds of `f`, as a graph module."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.graph import CodeGen

    from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
    from bitproof.harness.graph.tracing.trace import fixed_fake
    from bitproof.harness.torch_compat import symbolic_graph

    mode = step_fake_mode(ShapeEnv())
    fakes = [fixed_fake(mode, x, x.device) for x in args]
    graph = symbolic_graph(lambda given: f(*given), mode)(fakes)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    return graph


def against_its_trace(name: str, f: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]]) -> None:
    """Before, any function was PROVED against the graph that the dispatcher had traced of it."""

    def made() -> tuple[Any, Any, tuple[Any, ...]]:
        args = make()
        return f, traced_alike(f, args), args

    attempt("a", name, made)


def operators() -> None:
    """Products in every shape and layout, interpolation, and what else has a kernel in Python."""
    for i, (a, b) in enumerate(SHAPES):
        for first, of_a in LAYOUTS.items():
            for second, of_b in LAYOUTS.items():
                make = lambda a=a, b=b, of_a=of_a, of_b=of_b: (of_a(torch.randn(a)), of_b(torch.randn(b)))  # noqa: E731
                against_its_trace(f"matmul {i} {first} {second}", torch.matmul, make)
    image = lambda *shape: lambda: (torch.randn(shape),)  # noqa: E731
    for size in (3, 5, 9, 14):
        for mode in ("nearest", "nearest-exact", "linear", "area"):
            f = lambda x, size=size, mode=mode: functional.interpolate(x, size, mode=mode)  # noqa: E731
            against_its_trace(f"interpolate {mode} {size}", f, image(2, 3, 7))
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
            for corners in (False, True) if mode.startswith("bi") else (None,):
                for antialias in (False, True) if mode.startswith("bi") else (False,):
                    f = lambda x, o=(size, mode, corners, antialias): functional.interpolate(  # noqa: E731
                        x, (o[0], o[0] + 1), mode=o[1], align_corners=o[2], antialias=o[3]
                    )
                    against_its_trace(f"interpolate {mode} {size} {corners} {antialias}", f, image(2, 3, 7, 8))
        f = lambda x, size=size: functional.interpolate(x, (size,) * 3, mode="trilinear")  # noqa: E731
        against_its_trace(f"interpolate trilinear {size}", f, image(1, 2, 4, 5, 6))
    for name, f, make in OTHERS:
        against_its_trace(name, f, make)


def _pair(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(x) for x in shapes)


OTHERS: list[tuple[str, Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = [
    ("dropout", lambda x: functional.dropout(x, 0.5), _pair((4, 6))),
    ("alpha dropout", lambda x: functional.alpha_dropout(x, 0.5, True), _pair((4, 6))),
    ("linear", functional.linear, _pair((2, 3, 5), (4, 5))),
    ("linear of a vector", functional.linear, _pair((5,), (4, 5))),
    ("linear with a bias", functional.linear, _pair((2, 3, 5), (4, 5), (4,))),
    ("instance norm", lambda x: functional.instance_norm(x), _pair((2, 3, 8))),
    ("batch norm", lambda x, m, v: functional.batch_norm(x, m, v.square(), training=False), _pair((4, 6), (6,), (6,))),
    ("layer norm", lambda x: functional.layer_norm(x, [6]), _pair((4, 6))),
    ("group norm", lambda x: functional.group_norm(x, 2), _pair((2, 4, 5))),
    ("rms norm", lambda x: functional.rms_norm(x, [6]), _pair((4, 6))),
    ("celu", functional.celu, _pair((4, 6))),
    ("mish", functional.mish, _pair((4, 6))),
    ("silu", functional.silu, _pair((4, 6))),
    (
        "binary cross entropy",
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        _pair((4, 6), (4, 6)),
    ),
    ("cdist", torch.cdist, _pair((4, 6), (5, 6))),
    ("cosine similarity", lambda x, y: functional.cosine_similarity(x, y), _pair((4, 6), (4, 6))),
    ("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), _pair((2, 3, 4), (2, 4, 5))),
    ("einsum of a vector", lambda x, y: torch.einsum("i,bij->bj", x, y), _pair((33,), (2, 33, 7))),
    ("tensordot", lambda x, y: torch.tensordot(x, y, 1), _pair((2, 3, 4), (4, 5))),
    ("inner", torch.inner, _pair((2, 3, 4), (4,))),
    ("outer", torch.outer, _pair((3,), (4,))),
    ("chain of products", lambda x, y, z: torch.linalg.multi_dot([x, y, z]), _pair((3, 4), (4, 5), (5, 6))),
    ("baddbmm", torch.baddbmm, _pair((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    ("bilinear", functional.bilinear, _pair((3, 4), (3, 5), (6, 4, 5))),
    ("attention", functional.scaled_dot_product_attention, _pair((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    ("conv1d", functional.conv1d, _pair((2, 3, 8), (4, 3, 3))),
    ("conv2d", lambda x, w: functional.conv2d(x, w, padding="same"), _pair((2, 3, 8, 8), (4, 3, 3, 3))),
    ("transposed conv2d", functional.conv_transpose2d, _pair((2, 3, 5, 5), (3, 4, 3, 3))),
    ("pad", lambda x: functional.pad(x, (1, 2), mode="reflect"), _pair((2, 3, 8))),
    ("pixel shuffle", lambda x: functional.pixel_shuffle(x, 2), _pair((2, 4, 3, 3))),
    ("unfold", lambda x: functional.unfold(x, 2), _pair((2, 3, 4, 4))),
    ("fold", lambda x: functional.fold(x, (4, 4), 2, stride=2), _pair((2, 12, 4))),
    ("gru", lambda x, w: torch.tanh(x @ w), _pair((2, 3, 5), (5, 4))),
    ("adaptive average pool", lambda x: functional.adaptive_avg_pool2d(x, 3), _pair((2, 3, 7, 7))),
    ("trapezoid", lambda x: torch.trapezoid(x), _pair((4, 6))),
    ("nanmean", lambda x: torch.nanmean(x), _pair((4, 6))),
    ("std", lambda x: x.std(1), _pair((4, 6))),
    ("logcumsumexp", lambda x: torch.logcumsumexp(x, 1), _pair((4, 6))),
    ("cov", torch.cov, _pair((4, 6))),
    ("kron", torch.kron, _pair((2, 3), (3, 2))),
    ("diff", torch.diff, _pair((4, 6))),
    ("cross", lambda x, y: torch.linalg.cross(x, y), _pair((4, 3), (4, 3))),
    (
        "embedding bag",
        lambda w: functional.embedding_bag(torch.tensor([0, 1, 2, 1]), w, torch.tensor([0, 2])),
        _pair((4, 6)),
    ),
    (
        "grid sample",
        lambda x, g: functional.grid_sample(x, g.tanh(), align_corners=False),
        _pair((1, 2, 5, 5), (1, 3, 3, 2)),
    ),
    ("affine grid", lambda t: functional.affine_grid(t, [2, 3, 4, 5], align_corners=False), _pair((2, 2, 3))),
    ("linear's gradients", lambda x, w: _gradients(functional.linear, x, w), _pair((2, 3, 5), (4, 5))),
    ("matmul's gradients", lambda x, w: _gradients(torch.matmul, x, w), _pair((33,), (2, 33, 7))),
    ("matmul's gradients, broadcast", lambda x, w: _gradients(torch.matmul, x, w), _pair((2, 3, 4, 5), (3, 5, 6))),
    ("interpolation's gradient", lambda x: _gradients(lambda y: functional.interpolate(y, 9), x), _pair((2, 3, 7))),
    (
        "bilinear's gradient",
        lambda x: _gradients(lambda y: functional.interpolate(y, 9, mode="bilinear"), x),
        _pair((1, 2, 5, 5)),
    ),
]


def _gradients(f: Callable[..., Tensor], *args: Tensor) -> Any:
    own = [x.detach().requires_grad_() for x in args]
    return torch.autograd.grad(f(*own).square().sum(), own)


# -- (b) fast paths that are off under tracing --------------------------------------------------------


def by_hand(layer: nn.TransformerEncoderLayer) -> Callable[[Tensor], Tensor]:
    """The layer's slow path."""

    def f(x: Tensor) -> Tensor:
        n = layer
        if n.norm_first:
            x = x + n._sa_block(n.norm1(x), None, None)
            return x + n._ff_block(n.norm2(x))
        x = n.norm1(x + n._sa_block(x, None, None))
        return n.norm2(x + n._ff_block(x))

    return f


class ByHand(nn.TransformerEncoderLayer):
    """The same layer without its fast path."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The slow path."""
        return by_hand(self)(src)


def paths() -> None:
    """Encoder layers and attention in eval, and branches on what tracing changes."""
    for heads in (1, 2, 4):
        for size in (8, 16, 32):
            for first in (False, True):
                for act in ("relu", "gelu"):
                    options = {"dropout": 0.0, "batch_first": True, "norm_first": first, "activation": act}

                    def made(o: Any = (size, heads, options)) -> Any:
                        torch.manual_seed(0)
                        one = nn.TransformerEncoderLayer(o[0], o[1], 4 * o[0], **o[2]).eval()
                        other = ByHand(o[0], o[1], 4 * o[0], **o[2]).eval()
                        other.load_state_dict(one.state_dict())
                        for p in (*one.parameters(), *other.parameters()):
                            p.requires_grad_(False)
                        return one, other, (torch.randn(3, 7, o[0]),)

                    attempt("b", f"encoder layer {heads} {size} {first} {act}", made)
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    asks: dict[str, Callable[[Tensor], bool]] = {
        "a fake": lambda x: isinstance(x, FakeTensor),
        "the type": lambda x: type(x) is not Tensor,
        "modes": lambda x: bool(modes()),
        "compiling": lambda x: torch.compiler.is_exporting(),
        "the proxy mode": lambda x: torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None,
        "functorch": lambda x: torch._C._functorch.maybe_current_level() is not None,
        "fx": lambda x: torch.fx._symbolic_trace.is_fx_tracing(),
        "the address": lambda x: _raises(x.data_ptr),
        "numpy": lambda x: _raises(x.numpy),
        "an item": lambda x: _raises(lambda: bool(x.sum() > -1e9)),
        "a list": lambda x: _raises(x.tolist),
        "the repr": lambda x: "Fake" in repr(x)[:40],
        "the stack": lambda x: any("torch/fx" in f.filename for f in __import__("inspect").stack(0)),
        "the dispatch key": lambda x: "Python" in str(torch._C._dispatch_keys(x)),
    }
    for name, ask in asks.items():
        pair("b", f"branch on {name}", lambda x, ask=ask: x * 2 if ask(x) else x * 3, lambda x: x * 2, (4, 6))


def _raises(f: Callable[[], Any]) -> bool:
    try:
        f()
    except Exception:
        return True
    return False


# -- (c) one tensor given twice -----------------------------------------------------------------------


def twice() -> None:
    """What asks whether two of its inputs are one."""
    asks: dict[str, Callable[[Tensor, Tensor], bool]] = {
        "is": lambda x, y: x is y,
        "id": lambda x, y: id(x) == id(y),
        "a set": lambda x, y: len({x, y}) == 1,
        "a dict": lambda x, y: len({x: 0, y: 0}) == 1,
        "a version": lambda x, y: _written_together(x, y),
        "an attribute": lambda x, y: _marked(x, y),
        "base": lambda x, y: x.view(-1)._base is y,
        "address": lambda x, y: _address(x) == _address(y),
        "storage": lambda x, y: x.untyped_storage()._cdata == y.untyped_storage()._cdata,
        "is_set_to": lambda x, y: x.is_set_to(y),
    }
    for name, ask in asks.items():
        for given in ("one tensor", "views", "clones", "a parameter", "in a list"):
            f = lambda x, y, ask=ask: x + y if ask(x, y) else x - y  # noqa: E731

            def made(given: str = given, f: Any = f) -> Any:
                x = torch.randn(4, 6)
                match given:
                    case "views":
                        return f, lambda x, y: x - y, (x, x.view(4, 6))
                    case "clones":
                        return f, lambda x, y: x - y, (x, x.clone())
                    case "a parameter":
                        net = nn.Linear(6, 4)
                        return (lambda n, w: f(n.weight, w)), (lambda n, w: n.weight - w), (net, net.weight)
                    case "in a list":
                        return (lambda x, y: f(x, y[0])), (lambda x, y: x - y[0]), (x, [x])
                return f, lambda x, y: x - y, (x, x)

            attempt("c", f"{name}, {given}", made)

    def attention() -> Any:
        torch.manual_seed(0)
        own = nn.MultiheadAttention(16, 2, batch_first=True).eval()
        for p in own.parameters():
            p.requires_grad_(False)
        x = torch.randn(2, 5, 16)
        f = lambda n, a, b, c: n(a, b, c, need_weights=False)[0]  # noqa: E731
        g = lambda n, a, b, c: n(a, b.clone(), c.clone(), need_weights=False)[0]  # noqa: E731
        return f, g, (own, x, x, x)

    attempt("c", "attention(x, x, x)", attention)
    for name, f in {
        "written": lambda x, y: (x.add_(1), y * 2)[1],
        "written, second": lambda x, y: (y.mul_(3), x * 2)[1],
        "gradients": lambda x, y: _one_gradient(x, y),
    }.items():
        g = {"written": lambda x, y: ((y * 2), x.add_(1))[0]}.get(name, lambda x, y: x * 2)
        attempt("c", name, lambda f=f, g=g: (f, g, (x := torch.randn(4, 6), x)))


def _written_together(x: Tensor, y: Tensor) -> bool:
    before = y._version
    x.add_(0)
    return y._version != before


def _marked(x: Tensor, y: Tensor) -> bool:
    x.mark = 1
    found = hasattr(y, "mark")
    del x.mark
    return found


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except Exception:
        return id(x)


def _one_gradient(x: Tensor, y: Tensor) -> Tensor:
    a = x.detach().requires_grad_()
    b = a if x is y else y.detach().requires_grad_()
    return torch.autograd.grad((a * b).sum(), a)[0]


# -- (d) effects that a trace does not hold -----------------------------------------------------------


@dataclasses.dataclass
class Out:
    """Outputs in a dataclass."""

    value: Any


class Bag:
    """An object with an attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """An object with a slot."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


SHARED: list[Any] = []
COUNT = 0


class Counting:
    """A class that counts."""

    count = 0


def effects() -> None:
    """Each effect with another value on the two sides."""
    changes: dict[str, Callable[[Any, Any, float], Any]] = {
        "list append": lambda c, x, k: c["list"].append(x * k),
        "list insert": lambda c, x, k: c["list"].insert(0, x + k),
        "list item": lambda c, x, k: c["full"].__setitem__(0, x * k),
        "list extend": lambda c, x, k: c["list"].extend([x] * int(k)),
        "list pop": lambda c, x, k: [c["full"].pop() for _ in range(int(k))],
        "list reverse": lambda c, x, k: c["plain"].reverse() if k > 1 else None,
        "list sort": lambda c, x, k: c["plain"].sort(reverse=k > 1),
        "list of numbers": lambda c, x, k: c["plain"].append(k),
        "dict item": lambda c, x, k: c["dict"].__setitem__("a", x * k),
        "dict key": lambda c, x, k: c["dict"].__setitem__(f"k{k}", x),
        "dict order": lambda c, x, k: c["dict"].__setitem__("z", c["dict"].pop("z")) if k > 1 else None,
        "dict del": lambda c, x, k: c["dict"].pop("z") if k > 1 else None,
        "nested": lambda c, x, k: c["dict"].setdefault("deep", {}).__setitem__("q", [x * k]),
        "set add": lambda c, x, k: c["set"].add(k),
        "deque": lambda c, x, k: c["deque"].append(x * k),
        "counter": lambda c, x, k: c["counter"].update({"n": k}),
        "attribute": lambda c, x, k: setattr(c["bag"], "value", x * k),
        "attribute number": lambda c, x, k: setattr(c["bag"], "value", k),
        "new attribute": lambda c, x, k: setattr(c["bag"], "other", k),
        "slot": lambda c, x, k: setattr(c["slot"], "value", x * k),
        "namespace": lambda c, x, k: setattr(c["space"], "value", x * k),
        "array": lambda c, x, k: c["array"].__setitem__(0, k),
        "bytearray": lambda c, x, k: c["bytes"].__setitem__(0, int(k)),
        "module attribute": lambda c, x, k: setattr(c["net"], "last", x * k),
        "module number": lambda c, x, k: setattr(c["net"], "count", k),
        "module list": lambda c, x, k: c["net"].seen.append(x * k),
        "train mode": lambda c, x, k: c["net"].train(k > 1),
        "requires_grad": lambda c, x, k: c["net"].weight.requires_grad_(k > 1),
        "data": lambda c, x, k: setattr(c["net"].weight, "data", c["net"].weight.data * k),
        "data in place": lambda c, x, k: c["net"].weight.data.mul_(k),
        "data of an input": lambda c, x, k: setattr(c["x"], "data", c["x"].data * k),
        "data of a buffer": lambda c, x, k: setattr(c["net"].kept, "data", c["net"].kept * k),
        "set_": lambda c, x, k: c["x"].set_(x.detach() * k),
        "swap": lambda c, x, k: torch.utils.swap_tensors(c["x"], x * k),
        "resize": lambda c, x, k: c["x"].resize_(2, 3) if k > 1 else None,
        "transposed in place": lambda c, x, k: c["x"].t_() if k > 1 else None,
        "grad": lambda c, x, k: (c["net"](x).sum() * k).backward(),
        "grad assigned": lambda c, x, k: setattr(c["net"].weight, "grad", c["net"].weight.detach() * k),
        "grad of an input": lambda c, x, k: (c["leaf"] * k).sum().backward(),
        "grad only once": lambda c, x, k: c["net"](x).sum().backward() if k > 1 else None,
        "grad to zero": lambda c, x, k: setattr(c["grown"], "grad", c["grown"].grad * k),
        "grad added": lambda c, x, k: (c["grown"] * k).sum().backward(),
        "grad cleared": lambda c, x, k: setattr(c["grown"], "grad", None) if k > 1 else None,
        "grad's data": lambda c, x, k: c["grown"].grad.mul_(k),
        "tensor attribute": lambda c, x, k: setattr(c["x"], "mark", k),
        "register buffer": lambda c, x, k: c["net"].register_buffer("new", x * k),
        "register parameter": lambda c, x, k: c["net"].register_parameter("own", nn.Parameter(x.detach() * k)),
        "forward hook": lambda c, x, k: c["net"].register_forward_hook(print) if k > 1 else None,
        "global list": lambda c, x, k: SHARED.append(k),
        "global number": lambda c, x, k: globals().__setitem__("COUNT", k) or COUNT,
        "class attribute": lambda c, x, k: setattr(Counting, "count", k),
        "function attribute": lambda c, x, k: setattr(c["function"], "k", k),
        "closure": lambda c, x, k: c["closure"](x * k),
    }
    for name, change in changes.items():

        def made(change: Any = change, other: float = 2.0) -> Any:
            def program(k: float) -> Callable[[Any, Tensor], Tensor]:
                return lambda c, x: (change(c, x, k), x * 2)[1]

            return program(1.0), program(other), (containers(), torch.randn(4, 6))

        attempt("d", name, made)
        attempt("d equal", name, lambda made=made: made(other=1.0))
    outputs: dict[str, Callable[[Tensor, float], Any]] = {
        "dataclass": lambda x, k: Out(x * k),
        "dataclass of a number": lambda x, k: (x, Out(k)),
        "set of numbers": lambda x, k: (x, {k, k + 1}),
        "object": lambda x, k: (x, Bag(x * k)),
        "namespace": lambda x, k: (x, types.SimpleNamespace(v=x * k)),
        "dict keys": lambda x, k: {"a": x, "b": x * 2} if k > 1 else {"b": x, "a": x * 2},
        "nested keys": lambda x, k: [{"a": x}] if k > 1 else [{"c": x}],
        "array": lambda x, k: (x, numpy.full(3, k)),
        "numpy number": lambda x, k: (x, numpy.float32(k)),
        "bound": lambda x, k: (x, functools_partial(k)),
        "zero's sign": lambda x, k: (x, 0.0 if k > 1 else -0.0),
        "kinds of one": lambda x, k: (x, 1 if k > 1 else True),
        "generator": lambda x, k: (x, (x * k for _ in range(2))),
        "list of objects": lambda x, k: [x, Bag(k)],
        "long list": lambda x, k: (x, numpy.concatenate([numpy.zeros(2000), [k], numpy.zeros(2000)])),
        "named": lambda x, k: (x, collections.OrderedDict(a=k)),
    }
    for name, f in outputs.items():
        pair("d", f"returned {name}", lambda x, f=f: f(x, 1.0), lambda x, f=f: f(x, 2.0), (4, 6))


def functools_partial(k: float) -> Any:
    """A function of its own number."""
    return lambda: k


def containers() -> dict[str, Any]:
    """Something of everything."""
    torch.manual_seed(0)
    net = nn.Linear(6, 6)
    net.seen = []
    net.register_buffer("kept", torch.ones(3))
    grown = torch.randn(6, requires_grad=True)
    grown.grad = torch.ones(6)
    kept: list[Any] = []

    def closure(x: Any) -> None:
        kept.append(x)

    return {
        "list": [], "full": [1, 2, 3], "plain": [3, 1, 2], "dict": {"z": 1, "y": 2}, "set": {1},
        "deque": collections.deque(),
        "counter": collections.Counter(), "bag": Bag(0), "slot": Slotted(0), "space": types.SimpleNamespace(value=0),
        "array": numpy.zeros(3), "bytes": bytearray(3), "net": net, "x": torch.randn(6, 2), "grown": grown,
        "leaf": torch.randn(3, requires_grad=True), "function": lambda: kept, "closure": closure,
    }  # fmt: skip


# -- (e) generators and switches ----------------------------------------------------------------------


def switches() -> None:
    """Seeds and switches that are set within."""
    drop = lambda x: functional.dropout(x, 0.5)  # noqa: E731
    sets: dict[str, Callable[[int], Any]] = {
        "seed": lambda k: torch.manual_seed(k),
        "default generator": lambda k: torch.default_generator.manual_seed(k),
        "random seed": lambda k: torch.random.manual_seed(k),
        "state": lambda k: torch.set_rng_state(torch.Generator().manual_seed(k).get_state()),
        "draw": lambda k: torch.random.fork_rng().__enter__() if k > 1 else None,
        "Python": lambda k: random.seed(k),
        "Python drawn": lambda k: [random.random() for _ in range(k)],
        "numpy": lambda k: numpy.random.seed(k),
        "numpy drawn": lambda k: numpy.random.rand(k),
        "threads": lambda k: torch.set_num_threads(k),
        "precision": lambda k: torch.set_float32_matmul_precision(["high", "medium"][k - 1]),
        "denormals": lambda k: torch.set_flush_denormal(k > 1),
        "deterministic": lambda k: torch.use_deterministic_algorithms(k > 1, warn_only=True),
        "fill": lambda k: setattr(torch.utils.deterministic, "fill_uninitialized_memory", k > 1),
        "grad": lambda k: torch.set_grad_enabled(k > 1),
        "dtype": lambda k: torch.set_default_dtype([torch.float32, torch.float64][k - 1]),
        "mkldnn": lambda k: torch._C._set_mkldnn_enabled(k > 1),
        "mkldnn deterministic": lambda k: setattr(torch.backends.mkldnn, "deterministic", k > 1),
        "mkldnn precision": lambda k: setattr(torch.backends.mkldnn.matmul, "fp32_precision", ["ieee", "bf16"][k - 1]),
        "flash": lambda k: torch.backends.cuda.enable_flash_sdp(k > 1),
        "autocast": lambda k: torch.set_autocast_enabled("cpu", k > 1),
        "autocast dtype": lambda k: torch.set_autocast_dtype("cpu", [torch.bfloat16, torch.float16][k - 1]),
        "default device": lambda k: torch.set_default_device(["cpu", "meta"][k - 1]),
        "cudnn": lambda k: setattr(torch.backends.cudnn, "deterministic", k > 1),
        "multithreading": lambda k: torch.autograd.set_multithreading_enabled(k > 1),
        "anomaly": lambda k: torch.autograd.set_detect_anomaly(k > 1),
    }
    for name, change in sets.items():
        for then, f in {"product": lambda x: x * 2, "draw": drop}.items():
            made = lambda change=change, f=f, other=2: (  # noqa: E731
                lambda x: (change(1), f(x))[1],
                lambda x: (change(other), f(x))[1],
                (torch.randn(4, 6),),
            )
            attempt("e", f"{name}, {then}", made)
    for k in (1, 2):
        for f in (drop, torch.rand_like, lambda x: x * torch.rand(()), lambda x: x.clone().uniform_()):
            seeded = lambda x, k=k, f=f: (torch.manual_seed(k), f(x))[1]  # noqa: E731
            pair("e", f"seed {k} and {f}", seeded, seeded, (4, 6))
            pair("e", f"seed {k} or none and {f}", seeded, f, (4, 6))

    def with_generator(k: int) -> Any:
        return lambda x, g: (g.manual_seed(k), x * torch.rand(x.shape, generator=g))[1]

    for k in (1, 2):
        attempt("e", f"own generator {k}", lambda k=k: (
            with_generator(1), with_generator(k), (torch.randn(4, 6), torch.Generator().manual_seed(7))))  # fmt: skip


# -- (f) graph modules, (g) memory, (h) counts ---------------------------------------------------------


def graphs() -> None:
    """Graph modules that run something else than their graph."""

    def patched(gm: Any) -> Any:
        gm.forward = lambda *args: args[0] * 5
        return gm

    def on_class(gm: Any) -> Any:
        type(gm).forward = lambda self, *args: args[0] * 5
        return gm

    def hooked(gm: Any) -> Any:
        gm.register_forward_hook(lambda m, args, out: pytree.tree_map(lambda x: x * 5, out))
        return gm

    def before(gm: Any) -> Any:
        gm.register_forward_pre_hook(lambda m, args: tuple(x * 5 for x in args))
        return gm

    def codegen(gm: Any) -> Any:
        gm.graph.on_generate_code(lambda old: lambda body: [x.replace("2", "5") for x in body])
        gm.recompile()
        return gm

    def stale(gm: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.args = (node.args[0], 5)
        return gm

    def called(gm: Any) -> Any:
        type(gm).__call__ = lambda self, *args: args[0] * 5
        return gm

    def of_code(gm: Any) -> Any:
        type(gm).forward.__code__ = (lambda self, x_1, y_1=None: x_1 * 5).__code__
        return gm

    def compiled(gm: Any) -> Any:
        gm._compiled_call_impl = lambda *args: args[0] * 5
        return gm

    changes = [patched, on_class, hooked, before, codegen, stale, called, of_code, compiled, lambda gm: gm]
    makers: dict[str, Callable[[], Any]] = {
        "made by make_fx": lambda: make_fx(lambda x: x * 2)(torch.randn(4, 6)),
        "traced by fx": lambda: symbolic_trace(lambda x: x * 2),
        "within a module": lambda: nn.Sequential(make_fx(lambda x: x * 2)(torch.randn(4, 6))),
        "traced modules": lambda: symbolic_trace(nn.Sequential(nn.Flatten(0, 0), nn.ReLU())),
        "of a trace": lambda: make_fx(lambda x: x * 2, tracing_mode="fake")(torch.randn(4, 6)),
    }
    for name, maker in makers.items():
        for change in changes:

            def made(maker: Any = maker, change: Any = change) -> Any:
                one, other = maker(), maker()
                inner = one[0] if isinstance(one, nn.Sequential) and not hasattr(one, "graph") else one
                change(inner)
                return one, other, (torch.randn(4, 6),)

            attempt("f", f"{name}, {change.__name__}", made)
    for how in ("register_hook", "register_post_accumulate_grad_hook"):

        def net_of(how: str = how) -> Any:
            torch.manual_seed(0)
            net = nn.Linear(6, 3)
            hook = (lambda g: g * 3) if how == "register_hook" else (lambda p: p.grad.mul_(3))
            getattr(net.weight, how)(hook)

            def f(n: Any, x: Tensor) -> Tensor:
                n(x).sum().backward()
                return n.weight.grad

            def g(n: Any, x: Tensor) -> Tensor:
                loss = n(x).sum()
                n.weight.grad, n.bias.grad = torch.autograd.grad(loss, [n.weight, n.bias])
                return n.weight.grad

            return f, g, (net, torch.randn(4, 6))

        attempt("f", how, net_of)


def memory() -> None:
    """Two tensors over one memory that torch does not know as one."""
    views: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
        "whole": lambda a: (torch.from_numpy(a), torch.from_numpy(a)),
        "overlapping": lambda a: (torch.from_numpy(a[:80]), torch.from_numpy(a[16:96])),
        "reshaped": lambda a: (torch.from_numpy(a[:80].reshape(8, 10)).flatten(), torch.from_numpy(a[:80])),
        "frombuffer": lambda a: (torch.frombuffer(a.data, dtype=torch.float32), torch.from_numpy(a)),
        "dlpack": lambda a: (torch.from_dlpack(a), torch.from_numpy(a)),
        "strided": lambda a: (torch.from_numpy(a[::2]), torch.from_numpy(a[:48])),
        "cast": lambda a: (torch.from_numpy(a.view("int32")).view(torch.float32), torch.from_numpy(a)),
    }
    programs: dict[str, tuple[Any, Any]] = {
        "added": (lambda x, y: (x.add_(1.0), y * 2.0)[1], lambda x, y: (y * 2.0, x.add_(1.0))[0]),
        "copied": (lambda x, y: (x.zero_(), y.clone())[1], lambda x, y: (y.clone(), x.zero_())[0]),
        "second": (lambda x, y: (y.mul_(3), x + 1)[1], lambda x, y: (x + 1, y.mul_(3))[0]),
        "both": (lambda x, y: (x.add_(1), y.add_(1), x * 1)[2], lambda x, y: (y.add_(1), x.add_(1), x * 1)[2]),
        "sliced": (lambda x, y: (x[:8].add_(1), y.exp())[1], lambda x, y: (y.exp(), x[:8].add_(1))[0]),
        "read": (lambda x, y: x[:40] + y[:40], lambda x, y: y[:40] + x[:40]),
        "by numpy": (lambda x, y: (_numpy(x), y * 2.0)[1], lambda x, y: (y * 2.0, _numpy(x))[0]),
    }
    for where, view in views.items():
        for what, (f, g) in programs.items():
            attempt("g", f"{where}, {what}", lambda view=view, f=f, g=g: (f, g, view(_aligned(96))))


def _numpy(x: Tensor) -> None:
    x.numpy()[0] += 1


def _aligned(n: int) -> Any:
    raw = numpy.zeros(n * 4 + 64, dtype=numpy.uint8)
    start = -raw.ctypes.data % 64
    found = raw[start : start + n * 4].view(numpy.float32)
    found[:] = numpy.random.default_rng(0).standard_normal(n)
    return found


class Own(torch.optim.SGD):
    """An optimizer that keeps a count somewhere."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, 0.1)
        self.where, self.kept, self.box, self.cells = where, [0], Bag(0), {"n": [0]}
        self.number = 0
        self.ticks = iter(range(1, 1000))
        count = [0]

        def tick() -> int:
            count[0] += 1
            return count[0]

        self.tick = tick

    def _count(self) -> int:
        match self.where:
            case "a list":
                self.kept[0] += 1
                return int(self.kept[0])
            case "an object":
                self.box.value += 1
                return int(self.box.value)
            case "a nested list":
                self.cells["n"][0] += 1
                return int(self.cells["n"][0])
            case "a number":
                self.number += 1
                return self.number
            case "an iterator":
                return next(self.ticks)
            case "a closure":
                return self.tick()
            case "the settings":
                self.param_groups[0]["n"] = self.param_groups[0].get("n", 0) + 1
                return int(self.param_groups[0]["n"])
            case "the defaults":
                self.defaults["n"] = self.defaults.get("n", 0) + 1
                return int(self.defaults["n"])
            case "the class":
                Counting.count += 1
                return Counting.count
            case "a global":
                SHARED.append(1)
                return len(SHARED)
        return 1

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Another rate each time."""
        rate = 0.1 / self._count()
        for p in self.param_groups[0]["params"]:
            p.sub_(rate * p.grad)


def counts() -> None:
    """Steps whose next one is another."""
    for where in ("a list", "an object", "a nested list", "a number", "an iterator", "a closure", "the settings",
                  "the defaults", "the class", "a global", "nowhere"):  # fmt: skip
        for end in ("zero", "none", "kept"):

            def made(where: str = where, end: str = end) -> Any:
                torch.manual_seed(0)
                Counting.count = 0
                SHARED.clear()
                net = nn.Linear(6, 3)
                held = Own(net.parameters(), where)

                def f(net: Any, held: Any, x: Tensor) -> Tensor:
                    net(x).square().mean().backward()
                    held.step()
                    if end != "kept":
                        held.zero_grad(set_to_none=end == "none")
                    return x * 1.0

                def g(net: Any, held: Any, x: Tensor) -> Tensor:
                    net(x).square().mean().backward()
                    for p in net.parameters():
                        p.data.sub_(0.1 * p.grad)
                    if end != "kept":
                        held.zero_grad(set_to_none=end == "none")
                    return x * 1.0

                return f, g, (net, held, torch.randn(4, 6))

            attempt("h", f"{where}, gradients {end}", made)
    for where in ("a list", "a nested list", "an object", "a closure", "a global", "an iterator", "a number"):

        def modules(where: str = where) -> Any:
            box = Own([torch.zeros(1, requires_grad=True)], where)
            Counting.count = 0
            SHARED.clear()
            return (lambda x: x * box._count()), (lambda x: x * 1), (torch.randn(4, 6),)

        attempt("h", f"a function with {where}", modules)


# -- what really happens ------------------------------------------------------------------------------


def picture(x: Any, seen: dict[int, int], depth: int = 0) -> Any:
    """Everything of an object that another run can be compared by."""
    if depth > 12 or x is None or isinstance(x, bool | int | str | bytes | bytearray | type | types.ModuleType):
        return repr(x) if not isinstance(x, types.ModuleType) else "module"
    if isinstance(x, float):
        return x.hex()
    if id(x) in seen:
        return "seen", seen[id(x)]
    seen[id(x)] = len(seen)
    KEPT.append(x)
    down = lambda y: picture(y, seen, depth + 1)  # noqa: E731
    if isinstance(x, Tensor):
        data = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        grad = x.grad if x.is_leaf else None
        extra = {key: down(value) for key, value in vars(x).items()}
        is_leaf = x.is_leaf and depth > 0
        return str(x.dtype), tuple(x.shape), data, down(grad), extra, x.requires_grad and is_leaf
    if isinstance(x, numpy.ndarray):
        return x.shape, x.tobytes()
    if isinstance(x, torch.Generator):
        return x.get_state().numpy().tobytes()
    if isinstance(x, dict):
        items = [(down(key), down(value)) for key, value in x.items()]
        return "dict", items, down(vars(x)) if hasattr(x, "__dict__") else None
    if isinstance(x, list | tuple | collections.deque):
        return type(x).__name__, [down(y) for y in x]
    if isinstance(x, set):
        return sorted(map(repr, x))
    if isinstance(x, types.FunctionType):
        return [down(c.cell_contents) for c in x.__closure__ or ()], down(vars(x))
    if hasattr(x, "__dict__"):
        return type(x).__name__, down(vars(x)) if type(x).__module__.split(".")[0] != "logging" else 0
    slots = [getattr(x, key) for key in getattr(type(x), "__slots__", ()) if hasattr(x, key)]
    return type(x).__name__, [down(y) for y in slots] or (repr(x.__reduce__()) if "iterator" in type(x).__name__ else 0)


KEPT: list[Any] = []


def happened(make: Make, side: int, seed: int, steps: int) -> list[Any]:
    """What really happens, step by step, in a fresh copy of everything, with other values for other seeds."""
    from bitproof.harness.machine.determinism import Switches

    before = Switches.now()
    shared, count = [*SHARED], Counting.count
    torch.manual_seed(100)
    f, g, inputs = make()
    if seed:
        with torch.no_grad():
            for x in pytree.tree_leaves([inputs, *([*m.parameters()] for m in inputs if isinstance(m, nn.Module))]):
                if isinstance(x, Tensor) and x.is_floating_point():
                    once = x.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
                    once.copy_(torch.randn(once.shape, generator=torch.Generator().manual_seed(seed)))
    found = []
    try:
        torch.manual_seed(9876543)
        random.seed(9876543)
        numpy.random.seed(987654)
        for _ in range(steps):
            result = (f, g)[side](*inputs)
            leaves = pytree.tree_flatten_with_path(result)[0]
            keys = [[str(k) for k in path if not isinstance(k, pytree.SequenceKey)] for path, _ in leaves]
            seen: dict[int, int] = {}
            now = Switches.now()
            reported = picture([[x for _, x in leaves]], {}), keys, picture(inputs, seen), now.switches, now.generators
            found.append((reported, picture([*SHARED], {}), Counting.count, COUNT))
    except Exception as error:
        found.append(f"raises {type(error).__name__}")
    finally:
        before.restore()
        torch.set_default_device(None)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.autograd.set_detect_anomaly(False)
        SHARED[:], Counting.count = shared, count
        globals()["COUNT"] = 0
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def judged(make: Make) -> tuple[str, bool, bool, str]:
    """The verdict, whether the pair really differs in a step, whether in the second one, and the reason."""
    import bitproof

    with quiet():
        runs = [[happened(make, side, seed, 2) for side in (0, 1)] for seed in (0, 1)]
        f, g, inputs = make()
        found = bitproof.prove(f, g, *inputs)
        torch.set_default_device(None)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.autograd.set_detect_anomaly(False)
        SHARED.clear()
        Counting.count = 0
        globals()["COUNT"] = 0
    differs = any(one[0] != other[0] for one, other in runs)
    later = any(one != other for one, other in runs) and bool(found.induction and found.induction.holds)
    return found.verdict, differs, later and found.verdict == "PROVED", str(found.reason)


def main(kinds: list[str]) -> int:
    """Print a row a kind, and each unsound or lost attempt; return 1 if one is unsound."""
    for build in (operators, paths, twice, effects, switches, graphs, memory, counts):
        build()
    unsound = 0
    for kind, attempts in sorted(KINDS.items()):
        wanted = [x.partition(":")[2] for x in kinds if x.partition(":")[0] == kind]
        if kinds and not wanted:
            continue
        attempts = {name: make for name, make in attempts.items() if not kinds or name.startswith(tuple(wanted))}
        rows = collections.Counter[str]()
        for name, make in attempts.items():
            try:
                verdict, differs, later, reason = judged(copy.copy(make))
            except Exception as error:
                verdict, differs, later, reason = "RAISED", False, False, f"{type(error).__name__}: {error}"
            kind_of = "differ" if differs else "equal"
            bad = verdict == "PROVED" and (differs or later)
            rows[f"{kind_of} {verdict}"] += 1
            rows["UNSOUND"] += bad
            if bad or verdict == "RAISED" or (verdict == "REFUSED" and not differs) or "-v" in sys.argv:
                print(f"  ({kind}) {name}: {kind_of} {verdict} {'UNSOUND' * bad} {reason[:150]}", flush=True)
        unsound += rows["UNSOUND"]
        print(f"({kind}) {len(attempts)} attempts:", dict(rows), flush=True)
    return int(unsound > 0)


if __name__ == "__main__":
    sys.exit(main([x for x in sys.argv[1:] if not x.startswith("-")]))
