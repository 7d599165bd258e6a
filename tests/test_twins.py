"""Every module has its test where one looks for it: harness/a/b.py in tests/harness/a/test_b.py, or a reason here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("bitproof", "cases", "harness", "reference")
CASES = "tests/cases/test_families.py"
CLI = "tests/harness/test_cli.py"
LAUNCH = "tests/harness/execute/test_launch.py"
TORCHRUN = "tests/harness/execute/test_torchrun.py"
HAZARDS = "tests/harness/graph/hazards/test_planted.py"
PAIRS = "tests/harness/prove/test_pairs.py"
STEPS = "tests/harness/prove/programs/test_optimizers.py"
FAULT_ROWS = "tests/harness/disturb/faults/test_catalogue.py"
FAULT_RUNS = "tests/harness/commands/test_faults.py"

# Where a module that has no file of tests to itself is tested, and why there.
ELSEWHERE = {
    "harness/systems/staged_gradients.py": (CASES, "the cases of pipelines run it"),
    "bitproof/__main__.py": ("tests/harness/runtime/test_start.py", "it is how the program starts"),
    "bitproof/__init__.py": ("tests/bitproof/test_runs.py", "its names are those of other modules"),
    "cases/__init__.py": (CASES, "families and their cases are one table"),
    "cases/attention.py": (CASES, "its cases are rows of that table"),
    "cases/chunking.py": (CASES, "its cases are rows of that table"),
    "cases/conftest.py": ("tests/harness/case/test_select.py", "it gives `pytest cases` the same -k"),
    "cases/examples/compiled.py": ("tests/cases/test_trainers.py", "examples are run, as their readers do"),
    "cases/examples/extra_passes.py": ("tests/harness/systems/test_graph.py", "examples are run in a graph"),
    "cases/examples/fsdp2_loop.py": ("tests/cases/test_trainers.py", "examples are run, as their readers do"),
    "cases/examples/resumed_loop.py": ("tests/harness/execute/test_two_halves.py", "the same"),
    "cases/examples/mesh_loop.py": ("tests/harness/execute/test_across.py", "examples are run, as their readers do"),
    "cases/examples/pipelined.py": ("tests/harness/execute/test_across.py", "examples are run, as their readers do"),
    "cases/precompiled.py": (CASES, "its cases are rows of that table"),
    "cases/regional.py": (CASES, "its cases are rows of that table"),
    "cases/joint.py": (CASES, "its cases are rows of that table"),
    "cases/test_cases.py": ("tests/cases/test_trainers.py", "it is itself a test, for users: cases as pytest items"),
    "reference/parallel/sequence.py": (
        "tests/reference/parallel/test_tensor.py",
        "it is a form of what is split there",
    ),
    "harness/disturb/faults/equivalent_sums.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/capture/dtypes.py": ("tests/harness/capture/test_digest.py", "names of dtypes are part of digests"),
    "harness/cli/app.py": (CLI, "commands are tested as they are called"),
    "harness/certificate/files.py": ("tests/harness/certificate/test_check.py", "certificates go to disk and back"),
    "harness/certificate/errors.py": ("tests/harness/certificate/test_check.py", "whatever is wrong is a rejection"),
    "harness/certificate/subject.py": (
        "tests/harness/commands/test_check_certificate.py",
        "what a certificate is about is checked by the command",
    ),
    "harness/certificate/rules.py": ("tests/harness/certificate/test_check.py", "rules are replayed by the checker"),
    "harness/cli/check_certificate.py": (
        "tests/harness/commands/test_check_certificate.py",
        "commands are tested as they are called",
    ),
    "harness/cli/doctor.py": (CLI, "commands are tested as they are called"),
    "harness/cli/history.py": ("tests/harness/history/test_show.py", "the command shows what that module tells"),
    "harness/cli/listing.py": (CLI, "commands are tested as they are called"),
    "harness/cli/merge.py": ("tests/harness/commands/test_merge.py", "commands are tested as they are called"),
    "harness/cli/arguments.py": (CLI, "commands are tested as they are called"),
    "harness/cli/precompile.py": (
        "tests/harness/commands/test_precompile.py",
        "commands are tested as they are called",
    ),
    "harness/cli/prove.py": ("tests/harness/commands/test_prove.py", "commands are tested as they are called"),
    "harness/cli/record.py": ("tests/harness/commands/test_record.py", "commands are tested as they are called"),
    "harness/cli/report.py": (CLI, "commands are tested as they are called"),
    "harness/cli/run.py": (CLI, "commands are tested as they are called"),
    "harness/cli/shrink.py": ("tests/harness/commands/test_shrink.py", "commands are tested as they are called"),
    "harness/commands/prove_files.py": (
        "tests/harness/prove/programs/test_exported_file.py",
        "it proves what files hold",
    ),
    "harness/commands/following.py": (
        "tests/harness/execute/test_transport.py",
        "ranks follow where torchrun made them",
    ),
    "harness/execute/status_messages.py": (
        "tests/harness/processes/test_framing.py",
        "what ranks tell travels as it was told",
    ),
    "harness/execute/folders.py": (LAUNCH, "what lies where is seen from a run"),
    "harness/execute/host_process.py": (LAUNCH, "both ends of a host's life are seen from a run"),
    "harness/execute/session.py": (LAUNCH, "what a session leaves behind is seen from a run"),
    "harness/execute/host/stage.py": (LAUNCH, "what ranks are forked from is seen from a run"),
    "harness/execute/torchrun/messages.py": (TORCHRUN, "ranks say them"),
    "harness/execute/torchrun/peers.py": (TORCHRUN, "ranks hear of each other there"),
    "harness/execute/torchrun/rendezvous.py": (TORCHRUN, "ranks come together there"),
    "harness/execute/torchrun/store.py": (TORCHRUN, "ranks come together by it"),
    "harness/execute/torchrun/coordinator.py": (TORCHRUN, "ranks run together there"),
    "harness/execute/host/worker.py": (LAUNCH, "what a rank does is seen from a run"),
    "harness/execute/host/rank_steps.py": (LAUNCH, "what a rank does is seen from a run"),
    "harness/execute/host/rank_system.py": (LAUNCH, "what a rank does is seen from a run"),
    "harness/execute/host/job.py": (LAUNCH, "what a rank does is seen from a run"),
    "harness/graph/hazards/__init__.py": (HAZARDS, "what is found is planted there"),
    "harness/graph/hazards/value_devices.py": (
        HAZARDS,
        "copies that hold the host up are planted",
    ),
    "harness/graph/hazards/effects.py": ("tests/harness/graph/hazards/test_walk.py", "effects show in how calls meet"),
    "harness/graph/hazards/turns.py": (HAZARDS, "what turns are wrong is planted there"),
    "harness/graph/analysis/saved_activations.py": (
        "tests/harness/graph/passes/test_rematerialize.py",
        "passes alone ask it",
    ),
    "harness/graph/context.py": ("tests/harness/graph/test_pipeline.py", "it holds what the runner hands on"),
    "harness/graph/analysis/mixing_rows.py": (
        "tests/harness/graph/analysis/test_mixing.py",
        "it holds what rules are given and give",
    ),
    "harness/graph/analysis/mixing_rules.py": (
        "tests/harness/graph/analysis/test_mixing.py",
        "rules are tested by what they decide",
    ),
    "harness/localize/logs/call_arguments.py": (
        "tests/harness/localize/logs/test_call_log.py",
        "what a call reads and writes is seen in its log",
    ),
    "harness/localize/culprit.py": ("tests/harness/localize/test_blame.py", "blame names it"),
    "harness/localize/logs/packing.py": ("tests/harness/localize/test_blame.py", "blame passes over what packs"),
    "harness/localize/logs/replay.py": ("tests/harness/localize/test_blame.py", "calls are replayed to be blamed"),
    "harness/case/shard.py": ("tests/harness/commands/test_shard.py", "a selection is dealt there"),
    "harness/ulps.py": ("tests/harness/compare/test_bits.py", "counts are made there"),
    "harness/prove/known_operators.py": (
        "tests/harness/certificate/test_calls.py",
        "the checker's own tables of operators are held against it",
    ),
    "harness/operators/row.py": ("tests/harness/operators/test_rows.py", "columns are nothing without rows"),
    "harness/printable.py": ("tests/harness/report/test_hostile_text.py", "hostile text goes through every form"),
    "harness/report/console.py": ("tests/harness/report/test_hostile_text.py", "hostile text goes through every form"),
    "harness/report/markdown_text.py": (
        "tests/harness/report/test_hostile_text.py",
        "hostile text goes through every form",
    ),
    "harness/history/beside.py": ("tests/harness/test_consistency.py", "reports are held against recordings there"),
    "harness/certificate/in_flight.py": (
        "tests/harness/certificate/test_check.py",
        "what is in flight is refused where graphs are checked",
    ),
    "harness/report/bisection.py": ("tests/harness/commands/test_bisect.py", "searches are told where they are made"),
    "harness/report/diff.py": ("tests/harness/commands/test_record.py", "recordings are compared there"),
    "harness/records/artifact.py": ("tests/harness/commands/test_precompile.py", "runs tell of it there"),
    "harness/records/bisection.py": ("tests/harness/localize/test_bisect_passes.py", "a search fills it"),
    "harness/records/comparison.py": ("tests/harness/compare/test_verdict.py", "comparisons are made there"),
    "harness/compare/layout_verdict.py": ("tests/harness/execute/test_across.py", "it names what runs differ in"),
    "harness/records/layout_bounds.py": ("tests/harness/report/test_layout_bounds.py", "layouts are told in reports"),
    "harness/records/placed.py": ("tests/harness/report/test_placed.py", "placements are told in reports"),
    "harness/records/partition.py": ("tests/harness/report/test_partition.py", "partitions are told in reports"),
    "harness/records/proof.py": ("tests/harness/report/test_proofs.py", "proofs are told in reports"),
    "harness/records/recording.py": ("tests/harness/capture/test_recording_files.py", "recordings go to disk and back"),
    "harness/records/report.py": ("tests/harness/report/test_json.py", "reports go through report.json and back"),
    "harness/capture/digest_table.py": (
        "tests/harness/capture/test_recording_files.py",
        "what a table may hold is seen where it is read",
    ),
    "harness/case/case_parts.py": ("tests/harness/case/test_case.py", "parts are tested in a case"),
    "harness/records/divergence.py": ("tests/harness/report/test_json.py", "results go through report.json and back"),
    "harness/systems/step_graphs.py": ("tests/harness/systems/test_graph.py", "graphs of a case are made there"),
    "harness/torch_compile.py": ("tests/harness/execute/host/test_activity_monitor.py", "it counts what was compiled"),
    "harness/torch_distributed.py": ("tests/reference/parallel/test_reporting_group.py", "groups are made there"),
    "harness/torch_operators.py": ("tests/harness/test_torch_compat.py", "private torch is tested there"),
    "harness/records/result.py": ("tests/harness/report/test_json.py", "results go through report.json and back"),
    "harness/cli/sensitivity.py": (
        "tests/harness/commands/test_sensitivity.py",
        "commands are tested as they are called",
    ),
    "harness/records/sensitivity.py": ("tests/harness/report/test_sensitivity.py", "shares are told in reports"),
    "harness/cli/faults.py": ("tests/harness/commands/test_faults.py", "commands are tested as they are called"),
    "harness/disturb/faults/injector.py": (
        "tests/harness/disturb/test_faults.py",
        "both ends of a fault",
    ),
    "harness/disturb/kinds.py": ("tests/harness/disturb/test_faults.py", "each is parsed there"),
    "harness/disturb/faults/parse.py": ("tests/harness/disturb/test_faults.py", "names and fields are one syntax"),
    "harness/disturb/entry.py": (FAULT_ROWS, "rows are tested as a table"),
    "harness/disturb/faults/clock.py": ("tests/harness/disturb/test_graph_editor.py", "kernels read it"),
    "harness/disturb/faults/kernels.py": (
        "tests/harness/disturb/test_graph_editor.py",
        "struck graphs call them",
    ),
    "harness/disturb/mutate.py": ("tests/harness/disturb/test_graph_editor.py", "graphs are struck there"),
    "harness/disturb/faults/chunking.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/collectives.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/loops.py": ("tests/harness/execute/test_across.py", "loops are run with most of them"),
    "harness/disturb/faults/equivalent.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/fsdp.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/gradients.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/hygiene.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/memory.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/moe.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/numerics.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/optimizer.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/ranks.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/disturb/faults/tensor.py": (FAULT_RUNS, "every row is struck and run"),
    "harness/commands/fault_runs.py": (FAULT_RUNS, "faults are run as they are called"),
    "harness/gpu_checks/found.py": ("tests/harness/gpu_checks/test_checks.py", "checks find it there"),
    "harness/gpu_checks/plan.py": ("tests/harness/gpu_checks/test_first_hour.py", "the page has the same table"),
    "harness/gpu_checks/processes.py": ("tests/harness/gpu_checks/test_together.py", "processes are unlike there"),
    "harness/gpu_checks/setting.py": ("tests/harness/gpu_checks/test_checks.py", "every check has one"),
    "harness/gpu_checks/run.py": ("tests/harness/gpu_checks/test_checks.py", "checks are run there, each in processes"),
    "harness/processes/watching.py": ("tests/harness/processes/test_forked.py", "forked processes are watched there"),
    "harness/processes/started.py": ("tests/harness/processes/test_apart.py", "modules of ours are started there"),
    "harness/records/faults.py": ("tests/harness/report/test_faults.py", "outcomes are summed where they are told"),
    "harness/cli/accept.py": ("tests/harness/commands/test_accept.py", "commands are tested as they are called"),
    "harness/execute/drifted.py": ("tests/harness/commands/test_accept.py", "what drifted is accepted there"),
    "harness/localize/collective_inputs.py": ("tests/harness/localize/test_blame.py", "collectives are blamed there"),
    "harness/localize/moved.py": ("tests/harness/commands/test_accept.py", "an operator that moved is named there"),
    "harness/records/throughput.py": ("tests/harness/execute/instruments/test_stopwatch.py", "a stopwatch fills it"),
    "harness/user_code/missing.py": ("tests/harness/execute/test_preloaded.py", "what is missing is met there"),
    "harness/prove/graphs/open_sizes.py": (PAIRS, "sizes are open where pairs say so"),
    "harness/prove/programs/provable.py": (PAIRS, "pairs are made of functions, modules and graphs"),
    "harness/prove/programs/subjects.py": (PAIRS, "its function is how pairs are proved"),
    "harness/prove/induction.py": (STEPS, "steps are proved there, and what follows for many"),
    "harness/systems/update_graph.py": ("tests/harness/prove/test_whole_step.py", "its graph is proved there"),
    "harness/prove/memory.py": ("tests/harness/prove/test_canonical.py", "memory is told by what its readers get"),
}


def has_code(path: Path) -> bool:
    """Whether a module defines anything that can be called: tables of values and package docstrings need no test."""
    nodes = ast.parse(path.read_text()).body
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in nodes)


MODULES = sorted(str(path.relative_to(ROOT)) for top in TOPS for path in (ROOT / top).rglob("*.py") if has_code(path))


def twins(module: str) -> list[Path]:
    """Where a module's own tests may lie; those of a package in it or beside it, under the package's name."""
    path = Path(module)
    if path.name != "__init__.py":
        return [ROOT / "tests" / path.with_name(f"test_{path.name}")]
    folder = ROOT / "tests" / path.parent
    return [folder / f"test_{folder.name}.py", folder.with_name(f"test_{folder.name}.py")]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_twin_or_a_reason(module):
    has_twin = any(twin.is_file() for twin in twins(module))
    assert has_twin != (module in ELSEWHERE), f"{module}: {twins(module)[0].relative_to(ROOT)}, or a row in ELSEWHERE"


def test_reasons_are_of_modules_that_exist_and_name_files_that_do():
    assert sorted(ELSEWHERE.keys() - MODULES) == []
    assert [place for place, _ in ELSEWHERE.values() if not (ROOT / place).is_file()] == []


LONG = {"harness/second_checker.py": "who doubts us copies one file, and reads it beside the page of rules"}


def test_no_file_of_the_product_is_long():
    lengths = {module: len((ROOT / module).read_text().splitlines()) for module in MODULES}
    assert {module for module, length in lengths.items() if length > 400} == LONG.keys()
