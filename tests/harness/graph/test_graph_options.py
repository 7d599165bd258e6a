"""How an extra pass is named on the command line, and what is refused before anything runs."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases.chunking import moe_seq
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.graph.graph_options import PASSES, check_extra_passes, parse_pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("import no_such_module\ndef first(module): ...\ndef second(module): ...\n")
    return path


def test_a_pass_of_a_module_goes_after_all_that_rewrites_by_default() -> None:
    spec = parse_pass("package.passes:drop")
    assert (spec.source, spec.function, spec.side, spec.anchor) == (
        "package.passes",
        "drop",
        "after",
        "concretize_symbols",
    )
    assert spec.file is None


def test_a_place_is_before_or_after_a_pass(file: Path) -> None:
    spec = parse_pass(f"{file}:second@before=chunk")
    assert (spec.file, spec.function, spec.side, spec.anchor) == (file, "second", "before", "chunk")
    assert parse_pass(f"{file}:second@after=chunk").side == "after"


@pytest.mark.parametrize(
    "text", ["", "mine", "mine:", ":drop", "mine:drop@chunk", "mine:drop@around=chunk", "mine:drop@before=", "m:1a"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_pass(text)
    assert error.value.what.startswith("--extra-pass ") and error.value.found == repr(text)


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        parse_pass("no/such/file.py:drop")
    assert error.value.found == "no/such/file.py: No such file or directory"


def test_an_unknown_function_of_a_file_is_refused_without_running_the_file(file: Path) -> None:
    with pytest.raises(UsageError) as error:
        parse_pass(f"{file}:third")
    assert str(error.value) == f"UsageError: {file} has no function third\n  expected: first, second\n  found: third"


def test_a_file_that_is_not_python_is_refused(file: Path) -> None:
    file.write_text("def first(:")
    with pytest.raises(UsageError, match=r"the file of an extra pass is not Python\n  found: .*line 1"):
        parse_pass(f"{file}:first")


def test_only_a_candidate_that_is_a_graph_takes_passes(file: Path) -> None:
    texts = (f"{file}:first",)
    check_extra_passes(texts, moe_seq)
    check_extra_passes(texts, replace(moe_seq, reference="graph"))
    check_extra_passes((), replace(moe_seq, candidate="eager"))
    with pytest.raises(CaseError) as error:
        check_extra_passes(texts, replace(moe_seq, reference="graph", candidate="eager"))
    assert error.value.found == "candidate eager"
    assert error.value.fix is not None and error.value.fix.endswith("--candidate graph")


def test_a_place_that_no_pass_list_has_is_refused_with_the_one_that_was_probably_meant(file: Path) -> None:
    case = moe_seq
    with pytest.raises(UsageError) as error:
        check_extra_passes((f"{file}:first@before=chunkk",), case)
    assert error.value.what == "there is no pass chunkk for first to stand before"
    assert error.value.fix == "did you mean @before=chunk?"
    check_extra_passes((f"{file}:first@before=chunk",), case)


def test_the_known_places_are_the_pass_list_in_its_order() -> None:
    tree = ast.parse((Path(__file__).parents[3] / "harness/graph/pipeline.py").read_text())
    rows = [
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PassRow"
    ]
    assert list(PASSES) == rows
