"""What a user's factory may return, and how what it shows is checked and named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.verdict import RACES
from bitproof.harness.errors import CaseError, RecordingError, UsageError
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Verdict
from bitproof.harness.systems.user_system import UserSystem
from tests.hosts import one_host

TOYS = "tests.harness.toy_systems:"
X = torch.ones(2)


def made(step, names=None):
    """A system, and what it shows at step 7."""
    shown = []
    system = UserSystem("mine", step, names=names or {}, origin={})
    system.step(7, lambda kind, name, tensor: shown.append((kind, name, tensor.tolist())))
    return shown


class Generating:
    def step(self, index):
        x = torch.full((1,), float(index))
        yield "grad", "w", x
        x.zero_()
        yield ["param", "w", x]


class Observing:
    def step(self, index, observe):
        for shown in Generating().step(index):
            observe(*shown)


@pytest.mark.parametrize("system", [Generating(), Observing(), Generating().step, Observing().step])
def test_a_system_yields_or_observes_with_or_without_an_object_and_is_read_at_once(system):
    assert made(system) == [("grad", "w", [7.0]), ("param", "w", [0.0])]


@pytest.mark.parametrize(
    ("shown", "found", "expected"),
    [
        (
            [("weight", "w", X)],
            "('weight', 'w', Tensor)",
            "a kind among loss, grad, param, buffer, optimizer, grad_norm, activation, rng",
        ),
        ([("grad", 3, X)], "('grad', int, Tensor)", "a text as name"),
        ([("grad", "", X)], "('grad', '', Tensor)", "a text as name"),
        ([("grad", "w", 1.5)], "('grad', 'w', float)", "a tensor"),
        ([("grad", "w", None)], "('grad', 'w', NoneType)", "a tensor"),
        ([("grad", X)], "('grad', Tensor)", "a kind, a name and a tensor"),
        ([X], "(Tensor)", "a kind, a name and a tensor"),
        ([("grad", "w", X), ("param", "w", X), ("grad", "w", X)], "grad 'w' twice", "each name once a step"),
        ([], "nothing", "a loss, gradients, parameters and optimizer state"),
    ],
)
def test_what_is_no_value_under_a_name_of_its_own_is_refused(shown, found, expected):
    with pytest.raises(RecordingError) as error:
        made(lambda index: shown)
    assert str(error.value) == f"RecordingError: system mine showed {found} in step 7\n  expected: {expected}"


def test_a_generator_that_takes_observe_shows_nothing():
    def step(index, observe):
        yield "grad", "w", X

    with pytest.raises(RecordingError, match="showed nothing in step 7"):
        made(step)


WATCH = (
    "return the loss from step, and bitproof.watch(step, model=..., optimizer=...) from the factory: it shows the rest"
)


@pytest.mark.parametrize(
    ("returned", "said"),
    [(None, "None"), (X.sum(), "a Tensor"), (X, "a Tensor"), (1.5, "a float"), (X.sum, "a builtin")],
)
def test_a_step_that_returns_instead_of_yielding_is_refused_with_the_way_to_watch_it(returned, said):
    with pytest.raises(RecordingError) as error:
        made(lambda index: returned)
    assert str(error.value).startswith(f"RecordingError: system mine showed nothing: step(7) returned {said}")
    assert str(error.value).endswith(
        f" in step 7\n  expected: step(index) to yield a kind, a name and a tensor for each value\n  fix: {WATCH}"
    )


MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("returned", "what", "fix"),
    [
        (None, "None", f"end the factory with `return`, such as `return system`; to show a trainer's values, {WATCH}"),
        (MODEL, "a model (Linear)", f"wrap it in bitproof.watch: {WATCH}"),
        (torch.optim.SGD(MODEL.parameters(), lr=0.1), "an optimizer (SGD)", WATCH),
        (Generating, "the class Generating", "return an object of it: Generating(...)"),
    ],
)
def test_a_factory_that_returns_what_trains_nothing_is_refused_by_name(returned, what, fix):
    with pytest.raises(UsageError) as error:
        made(returned)
    assert str(error.value) == (
        f"UsageError: the factory of system mine returned {what}, which trains nothing\n"
        "  expected: an object with step(index, observe), or with a generator step(index), or such a function\n"
        f"  fix: {fix}"
    )


def test_a_model_with_a_step_of_its_own_is_a_system():
    class Trained(Generating, torch.nn.Module):
        pass

    assert made(Trained()) == [("grad", "w", [7.0]), ("param", "w", [0.0])]


@pytest.mark.parametrize("nothing", [(MODEL, 1), 3, lambda: [], lambda a, b, c: []])
def test_what_takes_no_steps_is_refused(nothing):
    with pytest.raises(UsageError) as error:
        made(nothing)
    assert str(error.value) == (
        "UsageError: the factory of system mine returned something that takes no steps\n"
        "  expected: an object with step(index, observe), or with a generator step(index), or such a function\n"
        f"  found: {type(nothing).__name__}\n"
        f"  fix: {WATCH}"
    )


def test_given_names_stand_in_place_of_declared_ones():
    system = Generating()
    system.names = {"w": "declared"}
    assert [name for _, name, _ in made(system)] == ["declared"] * 2
    assert [name for _, name, _ in made(system, {"*": "given.*"})] == ["given.w"] * 2


def test_two_names_that_become_one_are_refused():
    values = [("grad", "a.w", X), ("param", "b.w", X), ("grad", "b.w", X)]
    with pytest.raises(RecordingError) as error:
        made(lambda index: values, {"a.*": "*", "b.*": "*"})
    assert str(error.value) == (
        "RecordingError: system mine showed grad 'w' from 'a.w' and from 'b.w', which its names map to one in step 7\n"
        "  expected: each name once a step"
    )


def toy(candidate, **changes):
    case = Case(
        name=candidate,
        family="toy",
        reference=TOYS + "steady",
        candidate=TOYS + candidate,
        steps=3,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    return replace(case, **changes)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    cases = [toy(name) for name in ("named", "stranger", "stale", "skipping")]
    cases += [toy("freeing", reference=TOYS + "freeing")]
    cases += [toy(name, reference=TOYS + "shown") for name in ("shown", "shown_racing")]
    with one_host():
        results = list(run_cases(cases, RunOptions(device="cpu", timeout=60.0), folder))
    return folder, {result.case.name: result for result in results}


@pytest.mark.ranks
def test_the_graph_that_a_system_shows_is_no_equal_where_it_reads_a_copy_before_its_wait(batch):
    _, results = batch
    assert (results["shown"].verdict, results["shown"].error) == (Verdict.EQUAL, None)
    assert (results["shown_racing"].verdict, results["shown_racing"].error) == (
        Verdict.UNVERIFIED,
        f"{RACES}\n  `sum_1` reads what `reload` brings, before anything waits for it: `sum_1` is sum in no module "
        "(forward), `reload` is bitproof.reload in no module (forward); memory of `reload`; missing: "
        "bitproof.wait_reload of `reload` before `sum_1`",
    )


@pytest.mark.ranks
def test_a_generator_with_declared_names_is_equal_and_its_manifest_has_them(batch):
    folder, results = batch
    result = results["named"]
    assert (result.verdict, result.error, result.compared["grad"]) == (Verdict.EQUAL, None, 6)
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("recordings/named/*/manifest.json"))]
    assert [manifest["ranks"] for manifest in manifests if manifest["arm"] == "first"] == [
        [{"names": {"model.*": "*"}}] * 2,
        [{"data_sha256": "toy0"}, {"data_sha256": "toy1"}],
    ]


@pytest.mark.ranks
def test_names_that_do_not_pair_are_unverified_and_the_text_says_how_to_declare_them(batch):
    result = batch[1]["stranger"]
    assert result.verdict == Verdict.UNVERIFIED
    assert (
        "only the reference has grad weight; only the candidate has grad model.weight; "
        "names are never guessed: if these are the same, say so as `names` of the system, or with --names FILE"
    ) in result.error


@pytest.mark.ranks
def test_a_rule_that_no_rank_used_is_unverified(batch):
    result = batch[1]["stale"]
    assert (result.verdict, result.error) == (
        Verdict.UNVERIFIED,
        "RecordingError: names that system tests.harness.toy_systems:stale declares never appeared\n"
        "  expected: each rule to translate a name that some rank shows\n"
        "  found: 'gone'\n"
        "  fix: take the rules out, or mend them",
    )


@pytest.mark.ranks
def test_a_system_that_shows_nothing_once_is_an_error_that_names_the_step(batch):
    result = batch[1]["skipping"]
    assert result.verdict == Verdict.ERROR
    assert "rank 1 of tests.harness.toy_systems:skipping raised at step 2" in result.error
    assert "showed nothing in step 2" in result.error


@pytest.mark.ranks
def test_a_storage_may_be_freed_after_it_was_read(batch):
    assert (batch[1]["freeing"].verdict, batch[1]["freeing"].error) == (Verdict.EQUAL, None)


@pytest.mark.ranks
def test_names_from_the_command_line_pair_a_faulty_candidate_and_its_culprit_is_found(tmp_path, one_host):
    options = RunOptions(
        device="cpu",
        inject="flip-bit:grad=weight,rank=1,step=1",
        names={"model.weight": "weight", "*.moment": "*.m"} | {"model.weight.moment": "weight.moment"},
    )
    [result] = run_cases([toy("stranger")], options, tmp_path)
    assert (result.verdict, result.error.split("\n")[0]) == (
        Verdict.UNVERIFIED,
        f"RecordingError: names that system {TOYS}stranger declares never appeared",
    )
    options = replace(options, names={"model.*": "*"})
    [result] = run_cases([toy("stranger")], options, tmp_path / "again")
    first = result.first_divergence
    assert (result.verdict, result.differing_kinds) == (Verdict.DIFFERENT, ("grad", "param", "optimizer"))
    assert (first.step, first.rank, first.kind, first.name) == (1, 1, "grad", "weight")
    assert (first.tensor.elements_differing, first.tensor.max_ulp, first.call.operator) == (1, 1, "bitwise_xor_.Scalar")
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}


@pytest.mark.ranks
def test_names_for_a_built_in_candidate_are_refused_before_anything_runs(tmp_path):
    case = Case(name="plain", family="x", reference="eager")
    with pytest.raises(CaseError) as error:
        run_cases([case], RunOptions(names={"a": "b"}), tmp_path)
    assert str(error.value) == (
        "CaseError: the candidate of case plain has the reference's own names, so it has none to map\n"
        "  expected: a candidate of your own: --names maps the candidate's names alone\n"
        "  found: candidate graph\n"
        "  fix: leave the case out with -k, or give --candidate"
    )
    assert list(tmp_path.iterdir()) == []
