"""One-layer models on two ranks, proved whole."""

import functools
from dataclasses import replace

import pytest

from cases import CASES
from harness.case import Parallelism, Precision
from harness.certificate.assumptions import ASSUMPTIONS, assumed
from harness.graph.options import GraphOptions
from harness.prove import prove
from harness.prove.answers import prove_graphs
from harness.prove.prove import NOT_TRIED, prove_case
from harness.prove.rules import RULES
from tests.harness.prove.test_rules import REAL, REGROUPING

pytestmark = pytest.mark.traces


def small(name, **changes):
    """A case with one MoE layer on two ranks."""
    case = CASES[name]
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=Parallelism(world_size=2, ep=2), **changes)


@functools.cache
def proved(name):
    return prove_case(small(name), evaluate=False)


@pytest.mark.slow  # by day the command proves moe_seq, and computes it
@pytest.mark.parametrize("name", ["transformer_batch", "moe_seq", "experts_seq_bucketed"])
def test_every_output_is_proved(name):
    found = proved(name)
    assert found.verdict == "PROVED"
    assert len(found.proof.answers) == 19
    assert [answer.output for answer in found.proof.answers if answer.output.startswith("written")] == [
        "written buffer layers.0.moe.tokens_per_expert"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer_batch", "moe_batch", "moe_seq"])
@pytest.mark.parametrize("world_size", [4, 8, 16, 32, 64])
def test_every_output_is_proved_on_any_number_of_ranks(name, world_size):
    case = replace(small(name), parallelism=Parallelism(world_size=world_size, ep=2))
    found = prove_case(case, evaluate=False)
    assert (found.verdict, found.proof.count("PROVED")) == ("PROVED", 19)


def test_terms_are_computed_and_one_with_other_bits_than_the_graphs_is_refused_loudly(monkeypatch):
    own = prove.same_bits
    monkeypatch.setattr(prove, "same_bits", lambda x, y: own(x, y) and x.dim() > 0)  # the loss is a scalar
    found = prove_case(small("moe_seq"))
    assert (found.verdict, found.evaluated, found.not_evaluated) == ("REFUSED", 18, None)
    [refused] = [answer for answer in found.proof.answers if answer.verdict == "REFUSED"]
    assert (refused.output, refused.reason) == ("loss", prove.OTHER_BITS)


@pytest.mark.slow
def test_assumptions_are_listed_where_they_are_made():
    lists = {}
    for name in ("moe_seq", "experts_seq_bucketed"):
        found = proved(name)
        lists[name] = assumed(found.graphs, found.proof.table.used())
    [buckets] = set(lists["experts_seq_bucketed"]) - set(lists["moe_seq"])
    assert "ascending ranks" in buckets
    assert {*lists["moe_seq"], buckets} == {text for _, text in ASSUMPTIONS}


def test_early_accumulation_is_not_proved_and_the_moved_additions_are_shown():
    found = proved("early_accumulation")
    assert found.verdict == "NOT PROVED"
    [answer] = [a for a in found.proof.answers if a.output == "gradient of layers.0.attention.wq.weight"]
    [late], [early] = answer.finding.moved
    assert (late.operator, late.shape, late.module) == ("aten.add.Tensor", ("32", "64"), None)
    assert (early.operator, early.shape, early.module) == ("aten.add.Tensor", ("64", "64"), "layers.0.attention.wq")
    assert early.direction == "backward"


def test_rules_about_real_numbers_would_prove_early_accumulation():
    found = proved("early_accumulation")
    assert (found.verdict, found.proof.count("PROVED")) == ("NOT PROVED", 5)
    assert prove_graphs(*found.graphs).verdict == "NOT PROVED"
    assert prove_graphs(*found.graphs, rules=RULES | REAL).verdict == "PROVED"


@pytest.mark.slow
def test_where_nothing_is_cast_regrouped_additions_alone_would_prove_early_accumulation():
    found = prove_case(small("early_accumulation", precision=Precision(compute="float32")), evaluate=False)
    assert (found.verdict, found.proof.count("PROVED")) == ("NOT PROVED", 5)
    assert prove_graphs(*found.graphs, rules=RULES | REGROUPING).verdict == "PROVED"


def test_chunks_are_not_proved_against_the_whole_and_operators_on_halves_are_named():
    found = proved("chunked_vs_unchunked")
    assert found.verdict == "NOT PROVED"
    assert {"mm", "mean.dim", "rsqrt"} <= set(found.proof.row_splits)


def test_a_defect_of_a_users_pass_is_not_proved(tmp_path):
    file = tmp_path / "defect.py"
    file.write_text(
        "import torch\n\ndef double(module, context):\n"
        "    adds = [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor]\n"
        "    adds[-1].args = (adds[-1].args[0], adds[-1].args[0])\n    return module\n"
    )
    found = prove_case(small("moe_seq"), GraphOptions(extra_passes=(f"{file}:double",)), evaluate=False)
    assert found.verdict == "NOT PROVED"


def test_any_prefix_of_the_column_can_be_proved():
    case = small("unchunked")
    case = replace(case, pipeline=replace(case.pipeline, until="clean_up"))
    assert prove_case(case, evaluate=False).verdict == "PROVED"


def test_what_is_compiled_or_not_a_graph_is_not_tried():
    compiled = prove_case(CASES["inductor_dense"])
    assert (compiled.verdict, compiled.proof) == (NOT_TRIED, None)
    assert "--until concretize_symbols" in compiled.reason
    assert prove_case(replace(small("moe_seq"), candidate="mine.py:make")).reason == (
        "system mine.py:make is not known as a graph"
    )
