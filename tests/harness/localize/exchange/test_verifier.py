"""Causes verified by exchange, on one rank: what is one cause, what are two, and what is never called verified."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.errors import RankError
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.verified_cause import Cause
from bitproof.harness.localize.exchange.verifier import unrepeated
from bitproof.harness.localize.exchange.wrong_input import wrong_input
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.logs.replay import Replay
from bitproof.harness.records import ROLES, Key, Role
from tests.harness.localize.exchange.exchanged_steps import Sides, weights


def step(
    scale: float = 0.125,
    eps: float = 1e-5,
    *,
    extra: bool = False,
    missing: bool = False,
    activation: Any = functional.silu,
    take_first: bool = True,
) -> Mapping[str, Tensor]:
    """Two layers with a norm, and their gradients."""
    w1, w2, x = weights((16, 16), (16, 16), (8, 16))
    h = activation(x @ w1)
    h = h if missing else h * scale
    h = h.tanh() if extra else h
    read = x if take_first else h
    y = functional.layer_norm(h @ w2 + read, (16,), eps=eps)
    y.square().mean().backward()
    found = {"w1": w1.grad, "w2": w2.grad, "x": x.grad, "loss": y.detach()}
    return {name: value for name, value in found.items() if value is not None}


def test_a_wrong_number_in_forward_and_backward_is_one_cause_that_makes_all_tensors_equal(tmp_path: Path) -> None:
    sides = Sides(tmp_path, step, lambda: step(scale=0.25))
    culprit, found = sides.verified()
    assert (culprit.call.operator, found.status, found.reverse) == ("mul.Tensor", "verified", True)
    assert (found.tensors, found.differing, found.remaining, found.accounts) == (4, 4, 0, 4)
    assert found.causes == [] and found.runs == 2, "one run of each side"
    assert found.calls == ["mul.Tensor of the step itself (backward) on rank 0"]


def test_two_independent_defects_are_found_one_after_the_other_each_with_its_tensors(tmp_path: Path) -> None:
    culprit, found = Sides(tmp_path, step, lambda: step(scale=0.25, eps=1e-3)).verified()
    assert (culprit.call.operator, found.status) == ("mul.Tensor", "verified")
    [other] = found.causes
    assert other.call.startswith("native_layer_norm of the step itself (forward) on rank 0 has the same inputs")
    assert found.accounts + other.accounts == found.differing == 4


@pytest.mark.parametrize(
    ("options", "operator", "how"),
    [
        ({"eps": 1e-3}, "native_layer_norm", "computes"),
        ({"extra": True}, "tanh", "adds"),
        ({"missing": True}, "mul.Tensor", "lacks"),
        ({"activation": functional.relu}, "relu", "adds"),
    ],
    ids=["another argument", "an extra call", "a missing call", "another function"],
)
def test_each_kind_of_cause_is_verified_in_both_directions(
    tmp_path: Path, options: dict[str, Any], operator: str, how: str
) -> None:
    culprit, found = Sides(tmp_path, step, lambda: step(**options)).verified()
    assert (culprit.call.operator, culprit.how) == (operator, how)
    assert (found.status, found.reverse, found.remaining, found.reason) == ("verified", True, 0, None)


def test_what_cannot_be_exchanged_leaves_a_cause_verified_in_part_and_is_named(tmp_path: Path) -> None:
    """A forward call reads another tensor, so one add of backward is extra, and another is missing."""
    culprit, found = Sides(tmp_path, step, lambda: step(take_first=False)).verified()
    assert (culprit.call.operator, culprit.how, found.status, found.causes) == ("add.Tensor", "reads", "in part", [])
    assert 0 < found.remaining < found.differing and found.reason is not None


def in_place(factor: float = 2.0, second: float = 3.0) -> Mapping[str, Tensor]:
    """Calls in place, over lists, and over a view, and who reads their memory by another tensor."""
    x, y, z = (weight.detach() for weight in weights((4, 4), (4, 4), (8,)))
    torch._foreach_mul_([x, y], factor)
    z[2:5].mul_(second)
    return {"x": x + 1, "y": y + 1, "z": z + 1, "all": z.clone()}


@pytest.mark.parametrize("options", [{"factor": 2.5}, {"second": 3.5}], ids=str)
def test_what_calls_write_in_place_is_exchanged_where_it_is(tmp_path: Path, options: dict[str, float]) -> None:
    culprit, found = Sides(tmp_path, in_place, lambda: in_place(**options)).verified()
    assert culprit.call.operator in ("_foreach_mul_.Scalar", "mul_.Tensor")
    assert (found.status, found.reverse) == ("verified", True)


def test_a_wrong_view_is_exchanged_without_a_change_of_what_it_shows(tmp_path: Path) -> None:
    def part(begin: int) -> Mapping[str, Tensor]:
        [x] = weights((8, 4))
        return {"part": x.detach()[begin : begin + 4].exp(), "whole": x.detach().exp()}

    sides = Sides(tmp_path, lambda: part(0), lambda: part(4))
    _, found = sides.verified(sides.blamed("slice", how="reads"))
    assert (found.status, found.reverse, found.tensors) == ("verified", True, 2)


def test_an_extra_copy_does_not_hide_a_wrong_part_that_another_operator_takes(tmp_path: Path) -> None:
    """Without the copy the candidate would still read the second half of `y` in place of the first."""

    def part(is_candidate: bool) -> Mapping[str, Tensor]:
        [x] = weights((8, 4))
        y = x.detach().exp()
        read = y.split(4)[1].clone() if is_candidate else y[:4]
        return {"part": read.mul(2.0), "whole": y, "halves": y.reshape(2, 16).sum(0)}

    sides = Sides(tmp_path, lambda: part(False), lambda: part(True))
    _, found = sides.verified(sides.blamed("clone", how="adds"))
    assert found.status == "not verified", found


def test_a_draw_is_exchanged_with_the_state_that_it_leaves(tmp_path: Path) -> None:
    def draws(seed: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.randn(4, generator=generator), torch.randn(4, generator=generator)
        return {"first": first + 1, "second": second + 1}

    sides = Sides(tmp_path, lambda: draws(0), lambda: draws(1))
    culprit, found = sides.verified()
    assert (culprit.call.operator, found.status, found.reverse) == ("randn.generator", "verified", True)


def test_a_number_that_leaves_torch_is_exchanged(tmp_path: Path) -> None:
    def reads_out(factor: float) -> Mapping[str, Tensor]:
        [x] = weights((4,))
        number = (x.detach() * factor).sum().item()
        return {"y": torch.full((3,), number) + 1}

    sides = Sides(tmp_path, lambda: reads_out(1.0), lambda: reads_out(2.0))
    _, found = sides.verified(sides.blamed("_local_scalar_dense"))
    assert found.reason is not None and found.reason.startswith("it reads what sum of the step itself")
    _, found = sides.verified(sides.blamed("full"))
    assert found.reason is not None and found.reason.startswith("it is given a number that _local_scalar_dense")
    culprit, found = sides.verified(sides.blamed("mul"))
    assert (culprit.call.operator, found.status) == ("mul.Tensor", "verified")


def test_an_exchange_hides_no_defect_that_is_upstream_of_a_call_with_the_same_wrong_argument(tmp_path: Path) -> None:
    """The second scale reads what the wrong eps gives: it is exchanged only once that is right."""

    def twice(scale: float, eps: float) -> Mapping[str, Tensor]:
        [x] = weights((8, 16))
        h = functional.layer_norm(x.detach() * scale, (16,), eps=eps)
        return {"y": (h * scale).exp()}

    _, found = Sides(tmp_path, lambda: twice(0.5, 1e-5), lambda: twice(0.25, 1e-3)).verified()
    assert (found.status, len(found.causes)) == ("verified", 1)
    assert found.causes[0].call.startswith("native_layer_norm")


@pytest.mark.parametrize(
    ("operator", "turn", "reason"),
    [
        ("native_layer_norm", 0, "it reads what add.Tensor of the step itself (forward) gives, which the reference"),
        ("mm", 0, "what mm of the step itself (forward) gives is what its matching call gives"),
        ("silu", 0, "what silu of the step itself (forward) gives is what its matching call gives"),
        ("mm", 1, "it reads what mul.Tensor of the step itself (forward) gives, which the reference"),
    ],
)
def test_a_wrong_cause_is_not_verified(tmp_path: Path, operator: str, turn: int, reason: str) -> None:
    """Though with the reference's value in place of what a later call computes, all that follows is right."""
    sides = Sides(tmp_path, step, lambda: step(scale=0.25))
    _, found = sides.verified(sides.blamed(operator, turn))
    assert found.status == "not verified" and found.reason is not None and found.reason.startswith(reason)


def test_a_cause_that_is_not_needed_is_dropped_for_the_one_that_is(tmp_path: Path) -> None:
    """A call that differs and that no record depends on is no cause, though all is right after both exchanges."""

    def with_idle(idle: float, scale: float) -> Mapping[str, Tensor]:
        [x] = weights((8,))
        x.detach().add(idle).cos()
        return {"y": (x.detach() * scale).exp()}

    sides = Sides(tmp_path, lambda: with_idle(1.0, 2.0), lambda: with_idle(2.0, 4.0))
    pair = [sides.recordings[role].records[Key(0, "grad", "y", 0)].digest for role in ROLES]
    blamed = replace(sides.blamed("add"), explains=(0, pair[0], pair[1]))
    culprit, found = sides.verified(blamed)
    assert (culprit.call.operator, found.status, found.causes) == ("mul.Tensor", "verified", [])
    assert culprit.explains == (0, *pair), "a record as it is without exchanges"


@pytest.mark.parametrize("dtype_or_shape", ["float64[4, 4]", "float32[2, 8]"])
def test_a_value_of_another_type_is_not_exchanged(tmp_path: Path, dtype_or_shape: str) -> None:
    def typed(is_candidate: bool) -> Mapping[str, Tensor]:
        [x] = weights((4, 4))
        y = x.detach().exp()
        if is_candidate:
            y = y.double() if dtype_or_shape.startswith("float64") else y.reshape(2, 8)
        return {"y": y.mul(2.0) if is_candidate else y.mul(3.0)}

    sides = Sides(tmp_path, lambda: typed(False), lambda: typed(True))
    _, found = sides.verified(sides.blamed("_to_copy" if dtype_or_shape.startswith("float64") else "view", how="adds"))
    assert found.status == "not verified"
    assert found.reason is not None and found.reason.endswith(
        f"cannot be exchanged: {dtype_or_shape} stands there, and the value is float32[4, 4]"
    )
    assert found.runs == 0, "the logs show the types, so no run is needed to find them"


def test_a_value_of_another_type_is_followed_to_what_its_readers_give(tmp_path: Path) -> None:
    """A sum is rounded on the way: nothing of the same type stands there before it is cast back."""

    def rounded(is_candidate: bool) -> Mapping[str, Tensor]:
        [x] = weights((4, 4))
        y = x.detach().exp()
        return {"y": (y.bfloat16() + y.bfloat16()).float() if is_candidate else y + y}

    sides = Sides(tmp_path, lambda: rounded(False), lambda: rounded(True))
    culprit, found = sides.verified(sides.blamed("_to_copy", how="adds"))
    assert (culprit.call.operator, found.status, found.reverse, found.reason) == ("_to_copy", "verified", True, None)
    assert found.runs == 2, "one for each system"


def test_a_collective_is_not_to_blame_for_what_another_rank_gives_to_it() -> None:
    place = CallSite("", "forward")

    def side(sent: str, received: str) -> list[list[Call]]:
        kinds = {"collective": True, "peers": (1, 0)}
        send = Call(place, "send", (sent,), (), **kinds)
        return [[Call(place, "recv_", ("e",), (received,), **kinds)], [send]]

    reference, candidate = side("a", "a"), side("b", "b")
    logs = [CandidateLog(calls, ReferenceLog(known)) for calls, known in zip(candidate, reference, strict=True)]
    blamed = Culprit(how="computes", call=candidate[0][0], ranks=(0,), candidate=0, reference=0)
    text = wrong_input(blamed, logs)
    assert text.startswith("it brings what send of the step itself (forward) on rank 1 ")
    right = [CandidateLog(calls, ReferenceLog(calls)) for calls in reference]
    assert wrong_input(replace(blamed, call=reference[0][0]), right) == ""


@pytest.mark.parametrize(
    ("operator", "needed", "reason"),
    [("cast", "a", ""), ("cast", "b", "what cast of "), ("clone", "a", "what clone of ")],
)
def test_an_extra_call_with_a_right_value_may_be_a_cause_only_where_no_reader_needs_it(
    operator: str, needed: str, reason: str
) -> None:
    place = CallSite("", "forward")
    start = [Call(place, "mm", (x,), (y,), producers=(None,)) for x, y in zip("xy", "ab", strict=True)]
    known = [*start, Call(place, "mul", (needed,), ("c",), producers=("ab".index(needed),))]
    extra = Call(place, operator, ("k",), ("b",), producers=(None,))
    log = CandidateLog([*start, extra, Call(place, "mul", ("b",), ("C",), producers=(2,))], ReferenceLog(known))
    blamed = Culprit(how="adds", call=extra, ranks=(0,), candidate=2, reference=None)
    assert wrong_input(blamed, [log]).startswith(reason) and bool(wrong_input(blamed, [log])) == bool(reason)


def test_values_that_a_bucket_may_have_exchanged_are_no_misplaced_output() -> None:
    place = CallSite("", "backward")

    def call(operator: str, given: str, made: str, *producers: int | None) -> Call:
        return Call(place, operator, tuple(given), tuple(made), producers=producers)

    known = [call("reduce", "a", "r", None), call("reduce", "b", "s", None)]
    known += [call("add", "rk", "p", 0, None), call("add", "sk", "q", 1, None)]
    bucket = [call("cat", "ba", "P", None, None), call("gather", "P", "Q", 0)]
    bucket += [call("split", "Q", "sr", 1)._replace(view=True), call("add", "sk", "q", 2, None)]
    for calls, text in ((known, ""), ([*bucket, call("add", "rk", "p", 2, None)], "it reads what gather of ")):
        log = CandidateLog(calls, ReferenceLog(known))
        index = next(i for i, each in enumerate(calls) if each.outputs == ("q",))
        blamed = Culprit(how="misplaces", call=calls[index], ranks=(0,), candidate=index, reference=3)
        assert wrong_input(blamed, [log]).startswith(text) and bool(text) == bool(wrong_input(blamed, [log]))


def test_a_candidate_that_raises_with_exchanged_values_leaves_the_cause_unverified(tmp_path: Path) -> None:
    sides = Sides(tmp_path, step, lambda: step(scale=0.25))
    run = sides.run_replay

    def fails(role: Role, number: int, folder: Path, replay: Replay) -> str | None:
        if role == "candidate" and replay.exchanges:
            raise RankError("rank 0 raised ValueError: 0.125 is not 0.25")
        return run(role, number, folder, replay)

    sides.run_replay = fails  # type: ignore[method-assign]
    _, found = sides.verified()
    assert (found.status, found.remaining, found.reverse) == ("not verified", found.differing, None)
    assert found.reason == "a run with exchanged values failed: rank 0 raised ValueError: 0.125 is not 0.25"


def test_a_candidate_that_is_right_every_other_time_is_never_verified(tmp_path: Path) -> None:
    """The run with exchanged values is right by chance: the call gave the right value before anything was exchanged."""
    turns = itertools.count()

    def now_and_then() -> Mapping[str, Tensor]:
        return step(scale=0.25 if next(turns) < 2 else 0.125)  # what is recorded and what is logged differ

    _, found = Sides(tmp_path, step, now_and_then).verified()
    assert found.status == "not verified"
    assert found.reason is not None and found.reason.startswith("the candidate differs from itself")


def test_a_candidate_whose_noise_comes_before_the_exchange_is_never_verified(tmp_path: Path) -> None:
    turns = itertools.count()

    def noisy() -> Mapping[str, Tensor]:
        [x] = weights((8,))
        noise = x.detach() + float(next(turns))
        shown = step(scale=0.25)
        return {**shown, "noise": noise * 0}

    sides = Sides(tmp_path, lambda: {**step(), "noise": torch.zeros(8)}, noisy)
    _, found = sides.verified(sides.blamed("mul"))
    assert found.status == "not verified" and found.reason is not None
    assert found.reason.startswith("the candidate differs from itself")


def test_unwritten_memory_may_differ_between_two_runs_but_no_call_that_computes_with_it() -> None:
    place = CallSite("", "forward")

    def run(memory: str, computed: str) -> list[Call]:
        fills_a_part = Call(place, "all_gather_copy_in", ("w", memory), ("w", memory), producers=(None, None))
        return [fills_a_part, Call(place, "mm", ("w",), (computed,), producers=(0,))]

    assert unrepeated(run("m", "a"), run("n", "a"), ()) is None
    assert unrepeated(run("m", "a"), run("n", "b"), ()) == 1


def test_a_candidate_with_noise_after_the_exchange_is_not_verified(tmp_path: Path) -> None:
    """All is right by chance in the run with exchanged values; the reverse does not give the candidate's step."""
    turns = itertools.count()

    def noisy() -> Mapping[str, Tensor]:
        shown = step(scale=0.25)
        return {name: value + 1 if next(turns) < 8 else value + 0 for name, value in shown.items()}

    _, found = Sides(tmp_path, lambda: {name: value + 0 for name, value in step().items()}, noisy).verified()
    assert found.status != "verified"
    assert found.reason == "the reference with the candidate's value here does not give the candidate's step"


def test_a_wrong_parameter_is_one_cause_for_all_its_readers_views_included(tmp_path: Path) -> None:
    """Forward reads the parameter by a view, backward what forward saved, the update the parameter itself."""

    def trains(first: float) -> Mapping[str, Tensor]:
        w, x = weights((4, 6), (5, 6))
        w.data.view(-1).numpy()[0] = first
        (x @ w.t()).square().sum().backward()
        assert w.grad is not None
        with torch.no_grad():
            w.mul_(0.9).sub_(w.grad)
        return {"w": w.detach(), "grad": w.grad, "x": x.grad} if x.grad is not None else {}

    sides = Sides(tmp_path, lambda: trains(1.0), lambda: trains(2.0))
    verifier = sides.verifier()
    culprit, *_ = verifier.blamed(sides.recordings["candidate"], verifier.ready)
    assert culprit.how == "outside"
    cause, found = sides.verified(culprit)
    assert cause is culprit, "not a view that shows the value"
    assert (found.status, found.causes, found.runs) == ("verified", [], 2)


def test_an_extra_call_that_a_record_shows_is_verified_in_the_reverse_as_well(tmp_path: Path) -> None:
    """The reference's record shows the memory from which its next call reads, too."""

    def steps(factor: float | None, *, in_place: bool) -> Mapping[str, Tensor]:
        w, x = weights((4, 4), (5, 4))
        grad = (x.detach().t() @ x.detach()) @ w.detach()
        if factor is not None:
            grad = grad.mul_(factor) if in_place else grad * factor
        return {"grad": grad, "w": w.detach() - grad}

    for number, in_place in enumerate((False, True)):
        sides = Sides(
            tmp_path / str(number), lambda: steps(None, in_place=False), lambda put=in_place: steps(0.5, in_place=put)
        )
        culprit, found = sides.verified()
        assert culprit.call.operator.startswith("mul"), in_place
        assert (found.status, found.reverse, found.causes) == ("verified", True, []), (in_place, found)


@pytest.mark.parametrize(("right", "wrong"), [(1.0, 0.99), (0.99, 1.0)], ids=["extra in backward", "missing there"])
def test_a_backward_call_that_exists_for_a_wrong_argument_alone_is_of_one_cause(
    tmp_path: Path, right: float, wrong: float
) -> None:
    def adds(alpha: float) -> Mapping[str, Tensor]:
        w, x = weights((4, 4), (5, 4))
        y = x.sin().add(x @ w, alpha=alpha)
        y.square().sum().backward()
        return {"w": w.grad, "y": y.detach()} if w.grad is not None else {}

    culprit, found = Sides(tmp_path, lambda: adds(right), lambda: adds(wrong)).verified()
    assert (culprit.call.operator, found.status, found.causes) == ("add.Tensor", "verified", [])
    assert "mul.Scalar of the step itself (backward) on rank 0" in found.calls


def test_a_cause_that_suffices_alone_needs_none_that_only_mends_what_an_exchange_has_spoiled(tmp_path: Path) -> None:
    """The candidate computes `2 * x` as `8 * x / 4`, to the bit, and multiplies `x` in its place by the weight."""

    def steps(*, is_candidate: bool) -> Mapping[str, Tensor]:
        w, x = (each.detach() for each in weights((4, 4), (5, 4)))
        twice = x.mul(8).div(4) if is_candidate else x.mul(2)
        y = (x if is_candidate else twice) @ w
        return {"y": y, "more": twice.sin() @ w}

    sides = Sides(tmp_path, lambda: steps(is_candidate=False), lambda: steps(is_candidate=True))
    culprit, found = sides.verified()
    assert (culprit.call.operator, found.status, found.accounts, found.causes) == ("mm", "verified", 1, [])


def update(beta1: float = 0.9, eps: float = 1e-8, scale: float = 1.0) -> Mapping[str, Tensor]:
    """A layer's gradient, which may be scaled, and AdamW's update with it."""
    w, x = weights((16, 16), (8, 16))
    optimizer = torch.optim.AdamW([w], betas=(beta1, 0.999), eps=eps, foreach=False)
    (x @ w).square().mean().backward()
    assert w.grad is not None
    w.grad.mul_(scale)
    optimizer.step()
    state = optimizer.state[w]
    return {"w": w.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def beta1(found: str) -> list[DifferingSetting]:
    """The setting that differs."""
    numbers = [{"lr": 1e-3, "beta1": float(text), "beta2": 0.999} for text in (found, "0.9")]
    return [DifferingSetting("AdamW", "beta1", found, "0.9", ("w",), *numbers)]


def test_a_setting_of_an_optimizer_is_one_cause_for_all_calls_that_have_a_number_of_it(tmp_path: Path) -> None:
    candidate = partial(update, beta1=0.8)
    culprit, found = Sides(tmp_path, update, candidate, beta1("0.8")).verified()
    assert (culprit.call.operator, found.status, found.causes) == ("lerp_.Scalar", "verified", [])
    assert found.calls == ["addcdiv_ of the step itself (update, AdamW) on rank 0"]
    _, without = Sides(tmp_path / "without", update, candidate).verified()
    assert [cause.operator for cause in without.causes] == ["addcdiv_"], "without the setting there are two causes"


def test_a_setting_does_not_hide_another_defect_of_the_update(tmp_path: Path) -> None:
    candidate = partial(update, beta1=0.8, eps=1e-3)
    culprit, found = Sides(tmp_path, update, candidate, beta1("0.8")).verified()
    assert [culprit.call.operator, *(cause.operator for cause in found.causes)] == ["lerp_.Scalar", "add_.Tensor"]
    assert found.status == "verified"


@pytest.mark.parametrize(
    ("how", "inputs", "is_one"), [("lacks", "g", True), ("lacks", "h", False), ("adds", "g", False)]
)
def test_a_value_that_goes_another_way_is_one_cause(how: Any, inputs: str, is_one: bool) -> None:
    """A gradient `g` is added to another one, in place of a reduction that the reference makes of it."""

    def culprit(operator: str, how: Any, reads: str) -> Culprit:
        call = Call(CallSite(None, "backward"), operator, tuple(reads), ("out",))
        lacks = how == "lacks"
        return Culprit(how=how, call=call, ranks=(0,), candidate=None if lacks else 1, reference=1 if lacks else None)

    cause = Cause(culprit("add_.Tensor", "adds", "gk"), frozenset())
    assert cause.has(culprit("chunk_cat", how, inputs), frozenset()) is is_one


def rows_of_a_draw(*, is_extra: bool) -> Mapping[str, Tensor]:
    """Rows of a table, at places that a generator gives and `tolist` reads out, which is no call."""
    table, generator = weights((20, 4))[0], torch.Generator().manual_seed(4)
    if is_extra:
        torch.rand(1, generator=generator)
    places = torch.randperm(20, generator=generator)[:3].tolist()
    return {"rows": torch.stack([table[place] for place in places])}


def test_an_extra_draw_is_the_cause_of_the_rows_that_are_read_by_its_numbers(tmp_path: Path) -> None:
    sides = Sides(tmp_path, partial(rows_of_a_draw, is_extra=False), partial(rows_of_a_draw, is_extra=True))
    culprit, found = sides.verified()
    assert (culprit.how, culprit.call.operator, found.status) == ("adds", "rand.generator", "verified")


def test_calls_that_misread_their_inputs_in_the_same_way_are_one_cause() -> None:
    def reads(module: str, operator: str) -> Culprit:
        call = Call(CallSite(module, "backward"), operator, ("a", "b"), ("c",))
        return Culprit(how="reads", call=call, ranks=(0,), candidate=0, reference=0)

    cause = Cause(reads("layers.0", "mm"), frozenset(), {"another micro-batch"})
    assert cause.has(reads("layers.1", "add"), frozenset(), (), {"another micro-batch"})
    assert not cause.has(reads("layers.1", "add"), frozenset(), (), {"before the step"})
    assert not cause.has(reads("layers.1", "add"), frozenset())


def test_calls_of_one_operator_at_two_lines_of_an_update_are_two_causes() -> None:
    """Clipping multiplies all gradients, and a line behind it multiplies one of them: neither has a module."""

    def multiplied(line: int, direction: str = "update") -> Culprit:
        call = Call(CallSite(None, direction), "mul.Tensor", ("g",), ("h",), source=f"train.py:{line}")
        return Culprit(how="computes", call=call, ranks=(0,), candidate=0, reference=0)

    clipped = Cause(multiplied(140), frozenset())
    assert clipped.has(multiplied(140), frozenset()) and not clipped.has(multiplied(141), frozenset())
    assert Cause(multiplied(140, "forward"), frozenset()).has(multiplied(141, "forward"), frozenset())


def halved_in_place(factor: float | None) -> Mapping[str, Tensor]:
    """A gradient that no call reads."""
    w, x = weights((4, 4), (5, 4))
    grad = (x.detach().t() @ x.detach()) @ w.detach()
    return {"grad": grad if factor is None else grad.mul_(factor)}


def divided(by: float | None) -> Mapping[str, Tensor]:
    """The sum of two losses, each of them divided."""
    w, x = weights((4, 4), (5, 4))
    losses = [(x.detach() @ w.detach()).square().sum(), x.detach().sum()]
    return {"loss": torch.stack(losses if by is None else [loss / by for loss in losses]).sum()}


def drawn(extra: int) -> Mapping[str, Tensor]:
    """Random numbers, after some others."""
    torch.manual_seed(0)
    for _ in range(extra):
        torch.rand(3)
    return {"x": torch.randn(4).sin(), "y": torch.randn(4).cos()}


def decayed(factors: tuple[float, float]) -> Mapping[str, Tensor]:
    """Two weights of ones, each with its decay."""
    both = [torch.ones(4) for _ in factors]
    for weight, factor in zip(both, factors, strict=True):
        weight.mul_(factor)
    return {"first": both[0], "second": both[1]}


def rounded(rounds: bool) -> Mapping[str, Tensor]:
    """Two gradients, which may be rounded in place."""
    w, x = weights((4, 4), (5, 4))
    grads = [x.detach().t() @ x.detach(), w.detach().sin()]
    for grad in grads if rounds else ():
        grad.copy_(grad.bfloat16())
    return {"sum": (grads[0] + grads[1]).cos(), "w": w.detach() - grads[1]}


def multiplied(halves: bool) -> Mapping[str, Tensor]:
    """A product, which may be the sum of two products over halves of the inner dim."""
    (x, w) = (each.detach().sin() for each in weights((5, 64), (64, 4)))
    made = x[:, :32] @ w[:32] + x[:, 32:] @ w[32:] if halves else x @ w
    return {"y": made.sin(), "z": made.cos()}


def half(second: bool) -> Mapping[str, Tensor]:
    """Both halves of a tensor, of which the second may be the first again."""
    (x,) = (each.detach() for each in weights((4, 4)))
    parts = [x[:2], x[:2] if second else x[2:]] if second else [*x.split(2)]
    return {"first": parts[0].sin(), "second": parts[1].cos()}


FACTOR = [2.0]
"""What the kernel of `scaled` multiplies by: no log shows it."""


@torch.library.custom_op("bitproof_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * FACTOR[0]


def of_a_kernel(factor: float) -> Mapping[str, Tensor]:
    """Ten products, each of which a kernel scales."""
    (x, w) = (each.detach().sin() for each in weights((4, 4), (4, 4)))
    FACTOR[0] = factor
    return {f"y{i}": scaled(x @ w + i).cos() for i in range(10)}


def three(turned: bool) -> Mapping[str, Tensor]:
    """Three gradients, which may stand in each other's places, and what an update computes of each."""
    (x, w) = (each.detach().sin() for each in weights((4, 4), (4, 4)))
    made = [x @ w, x - w, x * w]
    grads = [*made[1:], made[0]] if turned else made
    found = {f"grad {i}": grad for i, grad in enumerate(grads)}
    return found | {f"param {i}": w.sub(grad, alpha=i + 1) for i, grad in enumerate(grads)}


def turned(turns: bool) -> Mapping[str, Tensor]:
    """A product as two squares, which may be transposed. Backward then transposes, copies and views."""
    (x, w) = weights((2, 4), (4, 9))
    squares = (x @ w).view(2, 3, 3)
    made = (squares.transpose(1, 2) if turns else squares).sin()
    made.backward(torch.arange(18.0).view(2, 3, 3).cos())
    assert x.grad is not None and w.grad is not None
    return {"made": made.detach(), "x": x.grad, "w": w.grad}


@pytest.mark.parametrize(
    ("step", "right", "wrong"),
    [
        (turned, False, True),
        (of_a_kernel, 2.0, 3.0),
        (three, False, True),
        (multiplied, False, True),
        (half, False, True),
        (halved_in_place, 0.5, None),
        (divided, 2.0, None),
        (drawn, 0, 1),
        (decayed, (0.9, 0.9), (0.9, 0.8)),
        (rounded, False, True),
    ],
    ids=[
        "behind a copy",
        "of one kernel, ten times",
        "in each other's places",
        "in two halves",
        "one half twice",
        "shown by a record alone",
        "two inputs of a call",
        "another state",
        "of equal inputs",
        "in place, twice",
    ],
)
def test_one_defect_is_one_verified_cause(tmp_path: Path, step: Any, right: Any, wrong: Any) -> None:
    _, found = Sides(tmp_path, partial(step, right), partial(step, wrong)).verified()
    assert (found.status, found.reason, found.causes) == ("verified", None, []), found


def test_calls_whose_exchange_mends_nothing_are_no_causes_though_each_mends_what_the_other_spoils(
    tmp_path: Path,
) -> None:
    (x, w) = (each.detach() for each in weights((4, 4), (4, 4)))

    def reference() -> Mapping[str, Tensor]:
        six, other = x * 6, x.neg()
        return {"y": six.div(w).sub(six), "other": other}

    def candidate() -> Mapping[str, Tensor]:
        twice, other = x * 2, x.neg()
        six = twice.add(twice, alpha=2)  # bit for bit x * 6 for these values
        return {"y": other.div(w).sub(six), "other": other}

    x = x.mul(8).round()
    sides = Sides(tmp_path, reference, candidate)
    culprit, found = sides.verified(sides.blamed("mul"))
    assert (culprit.call.operator, found.status, found.causes) == ("div.Tensor", "verified", [])


@pytest.mark.parametrize(("sent", "reason"), [("b", ""), ("B", "it reads what gather of ")])
def test_a_wrong_part_of_what_a_bucket_gathers_is_a_cause_if_every_rank_gave_right_values(
    sent: str, reason: str
) -> None:
    place, kinds = CallSite("", "forward"), {"collective": True, "peers": (0, 1)}

    def rank(own: str) -> list[Call]:
        gather = Call(place, "all_gather_into_tensor", ("P" + own,), ("Q",), producers=(0,), **kinds)
        return [Call(place, "cat", (own,), ("P" + own,), producers=(None,)), gather]

    roll = Call(place, "roll", ("Q",), ("R",), producers=(1,))
    known = [Call(place, "mm", (value,), (value + "w",), producers=(None,)) for value in "ab"]
    logs = [CandidateLog([*rank(own), roll], ReferenceLog(known)) for own in ("a", sent)]
    blamed = Culprit(how="adds", call=roll, ranks=(0,), candidate=2, reference=None)
    text = wrong_input(blamed, logs).replace("all_gather_into_tensor", "gather")
    assert text.startswith(reason) and bool(text) == bool(reason)
