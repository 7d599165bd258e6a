"""The command line over the real model, eager and graph, on real ranks; fewer of both than the cases have."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Batch, Case, Chunking, Memory, Model, Parallelism, Pipeline, Schedule
from bitproof.harness.cli import main
from bitproof.harness.compare.verdict import RACES
from tests.distributions import install
from tests.small import small
from tests.sweeps import sweep

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
SYSTEMS = ("eager_chunked", "graph")
CHUNKED = {
    "transformer_batch": ("layers.0", "layers.1", "layers.2"),
    "moe_seq": ("layers.1.moe", "layers.2.moe"),
}
GRADIENT = "layers.0.moe.router.weight"


def words(tmp_path, *arguments):
    """A call of `bitproof run`: 2 ranks and 2 steps, and controls only where they are needed."""
    every = ["run", "--world-size", "2", "--steps", "2", "--device", "cpu", "--report-dir", str(tmp_path), *arguments]
    return every + ([] if {"--no-control", "--control"} & set(arguments) else ["--control", "when-different"])


def report_of(tmp_path):
    report = tmp_path / "latest" / "report.json"
    return json.loads(report.read_text()) if report.exists() else None


def run(tmp_path, *arguments):
    """What `bitproof run` did in a process of its own, and its report.

    Cases of distributions in `tmp_path` are there too.
    """
    finished = subprocess.run(
        [sys.executable, "-m", "bitproof", *words(tmp_path, *arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    return finished, report_of(tmp_path)


@pytest.fixture
def run_here(tmp_path, capsys, monkeypatch, one_host):
    """As `run`, in this process: what starting one takes is tried often enough."""
    monkeypatch.chdir(ROOT)

    def run_here(*arguments):
        status = main(words(tmp_path, *arguments))
        reported = capsys.readouterr()
        return subprocess.CompletedProcess([], status, reported.out, reported.err), report_of(tmp_path)

    return run_here


@pytest.mark.slow
@pytest.mark.parametrize("case", ["transformer_batch", "moe_seq"])
def test_the_chunked_graph_equals_the_chunked_eager_step(case, tmp_path):
    finished, report = run(tmp_path, "-k", case)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "EQUAL"
    assert result["compared"]["loss"] == 4
    assert not any(result["mismatched"].values())
    assert result["losses"]["reference"] == result["losses"]["candidate"]
    names = [entry["name"] for entry in result["passes"]]
    assert names == ["clean_up", "chunk", "concretize_symbols", "measure_memory"]
    recordings = tmp_path / "latest" / "recordings" / case
    chunked = [json.loads((recordings / side / "manifest.json").read_text())["chunked"] for side in SYSTEMS]
    assert chunked == [{name: 1 for name in CHUNKED[case]}] * 2


def written(folder, case):
    """The file of a case."""
    file = folder / f"{case.name}.json"
    file.write_text(json.dumps(case.to_dict()))
    return str(file)


LAYERS = Chunking(dim="batch", modules="layers")
IDLE = "layers matches the chunking pattern 'layers' but did not run in step 0"
NOT_CALLED = "layers cannot be chunked: the pattern 'layers' matches, but no call runs"


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"candidate": "eager", "chunking": LAYERS}, IDLE),
        pytest.param({"candidate": "eager", "chunking": replace(LAYERS, dim="seq")}, IDLE, marks=pytest.mark.slow),
        ({"reference": "eager", "chunking": LAYERS}, NOT_CALLED),
        pytest.param(
            {"chunking": replace(LAYERS, modules="layers.*.attention"), "pipeline": Pipeline(overlap=True)},
            "there is no all-to-all that overlap could hide",
            marks=pytest.mark.slow,
        ),
        (
            {"reference": "eager", "pipeline": Pipeline(backend="cuda_graph")},
            "(_local_scalar_dense, forward of layers.0.moe.experts): a size or a number depends on data",
        ),
    ],
)
def test_a_case_that_does_not_do_what_it_says_is_an_error(changes, reported, tmp_path, run_here):
    case = small(Case(name="idle", family="test", **changes))
    finished, report = run_here("--case", written(tmp_path, case))
    assert finished.returncode == 3, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "ERROR"
    assert reported in result["error"] and reported in finished.stdout


def test_a_step_between_static_inputs_and_outputs_reads_each_steps_own_text_and_is_blamed_as_any_other(
    tmp_path, run_here
):
    case = written(tmp_path, small(CASES["captured_experts"]))
    finished, report = run_here("--case", case)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert (result["verdict"], result["passes"][-1]["name"]) == ("EQUAL", "cuda_graph")
    losses = result["losses"]["candidate"]
    assert losses == result["losses"]["reference"] and len({str(loss) for loss in losses}) == len(losses)
    finished, report = run_here("--case", case, "--inject", "shared-experts-forgotten")
    [result] = report["cases"]
    first = result["first_divergence"]
    assert (result["verdict"], first["module"], first["operator"]) == ("DIFFERENT", "layers.0.moe", "add.Tensor")


def test_one_flipped_bit_of_one_gradient_is_reported_at_its_step_rank_and_name(tmp_path):
    fault = f"flip-bit:grad={GRADIENT},rank=1,step=1"
    finished, report = run(tmp_path, "--case", written(tmp_path, small(CASES["moe_seq"])), "--inject", fault)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    [result] = report["cases"]
    first = result["first_divergence"]
    assert (first["step"], first["rank"], first["kind"], first["name"]) == (1, 1, "grad", GRADIENT)
    assert (first["elements_differing"], first["max_ulp"]) == (1, 1)
    assert result["mismatched"]["grad"] == 1
    assert result["control"] == {"reference": "EQUAL", "candidate": "EQUAL"}


@pytest.mark.slow
def test_early_accumulation_differs_in_gradients_before_anything_else(tmp_path, run_here):
    finished, report = run_here("--case", written(tmp_path, small(CASES["early_accumulation"])))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "DIFFERENT"
    assert result["differing_kinds"] == ["grad", "param", "optimizer"]
    assert (result["first_divergence"]["step"], result["first_divergence"]["kind"]) == (0, "grad")


def test_a_selection_of_nothing_is_a_wrong_call(tmp_path):
    finished, report = run(tmp_path, "-k", "no_such_case")
    assert (finished.returncode, report) == (2, None)
    assert "`bitproof list`" in finished.stderr


@pytest.mark.parametrize(
    "reference", sweep(["eager", "bitproof.reference.unstaged:eager"], "bitproof.reference.unstaged:eager")
)
def test_a_pipeline_of_two_ranks_equals_eager_stages_and_no_stages_and_has_its_loss_on_the_last(
    reference, tmp_path, run_here
):
    case = replace(
        CASES["pipeline_1f1b"],
        name="small_pipeline",
        reference=reference,
        model=Model(layers=2, dense_layers=1),
        parallelism=Parallelism(world_size=2, ep=1, pp=2),
        batch=Batch(sequences=2),
        schedule=Schedule(micro_batches=2),
    )
    finished, report = run_here("--case", written(tmp_path, case))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert (result["verdict"], result["compared"]["loss"], len(result["losses"]["candidate"])) == ("EQUAL", 2, 2)


EXAMPLES = "cases/examples/extra_passes.py"
SMALL = Case(
    name="small",
    family="test",
    chunking=Chunking(dim="batch", modules="layers.*.moe"),
    model=Model(layers=1, dense_layers=0),
    parallelism=Parallelism(world_size=2),
    steps=1,
)
"""One layer, which is traced in a third of the time."""


def small_with(tmp_path, extra_pass):
    """The options that say the small case, with a pass of ours."""
    return "--steps", "1", "--case", written(tmp_path, SMALL), "--extra-pass", extra_pass


TWO = """
from dataclasses import replace
from bitproof.builtin_cases.chunking import moe_batch, moe_seq
from tests.small import small

CASES = [replace(small(case), name="small_" + case.name, family="test") for case in (moe_batch, moe_seq)]
"""


def run_two(tmp_path, source, *arguments):
    """`run` of two small cases in one command, with the function `change` of this source as an extra pass."""
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "two_cases.py").write_text(TWO)
    install(tmp_path, "two", "[bitproof.cases]\ntwo = two_cases:CASES\n")
    extra = ("--extra-pass", f"{tmp_path}/mine.py:change")
    return run(tmp_path, "-k", "small_moe_batch or small_moe_seq", "--steps", "1", *extra, *arguments)


def test_an_extra_pass_that_moves_waits_is_equal_and_its_graphs_can_be_read(tmp_path, run_here):
    finished, report = run_here(*small_with(tmp_path, f"{EXAMPLES}:wait_late@after=chunk"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "EQUAL"
    names = [entry["name"] for entry in result["passes"]]
    assert names.index("wait_late") == names.index("chunk") + 1
    entry = result["passes"][names.index("wait_late")]
    assert (entry["nodes_before"], entry["changed"]) == (entry["nodes_after"], {})
    digest = hashlib.sha256((ROOT / EXAMPLES).read_bytes()).hexdigest()
    manifest = json.loads((tmp_path / "latest/recordings/small/graph/manifest.json").read_text())
    assert {"name": "wait_late", "settings": {"sha256": digest}} in manifest["graph"]["passes"]
    assert f" --extra-pass {ROOT / EXAMPLES}:wait_late@after=chunk " in f" {' '.join(report['options'])} "
    assert result["stress"] is None
    [reported] = result["remarks"]
    assert re.fullmatch(r"--extra-pass: no comparison covers the values of [\d,]+ of the [\d,]+ calls in .*", reported)
    assert reported.endswith("; --every-call compares them") and reported in finished.stdout


DROPS_A_WAIT = """
import torch

def drop_a_wait(module, context):
    [*_, wait] = module.graph.find_nodes(op="call_function", target=torch.ops.bitproof.wait_reload.default)
    wait.replace_all_uses_with(wait.args[0])
    module.graph.erase_node(wait)
"""


@pytest.mark.slow
def test_an_extra_pass_that_drops_the_wait_for_one_copy_is_no_equal_and_the_copy_is_named(tmp_path, run_here):
    (tmp_path / "drops.py").write_text(DROPS_A_WAIT)
    memory = Memory(policy="offload", offload_gib=1.0)
    offloading = replace(SMALL, memory=memory, model=Model(layers=2))  # with one, no block lies between the copies
    drops = ("--extra-pass", f"{tmp_path / 'drops.py'}:drop_a_wait")
    finished, report = run_here("--steps", "1", "--no-control", "--case", written(tmp_path, offloading), *drops)
    assert finished.returncode == 3, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert (result["verdict"], sum(result["mismatched"].values())) == ("UNVERIFIED", 0)
    headline, *races = result["error"].splitlines()
    assert headline == RACES
    assert len({re.fullmatch(r"  `\w+` reads what `(\w+_reload)` brings, before .*", line)[1] for line in races}) == 1


@pytest.mark.slow
def test_an_extra_pass_that_rounds_gradients_differs_and_its_graphs_can_be_read(tmp_path):
    rounding = small_with(tmp_path, f"{EXAMPLES}:add_gradients_in_bfloat16")
    finished, report = run(tmp_path, *rounding, "--reference", "graph", "--no-control", "--dump-graphs")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "DIFFERENT"
    assert result["first_divergence"]["kind"] == "grad"
    assert result["control"] == {"reference": None, "candidate": None}
    assert report["remarks"] == ["--no-control: no system ran twice, so noise was not distinguished from defects"]
    assert f"{report['remarks'][0]}\n" in finished.stdout and "--no-control" in report["options"]
    graphs = tmp_path / "latest" / "graphs"
    [diff] = (graphs / "small").glob("*-add_gradients_in_bfloat16.diff")
    added = [line for line in diff.read_text().splitlines() if line.startswith("+")]
    assert any("dtype=torch.bfloat16" in line and "-> bfloat16[" in line for line in added)
    assert not list((graphs / "small.reference").glob("*add_gradients*"))
    assert len(list((graphs / "small" / "tlparse").iterdir())) == 1


def test_an_extra_pass_that_raises_makes_the_case_an_error_that_names_it_with_its_traceback(tmp_path, run_here):
    (tmp_path / "mine.py").write_text("def drop(module):\n    raise ValueError('my mistake')\n")
    finished, report = run_here(*small_with(tmp_path, f"{tmp_path}/mine.py:drop"))
    assert finished.returncode == 3, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "ERROR"
    head, _, traceback = result["error"].partition("\n\n")
    assert head == (
        "RankError: graph failed before its ranks started\n  found: ValueError: my mistake\n  came from: in pass: drop"
    )
    assert traceback.startswith("Traceback (most recent call last):")
    assert "raise ValueError('my mistake')" in traceback and "mine.py" in traceback


SWITCH = """
import torch

def change(module):
    torch.nn.functional.silu = torch.nn.functional.relu
"""


@pytest.mark.slow
def test_what_an_extra_pass_changes_outside_of_the_graph_reaches_no_reference_no_control_and_no_other_case(tmp_path):
    """Eager looks `silu` up when it calls it, the graph has its operator: only a leak can move a bit."""
    finished, report = run_two(tmp_path, SWITCH, "--control", "always")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = {result["name"]: (result["verdict"], result["control"]) for result in report["cases"]}
    alike = ("EQUAL", {"reference": "EQUAL", "candidate": "EQUAL"})
    assert found == {"small_moe_batch": alike, "small_moe_seq": alike}


@pytest.mark.slow
def test_an_extra_pass_that_ends_its_process_is_named_and_the_next_case_runs(tmp_path):
    finished, report = run_two(tmp_path, "import os\n\ndef change(module):\n    os._exit(0)\n")
    assert finished.returncode == 3, finished.stdout + finished.stderr
    assert len(report["cases"]) == 2
    for result in report["cases"]:
        assert result["error"] == (
            "RankError: the process that makes the program of graph exited with status 0 before it finished, "
            "in extra pass change\n"
            f"  came from: logs/{result['name']}/graph/trace.log"
        )


@pytest.mark.slow
def test_an_extra_pass_that_never_ends_is_named_at_the_time_that_was_given(tmp_path):
    (tmp_path / "mine.py").write_text("def spin(module):\n    while True:\n        pass\n")
    finished, report = run(tmp_path, *small_with(tmp_path, f"{tmp_path}/mine.py:spin"), "--timeout", "20")
    assert finished.returncode == 3, finished.stdout + finished.stderr
    [result] = report["cases"]
    head, _, stack = result["error"].partition("\n\n")
    assert head == (
        "RankError: the program of graph was not finished: the case ran longer than 20 s\n"
        "  expected: the step to be traced, and every pass to finish\n"
        "  found: the passes had not finished: in extra pass spin\n"
        "  came from: logs/small/graph/trace.log\n"
        "  fix: see below where it was; if it was only slow, give a longer --timeout"
    )
    assert "mine.py" in stack.splitlines()[0]
