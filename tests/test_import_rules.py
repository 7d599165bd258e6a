"""Who may import whom. ARCHITECTURE.md tells why."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOOR = {"harness", "harness.errors", "harness.case", "harness.records"}
PASSES = {
    "harness.graph.bucket",
    "harness.graph.chunk",
    "harness.graph.clean_up",
    "harness.graph.concretize_symbols",
    "harness.graph.isolate_process_groups",
    "harness.graph.live_memory",
    "harness.graph.offload",
    "harness.graph.overlap",
    "harness.graph.rematerialize",
    "harness.graph.tag_memory",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for top in ("harness", "reference", "cases") for path in (ROOT / top).rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """Every module of the project that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {imported for imported in found if imported in MODULES}


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


def test_the_floor_imports_nothing_above_itself():
    assert offenders(lambda name: name in FLOOR, lambda _, imported: imported not in FLOOR) == []


def test_the_reference_imports_only_itself_and_the_floor():
    assert (
        offenders(
            lambda name: within(name, "reference"),
            lambda _, imported: not within(imported, "reference") and imported not in FLOOR,
        )
        == []
    )


def test_the_graph_pipeline_does_not_know_the_reference():
    assert (
        offenders(lambda name: within(name, "harness.graph"), lambda _, imported: within(imported, "reference")) == []
    )


def test_only_the_pipeline_imports_passes():
    def forbidden(name: str, imported: str) -> bool:
        owner = next((p for p in PASSES if within(imported, p)), None)
        return owner is not None and not within(name, owner)

    allowed = {"harness.graph.pipeline"}
    assert offenders(lambda name: name not in allowed, forbidden) == []


def test_only_the_worker_and_the_graph_step_know_the_reference():
    allowed = {"harness.worker", "harness.graph_step"}
    assert (
        offenders(
            lambda name: within(name, "harness") and name not in allowed,
            lambda _, imported: within(imported, "reference"),
        )
        == []
    )


def test_reports_read_records_only():
    def forbidden(_: str, imported: str) -> bool:
        return imported not in FLOOR and not within(imported, "harness.report")

    assert offenders(lambda name: within(name, "harness.report"), forbidden) == []


def test_nothing_imports_the_command_line():
    def is_outside(name: str) -> bool:
        return name != "harness.__main__" and not within(name, "harness.cli")

    assert offenders(is_outside, lambda _, imported: within(imported, "harness.cli")) == []


@pytest.mark.parametrize("module", ["harness", "harness.cli", "harness.records", "cases"])
def test_importing_loads_neither_torch_nor_pandas(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'pandas', 'pyarrow', 'numpy'}} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_rules_see_imports():
    assert "harness.graph.chunk" in imports_of("harness.graph.pipeline")
    assert "reference.step" in imports_of("harness.graph_step")
