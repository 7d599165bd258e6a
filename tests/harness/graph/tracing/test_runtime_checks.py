"""What eager raises for, the graph raises for: conditions on data survive every pass, each chunk asks its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.traceback import annotate

from bitproof.harness.case import Memory, Pipeline
from bitproof.harness.errors import PassError, TraceError
from bitproof.harness.graph.backend.backends import compile_for
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from tests.harness.graph.graphs import (
    Applied,
    B,
    D,
    Layers,
    batch,
    calls,
    chunked,
    context_of,
    line_of,
    names,
    parameter,
    run_eager,
    run_graph,
    trace,
)

c10d = torch.ops._c10d_functional


def layers(function: Callable[[Applied, Tensor], Tensor]) -> Layers:
    return Layers(Applied(function, w=parameter(D)))


def all_finite(module: Applied, x: Tensor) -> Tensor:
    torch._assert_async(x.detach().isfinite().all(), "x is not finite")
    return x * module.w


def number_of_positive(x: Tensor) -> int:
    return (x.detach()[:, 0, 0] > 0).sum().item()  # type: ignore[return-value]


def at_most_two_positive(module: Applied, x: Tensor) -> Tensor:
    torch._check(number_of_positive(x) <= 2, lambda: "too many")
    return x * module.w


def not_all_positive(module: Applied, x: Tensor) -> Tensor:
    """Mixes data with the chunked dim: false of a chunk of positive rows, whatever the whole batch is."""
    torch._check(number_of_positive(x) < x.shape[0], lambda: "all are positive")
    return x * module.w


def a_few_positive(module: Applied, x: Tensor) -> Tensor:
    torch.ops.aten.sym_constrain_range.default(number_of_positive(x), min=0, max=2)
    return x * module.w


def largest_below_ten(module: Applied, x: Tensor) -> Tensor:
    torch._check_value(x.detach().max().item() < 10.0, lambda: "too large")
    return x * module.w


def below_ten_by_a_flag(module: Applied, x: Tensor) -> Tensor:
    torch._check((x.detach().max() < 10.0).item(), lambda: "too large")
    return x * module.w


def positive_definite(module: Applied, x: Tensor) -> Tensor:
    eye = torch.eye(D) * x.detach()[0, 0, 0]
    torch.linalg.cholesky(eye)
    return x * module.w


def signs(*rows: float) -> Tensor:
    x = batch().abs()
    return x * torch.tensor(rows)[:, None, None]


CHECKS = {
    all_finite: (batch(), torch.full_like(batch(), float("nan")), "x is not finite"),
    at_most_two_positive: (signs(-1, 1, -1, 1), signs(1, 1, 1, 1), "too many"),
    a_few_positive: (signs(-1, 1, -1, 1), signs(1, 1, 1, 1), "Invalid value range"),
    largest_below_ten: (batch(), batch() + 100, "too large"),
    below_ten_by_a_flag: (batch(), batch() + 100, "too large"),
    positive_definite: (signs(1, 1, 1, 1), signs(-1, 1, 1, 1), "cholesky"),
}


@pytest.mark.parametrize("function", CHECKS, ids=lambda f: f.__name__)
def test_the_graph_raises_where_eager_raises_and_runs_where_it_runs(function: Callable[..., Tensor]) -> None:
    good, bad, text = CHECKS[function]
    model = layers(function)
    joint = trace(model, good)
    module = chunked(joint, None)
    run_eager(model, good)
    run_graph(module, joint, model, good)
    with pytest.raises(Exception, match=text):
        run_eager(model, bad)
    with pytest.raises(Exception, match=text):
        run_graph(module, joint, model, bad)


@pytest.mark.parametrize(
    ("rows", "modules", "raises"),
    [
        ((1, 1, -1, -1), None, False),
        ((1, 1, -1, -1), "layers.*", True),
        ((1, -1, 1, -1), "layers.*", False),
        ((1, 1, 1, 1), None, True),
    ],
)
def test_a_condition_on_data_and_the_chunked_dim_is_asked_of_each_chunk(
    rows: tuple[float, ...], modules: str | None, raises: bool
) -> None:
    model, x = layers(not_all_positive), signs(*rows)
    joint = trace(model, x)
    module = chunked(joint, modules)
    for run in (lambda: run_eager(model, x, modules), lambda: run_graph(module, joint, model, x)):
        if raises:
            with pytest.raises(RuntimeError, match="all are positive"):
                run()
        else:
            run()


def test_what_is_raised_names_the_line_that_asked() -> None:
    model = layers(at_most_two_positive)
    joint = trace(model)
    with pytest.raises(RuntimeError) as error:
        run_graph(chunked(joint, None), joint, model, signs(1, 1, 1, 1))
    assert f"too many (checked at {line_of(at_most_two_positive, 1)})" in str(error.value)


def twice_checked(module: Applied, x: Tensor) -> Tensor:
    torch._assert_async(x.detach().isfinite().all(), "x is not finite")
    return not_all_positive(module, x)


POLICIES = {
    "recomputed": {"memory": Memory(policy="full")},
    "offloaded": {"memory": Memory(policy="offload")},
    "bucketed": {"pipeline": Pipeline(bucket=True)},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_pass_keeps_each_check_once_a_chunk(policy: str) -> None:
    joint = trace(layers(twice_checked))
    context = dataclasses.replace(context_of(joint, "layers.*"), **POLICIES[policy])  # type: ignore[arg-type]
    module, _ = run_pipeline(joint.module, build_pipeline(context), context)
    assert sorted(names(module, "_assert_async", "_assert_scalar")) == [
        "_assert_async_chunk0",
        "_assert_async_chunk1",
        "_assert_scalar_chunk0",
        "_assert_scalar_chunk1",
    ]


def counts_arrive(module: Applied, x: Tensor) -> Tensor:
    """As an expert layer does, tells other ranks how many rows it has, and checks what they tell."""
    count = (x.detach() > 0).sum().expand(8).contiguous()
    with annotate({"EP": "dispatch"}):
        reported = c10d.wait_tensor(c10d.all_to_all_single(count, [1] * 8, [1] * 8, "EP"))
    torch._assert_async((reported >= 0).all(), "fewer than none")
    return twice_checked(module, x)


def test_a_schedule_that_overlaps_all_to_alls_keeps_each_check_once_a_chunk() -> None:
    joint = trace(layers(counts_arrive))
    context = dataclasses.replace(context_of(joint, "layers.*"), pipeline=Pipeline(overlap=True))
    module, reports = run_pipeline(joint.module, build_pipeline(context), context)
    facts = next(report.facts for report in reports if report.name == "overlap")
    assert (facts["all_to_alls"], facts["in_chunks"], facts["reordered"]) == (2, 2, True)
    asked = [(operator_name(node), node.meta["chunk"]) for node in calls(module, "_assert_async", "_assert_scalar")]
    assert sorted(asked) == [
        ("_assert_async", 0),
        ("_assert_async", 0),
        ("_assert_async", 1),
        ("_assert_async", 1),
        ("_assert_scalar", 0),
        ("_assert_scalar", 1),
    ]


def test_a_check_outside_of_chunked_modules_is_asked_once_of_the_whole() -> None:
    joint = trace(Layers(Applied(not_all_positive, w=parameter(D)), Applied(lambda m, x: x * m.w, w=parameter(D))))
    module = chunked(joint, "layers.1")
    (check,) = calls(module, "_assert_scalar")
    assert check.args[0].args[1] == B  # type: ignore[union-attr]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_step_raises_too() -> None:
    model = layers(at_most_two_positive)
    joint = trace(model)
    compiled = compile_for(chunked(joint, None), "inductor", {})
    run_graph(compiled, joint, model, signs(1, 1, -1, -1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"u\d+ <= 2"):  # Inductor names the condition, not its message
        run_graph(compiled, joint, model, signs(1, 1, 1, 1))  # type: ignore[arg-type]


def test_what_operators_check_of_their_arguments_leaves_no_call() -> None:
    def first_rows(module: Applied, x: Tensor) -> Tensor:
        return x[:, : number_of_positive(x) + 1] * module.w

    assert names(trace(layers(first_rows)).module, "_assert_scalar") == []


def as_many_as_rows(module: Applied, x: Tensor) -> Tensor:
    torch._check(number_of_positive(x) == x.shape[0])
    return x * module.w


def test_a_number_from_data_that_equals_the_chunked_dim_is_refused() -> None:
    with pytest.raises(TraceError) as error:
        trace(layers(as_many_as_rows))
    assert str(error.value) == (
        "TraceError: a number from data, u1, is asserted to equal an expression of the chunked dim\n"
        "  expected: bounds, which can be checked once a chunk when the step runs\n"
        "  found: Eq(u1, u0), where u0 is the size of the chunked dim\n"
        f"  came from: {line_of(as_many_as_rows, 1)}\n"
        "  fix: check the number against bounds, or compute it from x.shape[...]"
    )


def dropping(module: GraphModule, context: PassContext) -> GraphModule:
    for node in calls(module, "_assert_async"):
        module.graph.erase_node(node)
    return module


def test_a_pass_that_drops_a_check_is_refused() -> None:
    joint = trace(layers(all_finite))
    context = context_of(joint)
    with pytest.raises(PassError) as error:
        run_pipeline(joint.module, [*build_pipeline(context), dropping], context)
    assert str(error.value) == (
        "PassError: the graph lost a check of the traced graph, so it would continue where eager raises\n"
        "  expected: every assertion of the graph before this pass\n"
        "  found: without _assert_async 'x is not finite'\n"
        "  came from: pass dropping\n"
        "  fix: keep calls of aten._assert_async, aten._assert_scalar and their like: they have no readers"
    )
