import pytest
import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.nn.modules.module import register_module_forward_hook

from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.powers.proofs.prover.graphs.calls_only import why_not_calls_only
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.torch_compat import LazyGraphModule
from tests.harness.powers.proofs.toy_graphs import names_of, randn, trace

W, X = randn(4, 6), randn(4, 6)


def hook(module):
    module.register_forward_hook(lambda module, args, out: [out[0] + 1])


def hook_before(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1, args[1]))


def nested_hook(module):
    module.nested = trace(lambda w, x: w, (W, X))
    hook(module.nested)


def function(module):
    module.forward = lambda w, x: [w + x]


def transformer(module):
    module.graph.on_generate_code(lambda _: lambda body: [line.replace("mul", "add") for line in body])
    module.recompile()


class Doubling(GraphModule):
    def __call__(self, *args):
        return [2 * x for x in super().__call__(*args)]


def inherit(module):
    module.__class__ = type(Doubling(module, module.graph))


def wrap(module):
    """What stays when the graph's code is made anew."""
    type(module)._wrapped_call = lambda self, other, *args: [2 * x for x in other.forward(*args)]


def wrap_on_the_module(module):
    module._wrapped_call = lambda other, *args: [2 * x for x in other.forward(*args)]


def call(module):
    module._call_impl = lambda *args: [2 * x for x in module.forward(*args)]


def compile_call(module):
    module._compiled_call_impl = lambda *args: [2 * x for x in module.forward(*args)]


def forward_of_its_class(module):
    type(module).forward = lambda self, w, x: [w + x]


def call_of_its_class(module):
    type(module).__call__ = lambda self, w, x: [w + x]


def inner_call_of_its_class(module):
    type(module)._call_impl = lambda self, w, x: [w + x]
    del type(module).__call__
    type(module).__call__ = lambda self, *args: self._call_impl(*args)


class Adding(CodeGen):
    def gen_fn_def(self, *args):
        return super().gen_fn_def(*args) + "\n    arg0_1 = arg0_1 + 1"


def generate(module):
    module.graph.set_codegen(Adding())
    module.recompile()


def generate_by_attribute(module):
    module.graph._codegen.generate_output = lambda args, **_: f"return [x * 2 for x in {args!r}]"
    module.recompile()


@pytest.fixture
def hooked():
    handle = register_module_forward_hook(lambda module, args, out: [out[0] + 1])
    yield
    handle.remove()


def test_a_hook_on_all_modules_is_refused(hooked):
    module = trace(lambda w, x: w * x, (W, X))
    assert why_not_calls_only(module) == "hooks on all modules"
    assert not torch.equal(module(W, X)[0], W * X)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_class_that_torch_makes_is_one_of_torch(lazy):
    module = trace(lambda w, x: w * x, (W, X))
    found = LazyGraphModule(module, module.graph) if lazy else GraphModule(module, module.graph)
    found.recompile()
    assert why_not_calls_only(found) is None


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (hook, "hooks"),
        (hook_before, "hooks"),
        (nested_hook, "hooks"),
        (function, "a function in its place"),
        (inherit, "a class of its own"),
        (wrap, "a function in its place"),
        (wrap_on_the_module, "a function in its place"),
        (call, "a function in its place"),
        (compile_call, "a function in its place"),
        (forward_of_its_class, "a function in its place"),
        (call_of_its_class, "a function in its place"),
        (inner_call_of_its_class, "a function in its place"),
        (generate, "code that is not made of it alone"),
        (generate_by_attribute, "code that is not made of it alone"),
        (transformer, "code that is not made of it alone"),
    ],
)
def test_a_graph_that_runs_as_something_else_is_refused(change, reported):
    module = trace(lambda w, x: w * x, (W, X))
    export = lambda: export_graph(module, names_of((W, X)), (W, X), ["out"], GroupTable())  # noqa: E731
    assert why_not_calls_only(module) is None
    assert len(export().calls) == 3
    change(module)
    assert why_not_calls_only(module) == reported
    assert change is nested_hook or not torch.equal(module(W, X)[0], W * X), "its graph says that it multiplies"
    with pytest.raises(RefusedError, match=f"a graph that is run with {reported}"):
        export()
