"""Who may import whom. ARCHITECTURE.md tells why."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOOR = {
    "bitproof.harness",
    "bitproof.harness.errors",
    "bitproof.harness.printable",
    "bitproof.harness.files",
    "bitproof.harness.files.folder_names",
    "bitproof.harness.files.plain_files",
    "bitproof.harness.runtime.output",
    "bitproof.harness.validate",
    "bitproof.harness.within_user_code",
    "bitproof.harness.case",
    "bitproof.harness.case.autoplace",
    "bitproof.harness.case.bounds",
    "bitproof.harness.case.case",
    "bitproof.harness.case.case_parts",
    "bitproof.harness.case.observed",
    "bitproof.harness.case.patterns",
    "bitproof.harness.case.schedule",
    "bitproof.harness.case.shard",
    "bitproof.harness.case.stage_map",
    "bitproof.harness.case.texts",
    "bitproof.harness.case.traced",
    "bitproof.harness.records",
    "bitproof.harness.records.artifact",
    "bitproof.harness.records.comparison",
    "bitproof.harness.records.divergence",
    "bitproof.harness.records.finding",
    "bitproof.harness.records.faults",
    "bitproof.harness.records.layout",
    "bitproof.harness.records.layout_bounds",
    "bitproof.harness.records.partition",
    "bitproof.harness.records.placed",
    "bitproof.harness.records.recording",
    "bitproof.harness.records.report",
    "bitproof.harness.records.result",
    "bitproof.harness.records.throughput",
    "bitproof.harness.ulps",
    "bitproof.harness.consistency",
    "bitproof.harness.operators",
    "bitproof.harness.operators.aten",
    "bitproof.harness.operators.happens_before",
    "bitproof.harness.operators.crossings",
    "bitproof.harness.operators.questions",
    "bitproof.harness.operators.row",
    "bitproof.harness.operators.rows",
    "bitproof.harness.shared_memory",
    "bitproof.harness.torch_tracing",
    "bitproof.harness.torch_versions",
    "bitproof.harness.torch_compat",
    "bitproof.harness.torch_compile",
    "bitproof.harness.torch_distributed",
    "bitproof.harness.torch_operators",
}

# The house, from the ground up: a module imports from its own package and from lower floors, wherever in the file.
FLOORS = (
    {
        "bitproof.harness",
        "bitproof.harness.errors",
        "bitproof.harness.operators",
        "bitproof.harness.printable",
        "bitproof.harness.files",
        "bitproof.harness.certificate_checker",
        "bitproof.harness.shared_memory",
        "bitproof.harness.torch_tracing",
        "bitproof.harness.torch_versions",
        "bitproof.harness.within_user_code",
    },
    {"bitproof.harness.validate"},
    {
        "bitproof.harness.case",
        "bitproof.harness.runtime",
        "bitproof.harness.torch_compat",
        "bitproof.harness.torch_compile",
        "bitproof.harness.torch_distributed",
        "bitproof.harness.torch_operators",
    },
    {
        "bitproof.harness.graph.operators",
        "bitproof.harness.torch_fakes",
        "bitproof.harness.torch_inductor",
        "bitproof.harness.torch_sizes",
        "bitproof.harness.ulps",
        "bitproof.harness.user_code",
        "bitproof.reference",
    },
    {"bitproof.harness.records", "bitproof.harness.settings"},
    {"bitproof.harness.changes", "bitproof.harness.options"},
    {"bitproof.harness.checks"},
    {"bitproof.harness.processes"},
    {"bitproof.harness.machine"},
    {"bitproof.harness.step"},
    {"bitproof.harness.capture", "bitproof.harness.consistency", "bitproof.harness.graph"},
    {"bitproof.harness.disturb", "bitproof.harness.placement"},
    {"bitproof.harness.compare", "bitproof.harness.report", "bitproof.harness.systems"},
    {"bitproof.harness.precompile"},
    {"bitproof.harness.localize"},
    {"bitproof.harness.execute"},
    {"bitproof.builtin_cases"},
    {"bitproof.harness.commands"},
    {"bitproof.harness.cli"},
    {"bitproof.harness.powers"},
    {"bitproof"},
    {"bitproof.builtin_cases.examples"},
)
# Arrows up that are still there, as `importer -> imported`, with the reason for each.
KNOWN: dict[str, str] = {}
TORCH = {f"bitproof.harness.torch_{part}" for part in ("compat", "compile", "distributed", "operators", "tracing")}


LINKED = {"harness": "harness", "reference": "reference", "cases": "builtin_cases"}
"""Top-level folders that are packages of `bitproof`, by links in its folder, and the links' names."""


def module_name(path: Path) -> str:
    """The name that a file is imported by: what lies in a linked folder is below `bitproof`."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    linked = ("bitproof", LINKED[first]) if first in LINKED else (first,)
    return ".".join((*linked, *rest)).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for top in ("bitproof", *LINKED)
    for path in (ROOT / top).rglob("*.py")
    if top != "bitproof" or path.parent == ROOT / "bitproof"
}
PASSES = {name for name in MODULES if name.rpartition(".")[0] == "bitproof.harness.graph.passes"}
PACKAGES = set().union(*FLOORS)


@functools.cache
def imports_of(name: str) -> set[str]:
    """Every module of the project that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= modules if modules <= MODULES.keys() else modules | {node.module}
    return {imported for imported in found if imported in MODULES}


def package_of(name: str) -> str:
    """The innermost package with a floor of its own; the module itself, which no floor has, where there is none."""
    parts = name.split(".")
    packages = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    found = next((package for package in packages if package in PACKAGES), name)
    return name if found == "bitproof.harness" else found


def floor_of(name: str) -> int:
    """How high up a module lives."""
    return next(floor for floor, packages in enumerate(FLOORS) if package_of(name) in packages)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(importers, forbidden) -> list[str]:
    """`importer -> imported` for every import of a forbidden module."""
    return sorted(
        f"{name} -> {imported}"
        for name in MODULES
        if importers(name)
        for imported in imports_of(name)
        if forbidden(name, imported)
    )


def arrows() -> dict[tuple[str, str], list[str]]:
    """For every pair of packages of which one imports the other, the imports."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(MODULES):
        for imported in sorted(imports_of(name)):
            pair = package_of(name), package_of(imported)
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{name} -> {imported}")
    return found


def circle_among(edges) -> list[str]:
    """What is left of packages once all that import nothing, or only what is already gone, are taken away."""
    left = {package for pair in edges for package in pair}
    while free := {package for package in left if not any(p == package and q in left for p, q in edges)}:
        left -= free
    return sorted(left)


def test_every_package_has_its_floor():
    assert {package_of(name) for name in MODULES} == PACKAGES
    assert sum(map(len, FLOORS)) == len(PACKAGES), "a package lives on one floor"


def test_no_import_goes_up_or_to_a_neighbour():
    found = {
        arrow
        for (importer, imported), imports in arrows().items()
        if floor_of(importer) <= floor_of(imported)
        for arrow in imports
    }
    assert sorted(found) == sorted(KNOWN)


def test_there_is_no_circle_among_packages():
    edges = [pair for pair, imports in arrows().items() if set(imports) - KNOWN.keys()]
    assert circle_among(edges) == []


def test_a_circle_is_seen():
    assert circle_among([("a", "b"), ("b", "c"), ("c", "b"), ("b", "d")]) == ["a", "b", "c"]


# Files that import each other, for their types or when they are called, with the reason.
CIRCLES = {
    ("bitproof.harness.case.autoplace", "bitproof.harness.case.case"): "a part of a case checks the case that it is of",
    ("bitproof.harness.case.observed", "bitproof.harness.case.case"): "a part of a case checks the case that it is of",
    ("bitproof.harness.case.schedule", "bitproof.harness.case.case"): "a part of a case checks the case that it is of",
    ("bitproof.harness.case.traced", "bitproof.harness.case.case"): "a part of a case checks the case that it is of",
    ("bitproof.harness.disturb.entry", "bitproof.harness.disturb.faults.catalogue"): "a fault looks its own row up",
    ("bitproof.harness.disturb.entry", "bitproof.harness.disturb.graph_editor"): "a row names what its edit takes",
    ("bitproof.harness.disturb.entry", "bitproof.harness.disturb.tamper"): "a row names what its call takes",
    (
        "bitproof.harness.execute.checks.case_checks",
        "bitproof.harness.execute.case_run",
    ): "a row asks the run if it applies",
    ("bitproof.harness.systems.watched_step", "bitproof.harness.systems.watched_loop"): "`watch` makes either of them",
}
MOST_FILES = 22


def test_no_files_import_each_other_in_a_circle():
    edges = [(name, imported) for name in MODULES for imported in imports_of(name) if imported != name]
    assert circle_among([edge for edge in edges if edge not in CIRCLES]) == []
    assert set(edges) >= CIRCLES.keys()


def test_no_room_has_more_files_side_by_side_than_a_reader_can_take_in():
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES.values() if path.name != "__init__.py")
    assert [room for room, count in rooms.items() if count > MOST_FILES] == []


def test_the_floor_imports_nothing_above_itself():
    assert offenders(lambda name: name in FLOOR, lambda _, imported: imported not in FLOOR) == []


def test_of_the_floor_only_what_stands_for_torch_loads_it():
    """These are torch, as all of us must see it; the rest answers at once, and where there is no torch."""
    for name in FLOOR - TORCH:
        imported = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(ast.parse(MODULES[name].read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not {path for path in imported if within(path, "torch")}
        assert not TORCH & set(imports_of(name))


def test_the_reference_imports_only_itself_and_the_floor():
    assert (
        offenders(
            lambda name: within(name, "bitproof.reference"),
            lambda _, imported: not within(imported, "bitproof.reference") and imported not in FLOOR,
        )
        == []
    )


def test_the_graph_pipeline_does_not_know_the_reference():
    assert (
        offenders(
            lambda name: within(name, "bitproof.harness.graph"),
            lambda _, imported: within(imported, "bitproof.reference"),
        )
        == []
    )


def test_only_the_pipeline_imports_passes():
    def forbidden(name: str, imported: str) -> bool:
        owner = next((p for p in PASSES if within(imported, p)), None)
        return owner is not None and not within(name, owner)

    allowed = {"bitproof.harness.graph.pipeline"}
    assert offenders(lambda name: name not in allowed, forbidden) == []


def test_only_the_worker_models_the_graph_step_its_placements_and_what_tries_or_counts_know_the_reference():
    allowed = {
        "bitproof.harness.execute.host.models",
        "bitproof.harness.execute.host.rank_steps",
        "bitproof.harness.execute.host.rank_system",
        "bitproof.harness.execute.host.worker",
        "bitproof.harness.powers.doctor.together",
        "bitproof.harness.powers.doctor.run",
        "bitproof.harness.execute.run_folder",
        "bitproof.harness.powers.moved.case_ranks",
        "bitproof.harness.powers.shrink.in_stage",
        "bitproof.harness.systems.autoplace",
        "bitproof.harness.systems.graph",
        "bitproof.harness.systems.graph_program",
        "bitproof.harness.systems.staged_gradients",
        "bitproof.harness.systems.step_graphs",
        "bitproof.harness.powers.proofs.prover.update_graph",
    }
    assert (
        offenders(
            lambda name: within(name, "bitproof.harness") and name not in allowed,
            lambda _, imported: within(imported, "bitproof.reference"),
        )
        == []
    )


def test_reports_read_records_only():
    def forbidden(name: str, imported: str) -> bool:
        if (name, imported) == ("bitproof.harness.report.json", "bitproof.harness.checks.shipped"):
            return False  # what a report says of a check, that check verifies
        return imported not in FLOOR and not within(imported, "bitproof.harness.report")

    assert offenders(lambda name: within(name, "bitproof.harness.report"), forbidden) == []


def test_nothing_imports_the_command_line():
    def is_outside(name: str) -> bool:
        is_powers_command = within(name, "bitproof.harness.powers") and name.endswith(".cli")
        return name != "bitproof.__main__" and not within(name, "bitproof.harness.cli") and not is_powers_command

    assert offenders(is_outside, lambda _, imported: within(imported, "bitproof.harness.cli")) == []


def test_the_core_imports_no_power_and_no_power_another():
    def forbidden(name: str, imported: str) -> bool:
        power = ".".join(imported.split(".")[:4])
        return within(imported, "bitproof.harness.powers") and not within(name, power)

    assert offenders(lambda name: within(name, "bitproof.harness"), forbidden) == []


def test_nothing_of_ours_imports_the_face_that_others_see():
    face = {name for name in MODULES if not any(within(name, f"bitproof.{linked}") for linked in LINKED.values())}
    found = offenders(lambda name: name not in face, lambda _, imported: imported in face)
    assert {arrow.split()[0] for arrow in found} == {
        "bitproof.builtin_cases.examples.compiled",
        "bitproof.builtin_cases.examples.fsdp2_loop",
        "bitproof.builtin_cases.examples.mesh_loop",
        "bitproof.builtin_cases.examples.optimizer_loop",
        "bitproof.builtin_cases.examples.pipelined",
        "bitproof.builtin_cases.examples.ring_attention",
        "bitproof.builtin_cases.examples.resumed_loop",
    }, "the examples are written as a user would"


def test_every_linked_folder_is_the_top_level_one():
    for folder, name in LINKED.items():
        assert (ROOT / "bitproof" / name).resolve() == (ROOT / folder).resolve()


# Who forks, starts or watches processes outside of `harness/processes`, and why.
MEANS_OF_PROCESSES = {"multiprocessing", "select", "selectors", "subprocess"}
CALLS_FOR_PROCESSES = {"fork", "forkpty", "killpg", "pidfd_open", "pipe", "popen", "posix_spawn", "system", "waitid"}
CALLS_FOR_PROCESSES |= {"execv", "execve", "execvp", "spawnv", "spawnve", "spawnvp", "wait", "waitpid"}
ELSEWHERE = {
    "bitproof.harness.powers.torchrun.connections": "it watches connections to other machines, and no process",
    "bitproof.harness.powers.shrink.standalone.own_systems": "it is the text of a file that runs without bitproof",
    "bitproof.harness.powers.shrink.standalone.template": "it is the text of a file that runs without bitproof",
    "bitproof.harness.powers.moved.standalone.exchanging": "it runs without bitproof, in another Python",
    "bitproof.harness.shared_memory": "a rank that waits in memory sees whether another one lives",
}


def means_of_processes(name: str) -> set[str]:
    """What a module uses that starts or watches a process."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MEANS_OF_PROCESSES
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", *MEANS_OF_PROCESSES}:
            names = {alias.name for alias in node.names}
            found |= {node.module} if node.module != "os" else names & CALLS_FOR_PROCESSES
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found |= {node.attr} & CALLS_FOR_PROCESSES
    return found


def test_one_room_alone_forks_starts_and_watches_processes():
    found = {name for name in MODULES if means_of_processes(name) and not within(name, "bitproof.harness.processes")}
    assert found == ELSEWHERE.keys()
    assert means_of_processes("bitproof.harness.processes.forked") == {"fork", "pipe", "waitpid"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "module",
    ["bitproof", "bitproof.harness", "bitproof.harness.cli", "bitproof.harness.records", "bitproof.builtin_cases"],
)
def test_importing_loads_neither_torch_nor_pandas(module):
    heavy = {"torch", "pandas", "pyarrow", "numpy", "pydantic"}
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.ranks
def test_what_reads_a_kept_graph_loads_neither_the_tracer_nor_a_pass():
    def loaded(module):
        code = f"""
import sys
from bitproof.harness.execute.host.worker import preload
preload()
import {module}
print(*(name for name in sys.modules if name.startswith("bitproof.harness.graph.")))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        makers = "bitproof.harness.graph.passes", "bitproof.harness.graph.tracing.trace"
        return [name for name in done.stdout.split() if any(within(name, maker) for maker in makers)]

    assert loaded("bitproof.harness.systems.cached_graph") == []
    assert "bitproof.harness.graph.passes.chunk" in loaded("bitproof.harness.systems.graph")


def test_the_rules_see_imports():
    assert "bitproof.harness.graph.passes.chunk" in imports_of("bitproof.harness.graph.pipeline")
    assert "bitproof.reference.step" in imports_of("bitproof.harness.systems.graph")
