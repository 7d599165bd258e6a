"""One-layer models on two ranks, proved whole."""

import functools
from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism, Precision
from bitproof.harness.certificate_checker import ASSUMPTIONS
from bitproof.harness.errors import PassError
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.powers.proofs.command import _lines as command_lines
from bitproof.harness.powers.proofs.prover import pairs
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.certify import assumed
from bitproof.harness.powers.proofs.prover.prove import NOT_TRIED, prove_case
from bitproof.harness.powers.proofs.prover.rules import RULES
from tests.harness.powers.proofs.test_rules import REAL, REGROUPING

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
    own = pairs.same_bits
    monkeypatch.setattr(pairs, "same_bits", lambda x, y: own(x, y) and x.dim() > 0)  # the loss is a scalar
    found = prove_case(small("moe_seq"))
    assert (found.verdict, found.evaluated, found.not_evaluated) == ("REFUSED", 18, None)
    [refused] = [answer for answer in found.proof.answers if answer.verdict == "REFUSED"]
    assert (refused.output, refused.reason) == ("loss", pairs.OTHER_BITS)


@pytest.mark.slow
def test_assumptions_are_listed_where_they_are_made():
    lists = {}
    for name in ("moe_seq", "experts_seq_bucketed"):
        found = proved(name)
        lists[name] = assumed(found.graphs, found.proof.table.used())
    [buckets] = set(lists["experts_seq_bucketed"]) - set(lists["moe_seq"])
    assert "ascending ranks" in buckets
    of_update = {text for name, text in ASSUMPTIONS if name.startswith("_fused_adam")}
    assert {*lists["moe_seq"], buckets} == {text for _, text in ASSUMPTIONS} - of_update and len(of_update) == 1


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


@pytest.mark.slow
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


@pytest.mark.slow
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


PASSES = """
import operator
import torch
from torch import Tensor
aten = torch.ops.aten

def outputs(module):
    return module.graph.output_node()

def fails_on_values(module):
    out = outputs(module)
    loss, first, *rest = out.args[0]
    with module.graph.inserting_before(out):
        index = module.graph.call_function(aten.full.default, ([1], 10**6), {"dtype": torch.int64})
        rows = module.graph.call_function(aten.index_select.default, (first, 0, index))
        none = module.graph.call_function(aten.slice.Tensor, (rows, 0, 0, 0))
        first = module.graph.call_function(aten.cat.default, ([first, none],))
    out.args = ((loss, first, *rest),)

def columns(module):
    out, new = outputs(module), []
    with module.graph.inserting_before(out):
        for x in out.args[0]:
            if x.meta["val"].dim() == 2:
                x = module.graph.call_function(aten.t.default, (x,))
                x = module.graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
                x = module.graph.call_function(aten.t.default, (x,))
            new.append(x)
    out.args = (tuple(new),)

def no_mkldnn(module):
    torch.backends.mkldnn.enabled = False

@torch.library.custom_op("bitproof_test_prove::peek", mutates_args=())
def peek(x: Tensor) -> Tensor:
    x.add_(1)
    return x.new_zeros(0)

@peek.register_fake
def _(x):
    return x.new_empty(0)

def hidden_write(module):
    held = next(n for n in module.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (8,))
    out = outputs(module)
    loss, first, *rest = out.args[0]
    with module.graph.inserting_before(out):
        none = module.graph.call_function(torch.ops.bitproof_test_prove.peek.default, (held,))
        flat = module.graph.call_function(aten.view.default, (first, [-1]))
        cast = module.graph.call_function(aten._to_copy.default, (none,), {"dtype": first.meta["val"].dtype})
        both = module.graph.call_function(aten.cat.default, ([flat, cast],))
        first = module.graph.call_function(aten.view.default, (both, list(first.meta["val"].shape)))
    out.args = ((loss, first, *rest),)
"""


@pytest.fixture
def with_pass(tmp_path):
    file = tmp_path / "passes.py"
    file.write_text(PASSES)
    return lambda name, **options: prove_case(
        small("moe_seq"), GraphOptions(extra_passes=(f"{file}:{name}",)), **options
    )


def test_a_call_that_passes_on_fake_values_and_fails_on_real_ones_is_refused_naming_it(with_pass):
    found = with_pass("fails_on_values")
    assert (found.verdict, found.proof) == ("REFUSED", None)
    assert found.reason.startswith("a call that passes on fake values and fails on real ones: IndexError")
    assert "index_select" in found.reason


def test_an_input_that_a_users_operator_writes_unsaid_is_refused(with_pass):
    found = with_pass("hidden_write")
    assert found.verdict == "REFUSED"
    [refused] = [answer for answer in found.proof.answers if answer.verdict == "REFUSED"]
    assert refused.output.startswith("written ")
    assert refused.reason == "the candidate leaves other bits in it when it runs, and no call says that it writes it"


def test_gradients_that_lie_otherwise_are_proved_and_reported(with_pass):
    found = with_pass("columns", evaluate=False)
    assert found.verdict == "PROVED"
    otherwise = found.proof.laid_out_otherwise
    assert otherwise and all(name.startswith("gradient of ") for name in otherwise)
    lines = command_lines(found)
    assert any(
        f"laid out otherwise in memory, which what follows the step may depend on ({len(otherwise)}):" in x
        for x in lines
    )
    assert any("in the reference, strides [1, " in line for line in lines)
    assert not proved("moe_seq").proof.laid_out_otherwise


def test_a_pass_that_switches_something_off_for_the_process_is_named_and_it_is_on_again(with_pass):
    with pytest.raises(PassError, match=r"pass no_mkldnn changes .*mkldnn_enabled True -> False"):
        with_pass("no_mkldnn", evaluate=False)
    assert torch.backends.mkldnn.enabled
