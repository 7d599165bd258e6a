"""A certificate calls torch's operators with the arguments that their schemas have."""

from dataclasses import replace

import pytest
import torch

from bitproof.harness import certificate_checker as checker
from bitproof.harness.powers.proofs.prover.certify import certificate_of
from bitproof.harness.powers.proofs.prover.graphs import admitted
from tests.harness.certificate.samples import REJECTED, W, X, check, parts, said_of, whole
from tests.harness.certificate.signatures import operator_named, signature_of, table
from tests.harness.powers.proofs.toy_graphs import compare

WAIT = "_c10d_functional.wait_tensor.default"


@pytest.fixture(scope="module")
def certificate():
    return certificate_of("example", compare(parts, whole, W, X))


def changed(certificate, op, change):
    """The certificate with other arguments in each call of an operator."""

    def graph(of):
        calls = (replace(call, args=tuple(change(call.args))) if call.op == op else call for call in of.calls)
        return replace(of, calls=tuple(calls))

    found = replace(certificate, reference=graph(certificate.reference), candidate=graph(certificate.candidate))
    assert found != certificate
    return found


def test_the_table_says_what_torchs_schemas_say():
    written = [*checker.TAKES.items()]
    known = {name: operator_named(name) for name, _ in written if name not in checker.WORDS_TAKE}
    schemas = {name: signature_of(name, operator).split() for name, operator in known.items() if operator is not None}
    assert len(schemas) > 1500
    unlike = {
        name: (schemas[name], takes)
        for name, takes in written
        if name in schemas
        and takes != ({x for x in schemas[name] if not x.endswith("?")}, {x.rstrip("?") for x in schemas[name]})
    }
    assert not unlike
    if torch.__version__.startswith("2.13"):  # other releases lack operators, or have more
        expected = table()
        assert checker.SIGNATURES.strip("\n") == expected, "run python -m tests.harness.certificate.signatures"


def test_each_operator_that_a_proof_admits_is_in_the_table():
    names = {name for name in admitted.names() if operator_named(name) is not None}
    assert {name for name in names if name not in checker.TAKES} == {x for x in names if x.startswith(checker.REFUSED)}


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (WAIT, lambda args: [*args, ("alpha", 1)]),
        (WAIT, lambda args: [("alpha", 1), *args]),
        (WAIT, lambda args: [("self", x) for _, x in args]),
        (WAIT, lambda args: []),
        ("view", lambda args: [("tensor", x) for _, x in args]),
        ("view", lambda args: [*args, ("dim", 0)]),
        ("view", lambda args: []),
        ("aten.mm.default", lambda args: args[:1]),
        ("aten.mm.default", lambda args: [*args, ("out", args[0][1])]),
        ("aten.rand_like.default", lambda args: [*args, ("p", ("float", "0x1p-1"))]),
        ("aten.clone.default", lambda args: [*args, ("non_blocking", ("none",))]),
    ],
)
def test_a_call_with_arguments_that_no_schema_has_is_rejected(certificate, op, change):
    assert said_of(certificate) == {"PROVED": 5}
    assert said_of(changed(certificate, op, change)) == REJECTED


def test_the_rejection_names_the_call_and_its_arguments(certificate):
    forged = changed(certificate, WAIT, lambda args: [*args, ("alpha", 1)])
    with pytest.raises(checker.RejectedError) as raised:
        check(forged)
    assert str(raised.value) == f"wait_tensor: {WAIT} has no such arguments: tensor, alpha"


def test_an_operator_of_torch_that_no_proof_admits_is_rejected():
    assert not checker.fits("aten._cudnn_rnn.default", ["input"])
    assert not checker.fits("aten.no_such_operator.default", ["self"])


def test_a_users_operator_may_have_any_arguments():
    assert checker.fits("mine.scaled.default", ["x", "alpha"])


def test_a_python_call_on_numbers_takes_one_number_or_two():
    assert checker.fits("python.mul", ["0", "1"]) and checker.fits("python.neg", ["0"])
    assert not checker.fits("python.mul", ["0", "2"]) and not checker.fits("python.mul", ["0", "1", "2"])


def test_a_view_has_one_name_for_its_tensor_whatever_the_operator_calls_it():
    """prims.split_dim calls its tensor `a`."""

    def split(w, x):
        return (torch.ops.prims.split_dim(w * x, 0, 2) * 2,)

    def viewed(w, x):
        return ((w * x).view(2, 2, 6) * 2,)

    assert said_of(certificate_of("example", compare(split, viewed, W, X))) == {"PROVED": 1}
