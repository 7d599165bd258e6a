import pytest
import torch

from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.prove.executed import runs_otherwise
from bitproof.harness.prove.export import RefusedError, export_graph
from tests.harness.prove.graphs import names_of, randn, trace

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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (hook, "hooks"),
        (hook_before, "hooks"),
        (nested_hook, "hooks"),
        (function, "a function in its place"),
        (transformer, "code that is not made of it alone"),
    ],
)
def test_a_graph_that_runs_as_something_else_is_refused(change, told):
    module = trace(lambda w, x: w * x, (W, X))
    export = lambda: export_graph(module, names_of((W, X)), (W, X), ["out"], GroupTable())  # noqa: E731
    assert runs_otherwise(module) is None
    assert len(export().calls) == 3
    change(module)
    assert runs_otherwise(module) == told
    assert change is nested_hook or not torch.equal(module(W, X)[0], W * X), "its graph says that it multiplies"
    with pytest.raises(RefusedError, match=f"a graph that is run with {told}"):
        export()
