"""A case as a file: written, read, and refused when it is not one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases.chunking import moe_seq
from bitproof.harness.case import Model, Parallelism
from bitproof.harness.case.case_file import LARGEST, case_text, read_case
from bitproof.harness.errors import CaseError


def refusal(file: Path) -> str:
    with pytest.raises(CaseError) as caught:
        read_case(file)
    text = re.sub(r"maximum recursion depth exceeded|Stack overflow \(.*?\)", "RECURSION", str(caught.value))
    return text.replace(str(file.parent), "")


def test_a_case_survives_the_trip_through_a_file(tmp_path: Path) -> None:
    case = replace(moe_seq, model=Model(layers=1, dense_layers=0, experts=4, top_k=1, dim=8, heads=1))
    file = tmp_path / "case.json"
    file.write_text(case_text(case))
    assert read_case(file) == case


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("\x80", "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),
        ("[" * 100_000, "RECURSION while decoding a JSON array from a unicode string"),
        (" " * (LARGEST + 1), f"more than {LARGEST} bytes"),
        ('{"memory": {"offload_gib": Infinity}}', "Infinity is not a number of JSON"),
        ('{"optimizer": {"lr": NaN}}', "NaN is not a number of JSON"),
        ('{"steps": 2, "name": "a", "steps": 20}', "the field 'steps' is there twice"),
        ('{"model": {"dim": 8, "dim": 16}}', "the field 'dim' is there twice"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, content: str, found: str) -> None:
    file = tmp_path / "case.json"
    file.write_bytes(content.encode("latin-1"))
    text = refusal(file)
    assert text.startswith("CaseError: ") and text.endswith(f"\n  found: {found}\n  came from: /case.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "found: No such file or directory" in refusal(tmp_path / "case.json")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": {"layers": 0}}, "model.layers is out of range"),
        ({"model": {"layers": True}}, "case.model.layers has the wrong type"),
        ({"model": {"depth": 3}}, "case.model.depth is not a field"),
        ({"world_size": 1}, "case.world_size is not a field"),
        ({"name": "../../etc"}, "a case name serves as a folder name and in -k expressions"),
        ({"optimizer": {"betas": [0.9]}}, "case.optimizer.betas[1] is missing"),
        ({"optimizer": {"betas": []}}, "case.optimizer.betas[0] is missing"),
        ({"differs": [["grad"]]}, "case.differs[0] has the wrong value"),
        ({"steps": 1e3}, "case.steps has the wrong type"),
    ],
)
def test_a_case_that_contradicts_itself_is_refused_naming_the_file(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(moe_seq.to_dict() | changes))
    text = refusal(file)
    assert text.splitlines()[0] == f"CaseError: {what}"
    assert "\n  came from: /case.json" in text


@pytest.mark.parametrize("content", ["null", "[]", "3"])
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "case.json"
    file.write_text(content)
    assert refusal(file).startswith("CaseError: case has the wrong type\n  expected: an object\n")


def described(folder: Path, file: str, **values: Any) -> Path:
    (folder / file).write_text(json.dumps(values))
    return folder / file


def test_a_case_is_like_another_but_for_what_it_says(tmp_path: Path) -> None:
    file = described(tmp_path, "mine.json", like="moe_seq", steps=2, model={"layers": 1, "dense_layers": 0})
    case = read_case(file, lambda: [moe_seq])
    assert case == replace(moe_seq, name="mine", steps=2, model=replace(moe_seq.model, layers=1, dense_layers=0))
    assert "expected: moe_seq\n  found: like='moe_sec'" in refused(
        described(tmp_path, "mine.json", like="moe_sec"), tmp_path
    )


def refused(file: Path, folder: Path) -> str:
    with pytest.raises(CaseError) as caught:
        read_case(file, lambda: [moe_seq])
    return str(caught.value).replace(str(folder), "")


def test_a_case_is_like_one_in_a_file_and_no_ring_of_them_is_followed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text("")
    described(tmp_path / "deep", "base.json", name="base", reference="train.py:f", candidate="train.py:f", steps=3)
    case = read_case(described(tmp_path, "mine.json", like="deep/base.json", candidate="package:g"))
    assert (case.name, case.family, case.steps, case.candidate) == ("mine", "mine", 3, "package:g")
    assert case.reference == f"{tmp_path}/deep/train.py:f" and case.parallelism.ep == 1
    described(tmp_path, "one.json", like="two.json")
    described(tmp_path, "two.json", like="one.json")
    assert "case files are like each other in a ring" in refused(tmp_path / "one.json", tmp_path)


def test_files_are_found_beside_the_case_and_named_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("train.py", "text.txt"):
        (tmp_path / "mine" / name).write_text("")
    sides = {"reference": "train.py:f", "candidate": "elsewhere.py:g", "batch": {"data": "text.txt"}}
    file = described(tmp_path / "mine", "case.json", name="a", **sides)
    for folder, prefix in ((tmp_path, "mine/"), (tmp_path / "mine", "")):
        monkeypatch.chdir(folder)
        case = read_case(file)
        assert (case.reference, case.candidate) == (f"{prefix}train.py:f", "elsewhere.py:g")
        assert case.batch.data == f"{prefix}text.txt"


def test_a_text_of_ours_is_no_file_and_a_file_that_is_called_so_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for is_there in (False, True):
        for data in ("pydoc", "adversarial", "./pydoc", "./adversarial"):
            file = described(tmp_path, "case.json", name="a", reference="eager", batch={"data": data})
            assert read_case(file).batch.data == data, is_there
        (tmp_path / "pydoc").write_text("mine")
        (tmp_path / "adversarial").write_text("mine")


@pytest.mark.parametrize("data", ["a" * 5000, "é" * 300, "a\0b"])
def test_a_name_of_data_that_no_file_can_have_is_no_crash(data: str, tmp_path: Path) -> None:
    file = described(tmp_path, "case.json", name="a", reference="eager", batch={"data": data})
    assert read_case(file).batch.data == data


def test_options_and_preloaded_modules_are_the_users(tmp_path: Path) -> None:
    options = {"sizes": [1, 2.5], "deep": {"on": True}}
    file = described(tmp_path, "a.json", name="a", reference="eager", options=options, preload=["os.path"])
    case = read_case(file)
    assert case.options == options and case.preload == ("os.path",) and hash(case)
    assert replace(case, options={}) != case
    described(tmp_path, "a.json", name="a", reference="eager", preload=["os/path"])
    assert "case a preloads what is no module" in refused(file, tmp_path)


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"steeps": 2}, "steps"),
        ({"world_size": 1}, "parallelism.world_size"),
        ({"lr": 0.1}, "optimizer.lr"),
        ({"model": {"layer": 2}}, "layers"),
        ({"zzz": 2}, None),
    ],
)
def test_an_unknown_field_is_refused_with_the_one_that_was_probably_meant(
    tmp_path: Path, changes: dict[str, Any], meant: str | None
) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(moe_seq.to_dict() | changes))
    assert refusal(file).partition("\n  fix: ")[2] == (f"did you mean {meant}?" if meant else "")


def test_a_trainer_that_is_its_own_candidate_under_torch_compile_needs_no_experts(tmp_path: Path) -> None:
    """Neither side is a model of ours, so nothing of the default model is so of the case."""
    file = tmp_path / "case.json"
    values = {"name": "mine", "reference": "a.py:make", "candidate": "compiled", "parallelism": {"world_size": 1}}
    file.write_text(json.dumps(values))
    case = read_case(file)
    assert case.is_foreign and case.parallelism == Parallelism(world_size=1, ep=1)
    assert "model" not in case.stated() and case.stated()["parallelism"]["world_size"] == 1
    file.write_text(case_text(case))
    assert read_case(file) == case
    file.write_text(json.dumps(values | {"candidate": "graph"}))
    assert "expert parallelism must divide the world size" in refusal(file)
