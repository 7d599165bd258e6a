from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.case import Batch, Case, Chunking, Parallelism
from bitproof.harness.changes import Changes, change_case, check_data, named_case
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.settings import to_argv

FIRST = Case(name="first", family="x", chunking=Chunking(dim="seq", modules="layers.*.moe", only=("layers.1.moe",)))
PLAIN = Case(name="plain", family="x", reference="eager")


def test_changes_of_a_command_line_go_into_the_case() -> None:
    changes = Changes(reference="eager", steps=3, world_size=4, data="text.txt", early_grad_accumulation=True)
    changed = change_case(FIRST, changes)
    assert (changed.reference, changed.candidate, changed.steps) == ("eager", "graph", 3)
    assert changed.parallelism == Parallelism(world_size=4)
    assert changed.batch == Batch(data="text.txt")
    assert changed.chunking is not None and changed.chunking.early_grad_accumulation
    assert change_case(FIRST, Changes()) == FIRST


def test_a_users_trainers_take_any_number_of_ranks() -> None:
    mine = Changes(reference="a.py:make", candidate="compiled", world_size=1)
    assert change_case(FIRST, mine).parallelism == Parallelism(world_size=1, ep=1)
    assert change_case(FIRST, replace(mine, world_size=4)).parallelism == Parallelism(world_size=4)
    with pytest.raises(CaseError, match="expert parallelism must divide the world size"):
        change_case(FIRST, replace(mine, candidate="graph"))


def test_a_file_that_is_called_as_a_text_of_ours_stays_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pydoc").write_text("mine")
    assert check_data("pydoc") == check_data(Path("./pydoc")) == "./pydoc"
    with pytest.raises(UsageError, match="there is no such data file"):
        check_data("a" * 5000)


def test_what_is_observed_goes_into_the_case_and_into_its_replay() -> None:
    observing = Changes(observe=("layers.*", "norm"))
    assert change_case(FIRST, observing).observe == ("layers.*", "norm")
    assert change_case(replace(FIRST, observe=("norm",)), Changes()).observe == ("norm",)
    assert to_argv(observing) == ["--observe", "layers.*", "--observe", "norm"]


def test_early_accumulation_without_chunking_is_refused() -> None:
    with pytest.raises(CaseError) as error:
        change_case(PLAIN, Changes(early_grad_accumulation=True))
    assert error.value.found == "case plain with chunking=None"
    assert error.value.fix is not None and error.value.fix.endswith("leave out --early-grad-accumulation")


def test_other_modules_or_another_dim_are_chunked() -> None:
    both = change_case(FIRST, Changes(chunk_modules=("layers.*.attention", "layers.*.moe"), chunk_dim="batch"))
    assert both.chunking == Chunking(dim="batch", modules="layers.*.attention,layers.*.moe")
    dim = change_case(FIRST, Changes(chunk_dim="batch"))
    assert dim.chunking == Chunking(dim="batch", modules="layers.*.moe", only=("layers.1.moe",))
    early = change_case(PLAIN, Changes(chunk_modules=("layers.*",), chunk_dim="seq", early_grad_accumulation=True))
    assert early.chunking == Chunking(dim="seq", modules="layers.*", early_grad_accumulation=True)
    given = Changes(chunk_modules=("layers.*.moe", "norm"), chunk_dim="seq")
    assert to_argv(given) == ["--chunk-modules", "layers.*.moe", "--chunk-modules", "norm", "--chunk-dim", "seq"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            Changes(chunk_modules=("layers.*",)),
            "CaseError: case plain does not chunk, so it must be said what to chunk and along which dim\n"
            "  expected: both --chunk-modules and --chunk-dim\n"
            "  found: --chunk-modules layers.*\n"
            "  fix: add --chunk-dim batch or seq",
        ),
        (
            Changes(chunk_dim="seq"),
            "CaseError: case plain does not chunk, so it must be said what to chunk and along which dim\n"
            "  expected: both --chunk-modules and --chunk-dim\n"
            "  found: --chunk-dim seq\n"
            "  fix: add --chunk-modules PATTERN",
        ),
        (
            Changes(chunk_modules=("layers/*",), chunk_dim="seq"),
            "CaseError: a chunking pattern is a dotted module name\n"
            "  expected: components of letters, digits and _, or *, joined by dots, such as layers.*.moe\n"
            "  found: 'layers/*'",
        ),
        (
            Changes(chunk_modules=("layers.*.moe", "layers.1"), chunk_dim="seq"),
            "CaseError: chunking patterns choose a module and one inside it, which would be cut twice\n"
            "  expected: patterns, none of them within another\n"
            "  found: layers.1 and layers.*.moe\n"
            "  fix: leave out one of them",
        ),
    ],
)
def test_chunking_that_cannot_be_is_refused_as_in_a_case_file(changes: Changes, text: str) -> None:
    with pytest.raises(CaseError) as error:
        change_case(PLAIN, changes)
    assert str(error.value) == text


def test_a_case_is_found_by_its_whole_name_and_an_unknown_one_is_a_wrong_call() -> None:
    case = Case(name="toys", family="test", reference="eager", parallelism=Parallelism(world_size=2, ep=1))
    assert named_case([case], "toys", Changes(steps=5)) == change_case(case, Changes(steps=5))
    with pytest.raises(UsageError) as error:
        named_case([case], "toy", Changes())
    assert (error.value.expected, error.value.found) == ("toys", "toy")
    assert error.value.fix == "did you mean toys?"
    with pytest.raises(UsageError, match=r"\n  expected: .*`bitproof list`"):
        named_case([case], "x", Changes())
