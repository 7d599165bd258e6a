"""Private torch, and which release of torch this is, stand in a few files: a new release is met there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bitproof.harness import torch_compat, torch_operators
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.torch_compat import TorchDispatchMode, open_dim, symbolic_graph, untested_release

ROOT = Path(__file__).parent.parent.parent
SOURCES = [path for top in ("harness", "reference", "cases") for path in sorted((ROOT / top).rglob("*.py"))]
TORCH = (
    "torch_compat",
    "torch_compile",
    "torch_distributed",
    "torch_fakes",
    "torch_inductor",
    "torch_operators",
    "torch_sizes",
    "torch_tracing",
)
COMPAT = tuple(ROOT / "harness" / f"{name}.py" for name in TORCH)
NAMES_IN_GRAPHS = ROOT / "harness" / "operators" / "rows.py"
"""It names what graphs of others call, and calls none of it."""
STANDALONE = ROOT / "harness" / "powers" / "shrink" / "standalone" / "template.py"
"""Copied into files that stand alone, so it imports nothing of ours."""
WITHOUT_BITPROOF = ROOT / "harness" / "powers" / "moved" / "standalone"
"""Runs in a Python that may have any torch and no bitproof, so it imports nothing of ours."""

OF_PYTHON = {"_replace", "_asdict", "_fields", "os._exit", "sys._getframe"}
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch(source: str) -> Iterator[str]:
    """Each use of something private that is not the file's own, and each question for torch's version."""
    tree = ast.parse(source)
    operators = {"torch.ops"} | {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops.")
        for target in node.targets
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if PRIVATE_PATH.fullmatch(alias.name))
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                paths = [f"{module}.{alias.name}" for alias in node.names]
                yield from (path for path in paths if PRIVATE_PATH.fullmatch(path) or path.endswith("__version__"))
            case ast.Attribute(attr="__version__"):
                yield ast.unparse(node)
            case ast.Attribute(value=owner, attr=name) if is_private(name):
                message = ast.unparse(node)
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                is_operator = any(message.startswith(f"{namespace}.") for namespace in operators)
                if not is_own and not is_operator and not {name, message} & OF_PYTHON:
                    yield message
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[_, ast.Constant(), *_]
            ):
                name = node.args[1].value
                if is_private(name) or name == "__version__":
                    yield ast.unparse(node)
            case ast.keyword(arg=str(name)) if is_private(name):
                yield f"{name}="
            case ast.Constant(value=str(text)) if PRIVATE_PATH.fullmatch(text):
                yield text


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.testing._internal import common_utils",
        "from torch.fx._lazy_graph_module import _LazyGraphModule",
        "from torch.nn.modules.module import _global_forward_hooks",
        "def late():\n    from torch.distributed import _functional_collectives",
        "torch._C._current_autograd_node()",
        "value._has_symbolic_sizes_strides",
        "tensor.untyped_storage()._cdata",
        "getattr(operator, '_schema', None)",
        "importlib.import_module('torch._inductor.config')",
        "make_fx(f, _error_on_data_dependent_ops=False)",
        "torch.__version__ >= '2.13'",
        "from torch import __version__",
    ],
)
def test_the_rule_sees(source):
    assert list(private_torch(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "self._calls.append(call._replace(index=1)._asdict())",
        "os._exit(1)",
        "aten = torch.ops.aten\naten._unsafe_view.default",
        "torch.ops._c10d_functional.wait_tensor.default",
        "from bitproof.harness.torch_compat import FakeTensor",
        "function.__name__",
    ],
)
def test_the_rule_lets_through(source):
    assert list(private_torch(source)) == []


def test_two_files_alone_touch_private_torch_or_asks_for_its_version():
    found = {
        str(path.relative_to(ROOT)): uses
        for path in SOURCES
        if path not in (*COMPAT, STANDALONE, NAMES_IN_GRAPHS)
        and path.parent != WITHOUT_BITPROOF
        and (uses := sorted(set(private_torch(path.read_text()))))
    }
    assert found == {}
    assert all(list(private_torch(path.read_text())) for path in COMPAT)


def test_the_text_of_a_file_that_stands_alone_uses_one_private_call():
    assert set(private_torch(STANDALONE.read_text())) == {
        "torch._C",
        "torch._C._distributed_c10d",
        "torch._C._distributed_c10d._register_process_group",
    }


@pytest.mark.ranks
def test_importing_it_loads_nothing_of_torch_that_torch_does_not():
    code = (
        "import sys, torch; before = set(sys.modules); import bitproof.harness.torch_compat; "
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'bitproof'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_an_untested_release_is_named_with_the_tested_ones(monkeypatch):
    monkeypatch.setattr(torch_compat.torch, "__version__", "2.13.0+cu130")
    assert untested_release() is None
    monkeypatch.setattr(torch_compat.torch, "__version__", "2.14.0+cu130")
    assert untested_release() == (
        "torch 2.14.0+cu130 is not among the tested versions (2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0)"
    )


def test_an_open_dim_has_its_bounds_whichever_way_a_release_takes_them():
    mode = step_fake_mode(torch.fx.experimental.symbolic_shapes.ShapeEnv())
    fakes = [open_dim(mode, torch.empty(4, 8), 0, (2, 4), f"x{i}", shared="rows") for i in range(2)]
    (symbol,) = {fake.shape[0].node.expr for fake in fakes}
    assert symbol.is_Symbol
    bounds = mode.shape_env.bound_sympy(symbol)
    assert (bounds.lower, bounds.upper) == (2, 4)


def test_linear_and_matmul_of_an_open_dim_trace():
    mode = step_fake_mode(torch.fx.experimental.symbolic_shapes.ShapeEnv())
    x_NSD = open_dim(mode, torch.empty(4, 8, 16), 0, (2, 4), "x", shared="rows")
    with mode:
        weight_FD = torch.empty(32, 16)

    def product(x, weight):
        y = torch.nn.functional.linear(x, weight)
        return y @ y.transpose(1, 2)

    (value,) = symbolic_graph(product, mode)(x_NSD, weight_FD).graph.find_nodes(op="output")[0].all_input_nodes
    assert value.meta["val"].shape[1:] == (8, 8)
    assert value.meta["val"].shape[0].node.expr == x_NSD.shape[0].node.expr


def test_a_trace_reports_each_value_once_but_one_for_inductor_as_torch_does():
    def described(decompositions):
        mode = step_fake_mode(torch.fx.experimental.symbolic_shapes.ShapeEnv())
        with mode:
            x = torch.empty(4, 8)
        graph = symbolic_graph(lambda x: x.sin(), mode, decompositions)(x).graph
        return [sorted(node.meta.keys() & {"val", "tensor_meta"}) for node in graph.nodes if node.op != "output"]

    assert described(None) == [["val"], ["val"]]
    assert described({torch.ops.aten.silu.default: torch.nn.functional.silu}) == [["tensor_meta", "val"]] * 2


def test_nobody_watches_calls_until_a_mode_or_a_profiler_does():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    assert not torch_operators.is_watched()
    with Mode():
        assert torch_operators.is_watched()
    with torch.profiler.profile():
        assert torch_operators.is_watched()
    compiled = torch.compile(lambda x: x + torch_operators.is_watched(), backend="eager", fullgraph=True)
    assert compiled(torch.ones(())).item() == 2
    assert not torch_operators.is_watched()


def test_calls_below_autograd_leave_nothing_for_backward_and_a_mode_sees_them_as_ever():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    seen, x = [], torch.ones(2, 2, requires_grad=True)
    with torch_operators.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    with torch.no_grad(), Mode(), torch_operators.below_autograd():
        torch.nn.functional.linear(x, x)
    assert [str(function) for function in seen] == ["aten.t.default", "aten.mm.default"]
