"""The CUDA lane at its smallest: one case, one layer, two ranks, one step. `make cuda-lane` runs every graph case."""

from __future__ import annotations

import itertools
import json
import operator
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from bitproof.builtin_cases import (
    CASES,
    accumulation,
    autoplace,
    context_parallel,
    joint,
    loss_pieces,
    optimizers,
    pipelines,
    precompiled,
    published,
    regional,
    resume,
    trainers,
    two_layouts,
)
from tests.cuda_lane import captures, stand_in
from tests.cuda_lane.run import LANE_FILE
from tests.cuda_lane.selection import costs, every_graph_case, slice_of, step_of, traced_cases, traced_step
from tests.cuda_lane.to_cpu import efficient, host_waits, map_to_cpu

ROOT = Path(__file__).parents[2]
LANE = Path(__file__).with_name("run.py")
DEFECT = f"{Path(__file__).with_name('defects.py')}:forget_causality"
EIGHT = "0,1,2,3,4,5,6,7"
PARTS = [f"{index}/8" for index in range(1, 9)]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if problem := stand_in.why_not():
        pytest.skip(problem)


def small(case):
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=replace(case.parallelism, world_size=2), steps=1)


@pytest.fixture(scope="module")
def case_file(tmp_path_factory):
    """blocks_batch_offload in small: attention, experts, and copies to pinned memory and back."""
    file = tmp_path_factory.mktemp("case") / "case.json"
    file.write_text(json.dumps(small(CASES["blocks_batch_offload"]).to_dict()))
    return file


def run(script, *arguments, report_dir):
    command = [sys.executable, *script, *map(str, arguments), "--report-dir", str(report_dir), "--no-control"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    found = report_dir / "latest" / "report.json"
    assert found.exists(), done.stdout + done.stderr
    [case] = json.loads(found.read_text())["cases"]
    lane = report_dir / "latest" / LANE_FILE
    return case, json.loads(lane.read_text())["programs"][0] if lane.exists() else None


def test_every_graph_case_is_every_case_whose_graph_runs_as_it_is():
    assert CASES.keys() - {case.name for case in every_graph_case()} == {
        *("early_accumulation", "chunked_vs_unchunked", "inductor_dense", "inductor_moe", "regional_inductor"),
        *(case.name for case in (*joint.CASES, *regional.CASES, *precompiled.CASES, *autoplace.CASES, *trainers.CASES)),
        *(case.name for case in published.CASES if case.requires),
        *(case.name for case in loss_pieces.CASES if case.candidate == "precompiled"),
        *(
            case.name
            for family in (two_layouts, resume, accumulation, optimizers, pipelines, context_parallel)
            for case in family.CASES
        ),
    }


def test_the_table_of_captures_has_every_traced_case_and_a_row_for_each_set_of_reasons():
    names = {case.name for case in captures.graph_cases()}
    assert {"captured_llama3", "moe_seq", "pipeline_1f1b", "inductor_moe", "joint_deepseek_ep2"} <= names
    assert {case.name for case in every_graph_case() if case.model.flavor not in ("debugmodel", "16B")} <= names
    found = {
        "whole": {"obstacles": []},
        "one": {"obstacles": [["the host waits", "layers.*.moe", 2]]},
        "more": {"obstacles": [["the host waits", "layers.*.moe", 4]]},
        "other": {"obstacles": [["the host waits", "layers.*.moe", 1], ["it allocates", "the model", 1]]},
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in captures.table(found).splitlines()[2:]]
    assert rows == [
        ["1: `whole`", "yes", "0", "\\-"],
        ["2: `one`, `more`", "no", "2 to 4", "the host waits (`layers.*.moe`)"],
        ["1: `other`", "no", "2", "it allocates (`the model`); the host waits (`layers.*.moe`)"],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_efficient_attention_on_the_cpu_has_the_bits_of_eager_with_one_head_dim_or_two(dtype, value_dim):
    make = torch.Generator().manual_seed(0)
    shapes = (2, 4, 32, 16), (2, 4, 32, 16), (2, 4, 32, value_dim)
    inputs = [torch.randn(shape, generator=make).to(dtype).requires_grad_() for shape in shapes]
    eager = functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.25)
    grad = torch.randn(eager.shape, generator=make).to(dtype)
    output, *gradients, of_bias = attending()(grad, *(x.detach() for x in inputs))
    assert output.equal(eager) and of_bias is None
    assert value_dim == 16 or (output.transpose(1, 2).is_contiguous() and gradients[0].transpose(1, 2).is_contiguous())
    for mine, theirs in zip(gradients, torch.autograd.grad(eager, inputs, grad), strict=True):
        assert mine.equal(theirs)
    with pytest.raises(ValueError, match="with a bias"):
        efficient(*(x.detach() for x in inputs), torch.zeros(32, 32), True)


def attending():
    """A graph of the efficient attention and its backward, mapped to the CPU."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    grad, query, key, value = (graph.placeholder(name) for name in ("grad", "query", "key", "value"))
    forward = aten._scaled_dot_product_efficient_attention.default
    done = graph.call_function(forward, (query, key, value, None, True, 0.0, True), {"scale": 0.25})
    output, *rest = (graph.call_function(operator.getitem, (done, index)) for index in range(4))
    arguments = (grad, query, key, value, None, output, *rest, 0.0, [True, True, True, False], True)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    gradients = graph.call_function(backward, arguments, {"scale": 0.25})
    graph.output((output, *(graph.call_function(operator.getitem, (gradients, index)) for index in range(4))))
    module = torch.fx.GraphModule({}, graph)
    map_to_cpu(module)
    return module


def test_slices_are_all_cases_once_each_and_steps_that_are_alike_stay_together():
    cases = every_graph_case()
    slices = [slice_of(cases, f"{index}/10", 2) for index in range(1, 11)]
    assert [case for part in slices for case in part] == cases and all(slices)
    changes = sum(step_of(a) != step_of(b) for a, b in itertools.pairwise(cases))
    assert changes + 1 == len({step_of(case) for case in cases}) < len(cases) / 2
    thirds = [sum(costs(slice_of(cases, f"{index}/3", 2), 2)) for index in (1, 2, 3)]
    assert max(thirds) < 1.1 * min(thirds)
    assert [case for n in PARTS for case in slice_of(traced_cases(), n, 1)] == traced_cases()
    with pytest.raises(SystemExit, match="1 <= i <= n, not 3/2"):
        slice_of(cases, "3/2", 2)


def test_a_case_traced_for_two_gpus_is_one_code_and_equal_to_eager(case_file, tmp_path):
    case, program = run([LANE], "--devices", "0,7", "--case", case_file, report_dir=tmp_path)
    assert (case["verdict"], case["error"]) == ("EQUAL", None)
    assert sum(case["mismatched"].values()) == 0 < sum(case["compared"].values())
    assert (program["traced for"], program["rewritten for"]) == (2, 2)
    assert program["mapped"]["aten._scaled_dot_product_flash_attention_backward.default"] == 2
    assert program["mapped"]["device"] > 0 < program["nodes"]
    one_a_chunk = {"aten._to_copy.default": 2}
    assert program["host waits"] == one_a_chunk, "an exchange's sizes come in one copy, not in one an element"


@pytest.mark.slow
def test_a_rank_reads_the_graph_that_it_kept_and_no_other_ranks_gpus_or_settings(case_file, tmp_path):
    command = [sys.executable, Path(__file__).with_name("kept.py"), case_file, tmp_path / "graphs"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["call"]: each for each in map(json.loads, done.stdout.splitlines())}
    read = [reported for reported, each in found.items() if each["is_kept"]]
    assert read == ["second", "another rank's second", "without a wait, again"]
    right = [each for reported, each in found.items() if "wait" not in reported]
    assert len({each["code"] for each in right}) == 1 and not any(each["hazards"] for each in right)
    wrong = [found["without a wait"]["hazards"], found["without a wait, again"]["hazards"]]
    assert wrong[0] == wrong[1] != [], "a kept graph does not say where values lie, and its hazards are kept beside it"


def test_a_number_that_is_read_on_the_device_holds_the_host_up_and_one_that_was_copied_before_does_not():
    aten, graph = torch.ops.aten, torch.fx.Graph()
    with FakeTensorMode():
        there, here = torch.empty((), device="cuda"), torch.empty(())
    splits = graph.placeholder("splits")
    copied = graph.call_function(aten._to_copy.default, (splits,), {"device": torch.device("cpu")})
    items = [graph.call_function(aten._local_scalar_dense.default, (of,)) for of in (copied, splits)]
    for node, value in zip((splits, copied, *items), (there, here, 1.0, 1.0), strict=True):
        node.meta["val"] = value
    module = torch.fx.GraphModule({}, graph)
    assert host_waits(module) == {"aten._to_copy.default": 1, "aten._local_scalar_dense.default": 1}
    module.graph.erase_node(items[1])
    assert host_waits(module) == {"aten._to_copy.default": 1}


@pytest.mark.slow
def test_the_code_is_one_for_all_eight_gpus(case_file, tmp_path):
    case, program = run([LANE], "--devices", EIGHT, "--case", case_file, report_dir=tmp_path)
    assert (case["verdict"], case["error"]) == ("EQUAL", None)
    assert (program["traced for"], program["rewritten for"]) == (8, 2)


@pytest.mark.slow
def test_a_defect_that_only_the_cuda_form_has_is_different_in_the_lane_alone(case_file, tmp_path):
    arguments = ("--case", case_file, "--extra-pass", DEFECT)
    case, _ = run([LANE], "--devices", "0", *arguments, report_dir=tmp_path / "lane")
    assert case["verdict"] == "DIFFERENT"
    plain = ["-m", "bitproof", "run", "--device", "cpu"]
    case, _ = run(plain, *arguments, report_dir=tmp_path / "plain")
    assert case["verdict"] == "EQUAL"


SPOILED = """
import json, sys
from dataclasses import replace
from bitproof.harness.case import Case
from tests.cuda_lane import graphs, stand_in
stand_in.load()
from tests.cuda_lane import defects
case = Case.from_dict(json.loads(open(sys.argv[1]).read()))
case = replace(case, model=replace(case.model, layers=2))
changes = defects.forget_the_wait_for_a_reload, defects.fetch_numbers_one_by_one
statuses = [graphs.hold([case], *change) for change in ((), changes[:1], changes[1:])]
from bitproof.harness.systems import graph
graph.trace = defects.fail
print([*statuses, graphs.hold([case])])
"""


@pytest.mark.slow
def test_a_graph_for_cuda_is_held_to_its_waits_and_to_few_of_the_hosts(case_file):
    command = [sys.executable, "-c", SPOILED, str(case_file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    *lines, statuses = done.stdout.splitlines() or [done.stderr]
    assert statuses == "[0, 1, 1, 1]", done.stdout + done.stderr
    right, hazard, waits, untraced = (line for line in lines if line.startswith(("pass", "FAIL")))
    assert right.startswith("pass") and "the host waits 4 times, " in right
    assert untraced.endswith("not looked at: TraceError: it cannot be traced")
    assert "before anything waits for it" in hazard and "missing: bitproof.wait_reload of `" in hazard
    assert waits.endswith("the host waits 8 times for the device, at most 6 are allowed")


@pytest.mark.slow
def test_graphs_are_looked_at_of_every_case_whose_candidate_has_one_before_it_runs():
    """What is left out: trainers, whose graphs torch.compile captures while steps run, if any does, and eager steps."""
    left_out = [case for case in CASES.values() if case not in traced_cases()]
    assert {case.candidate for case in left_out if ":" not in case.candidate} == {"eager"}
    steps = [traced_step(case) for case in traced_cases()]
    assert sum(a != b for a, b in itertools.pairwise(steps)) + 1 == len({repr(step) for step in steps})


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("part", PARTS)
def test_no_graph_that_is_right_has_a_hazard(device, part):
    command = [sys.executable, str(Path(__file__).with_name("graphs.py")), "--device", device, "--slice", part]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [case.name for case in slice_of(traced_cases(), part, 1)]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("pass ")] == names
