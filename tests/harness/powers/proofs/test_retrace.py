from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Model, Parallelism
from bitproof.harness.certificate_checker import RejectedError
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.proofs.prover import retrace
from bitproof.harness.powers.proofs.prover.certify import certificate_of, contents_of, subject_of
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.prove import CaseProof, prove_case
from tests.harness.certificate.samples import parsed
from tests.harness.powers.proofs.toy_graphs import compare, randn

W, X = randn(4, 6), randn(4, 6)
CASE = Case(name="same", family="test", reference="eager", candidate="graph")


@pytest.fixture
def certificate():
    proof = compare(lambda w, x: w + x, lambda w, x: x + w, W, X)
    return certificate_of("same", proof, subject_of(CASE, proof))


@pytest.fixture
def anew(monkeypatch, certificate):
    """The graphs that the case gives when it is traced: a test may exchange one."""
    found = {"graphs": (certificate.reference, certificate.candidate)}
    monkeypatch.setattr(
        retrace,
        "prove_case",
        lambda *_, **__: CaseProof("PROVED", graphs=found["graphs"], reason="no reason", case=CASE),
    )
    return found


def retrace_of(certificate, case, **options):
    main, *graphs, _ = parsed(contents_of(certificate))
    retrace.check_retraced(main, graphs, case, **options)


def check(certificate, **options):
    retrace_of(certificate, CASE, **options)


def test_graphs_that_the_case_gives_are_accepted(certificate, anew):
    check(certificate)


def test_places_in_source_are_for_readers(certificate, anew):
    calls = tuple(replace(call, place=("elsewhere", None, None, None)) for call in certificate.candidate.calls)
    check(replace(certificate, candidate=Graph(calls, certificate.candidate.outputs)))


def test_a_candidate_that_is_the_reference_is_rejected_by_its_first_other_call(certificate, anew):
    with pytest.raises(
        RejectedError,
        match=r"call 2 of the candidate, aten.add.Tensor `add`: "
        r'args \[\["self", \["node", 0\]\], \["other", \["node", 1\]\]\]'
        r' is \[\["self", \["node", 1\]\], \["other", \["node", 0\]\]\] when made again$',
    ):
        check(replace(certificate, candidate=certificate.reference))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda graph: Graph(graph.calls[:-1], graph.outputs), "the reference has 2 calls, and 3 when made again"),
        (lambda graph: Graph(graph.calls, (("out 0", 1),)), "the reference returns other calls than when made again"),
        (
            lambda graph: Graph((graph.calls[0], *graph.calls), graph.outputs),
            'call 1 of the reference, input `parameter 0`: name "parameter 0" is "input 0" when',
        ),
    ],
)
def test_a_graph_of_other_calls_or_outputs_is_rejected(certificate, anew, change, reason):
    with pytest.raises(RejectedError, match=reason):
        check(replace(certificate, reference=change(certificate.reference)))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("code", "0" * 64, "its graphs cannot be made again here: made with code 0{64}, here is [0-9a-f]{64}$"),
        ("torch", "2.12.0", "its graphs cannot be made again here: made with torch 2.12.0, here is "),
        ("machine", "riscv", "its graphs cannot be made again here: made with a machine of kind riscv, here is "),
    ],
)
def test_what_was_made_by_other_code_another_torch_or_elsewhere_is_rejected(certificate, anew, field, value, reason):
    changed = replace(certificate, subject=replace(certificate.subject, **{field: value}))
    with pytest.raises(RejectedError, match=reason):
        check(changed)


def test_a_pass_that_a_certificate_names_is_not_run_and_asked_for(certificate, anew):
    subject = replace(certificate.subject, extra_passes=("evil.py:f",))
    with pytest.raises(UsageError, match="was made with other options") as found:
        check(replace(certificate, subject=subject))
    assert (found.value.expected, found.value.found) == ("--extra-pass evil.py:f", "none")


@pytest.mark.parametrize(("place", "part"), [*enumerate(["name", "op", "args", "value", "writes", "random"])])
def test_whatever_part_of_a_call_was_changed_is_named(certificate, anew, place, part):
    main, *graphs, _ = parsed(contents_of(certificate))
    graphs[0]["calls"][-1][place] = ["other"]
    with pytest.raises(
        RejectedError, match=rf'^call 2 of the reference, .*: {part} \["other"\] is .* when made again$'
    ):
        retrace.check_retraced(main, graphs, CASE)


def test_a_case_that_gives_no_graphs_is_rejected(certificate, anew):
    anew["graphs"] = None
    with pytest.raises(RejectedError, match="its case gives no graphs: no reason"):
        check(certificate)


def test_what_was_proved_with_a_precompiled_step_is_retraced_with_one(certificate, anew):
    subject = replace(certificate.subject, precompiled=1)
    with pytest.raises(UsageError, match="was made with other options") as found:
        check(replace(certificate, subject=subject))
    assert found.value.expected == "--precompiled DIR"


@pytest.mark.traces
@pytest.mark.slow
def test_a_case_is_traced_anew_and_another_number_of_layers_is_seen():
    small = Model(layers=1, dense_layers=0)
    case = replace(CASES["moe_seq"], model=small, parallelism=Parallelism(world_size=2))
    found = prove_case(case, evaluate=False)
    certificate = certificate_of(case.name, found.proof, subject_of(case, found.proof))
    retrace_of(certificate, case)
    with pytest.raises(RejectedError, match="when made again"):
        retrace_of(certificate, replace(case, model=Model(layers=2, dense_layers=0)))
