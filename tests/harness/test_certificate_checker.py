"""The checker: what it says about whole certificates and steps; its page and its file."""

import ast
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import ASSUMPTIONS, FILES, RULES
from bitproof.harness.powers.proofs.prover.certify import contents_of
from tests.benchmarks.forge_certificates import forged_certificate
from tests.harness.certificate.corruption import corrupt
from tests.harness.certificate.json_changes import changed_as_json
from tests.harness.certificate.samples import (
    ANY_NUMBER,
    REJECTED,
    by_hand,
    of_a_whole_step,
    of_random_programs,
    said,
    said_of,
)
from tests.harness.powers.proofs.test_certificate_command import change, write

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "certificate.md"


@pytest.fixture(scope="module")
def certificates():
    return [*by_hand([torch.bfloat16])]


def test_certificates_of_many_kinds_are_accepted_with_the_provers_answers(certificates):
    verdicts = Counter()
    for certificate in certificates:
        found = said_of(certificate)
        assert found != REJECTED
        counts = {verdict: count for verdict, count in found.items() if verdict != ANY_NUMBER}
        assert counts == Counter(verdict for _, verdict in certificate.answers)
        verdicts.update(found)
    assert {*verdicts} == {"PROVED", "NOT PROVED", "REFUSED", ANY_NUMBER}


def test_most_certificates_with_one_change_are_rejected(certificates):
    """Not all: a change of what no answer depends on is none."""
    chance = random.Random(0)
    changed = [corrupt(chance.choice(certificates), chance)[1] for _ in range(250)]
    assert sum(said_of(certificate) == REJECTED for certificate in changed) > 200


def test_files_that_are_changed_as_json_are_accepted_or_rejected_and_raise_nothing_else(certificates):
    chance, counts, subjects = random.Random(3), Counter(), [x for x in certificates if x.subject]
    for _ in range(300):
        certificate = chance.choice(chance.choice([certificates, subjects]))
        subject = certificate.subject is not None
        contents = changed_as_json(contents_of(certificate), chance, subject=subject)
        counts[said(contents, subject=subject) == REJECTED] += 1
    assert counts[True] > 200 and counts[False] > 0


def _in_one_memory(values):
    """Have the two inputs of the reference lie in one memory, which nothing writes."""
    first, second = values["reference.json"]["calls"][:2]
    second[3]["tensor"][5] = first[3]["tensor"][5]


def _renamed(old, new):
    """Have an input another name, everywhere."""

    def edit(values):
        for file in FILES:
            values[file] = json.loads(json.dumps(values[file]).replace(f'{old}"', f'{new}"'))

    return edit


def _as_constant(values):
    """Make state a constant of its name, so that no input is state."""
    for file in FILES[1:3]:
        [state] = [call for call in values[file]["calls"] if call[0].startswith("optimizer ")]
        state[1:3] = "constant", [["digest", ["str", state[0]]]]
    for term, *_ in values["steps.json"]:
        if term[:1] == ["input"] and term[1].startswith("optimizer "):
            term[0] = "constant"


def _set_to_a_number(w, x, state):
    loss, grad = (w * x).sum() + state, w * x
    w.fill_(2)
    return loss, grad


def _of_edited(certificate, edit, *, subject=True):
    values = {name: json.loads(content) for name, content in contents_of(certificate).items()}
    edit(values)
    contents = {name: json.dumps(value).encode() for name, value in values.items()}
    return said(contents, subject=subject)


def test_inputs_that_share_memory_are_rejected(certificates):
    rule = next(x for x in certificates if x.case == "rule")
    assert _of_edited(rule, lambda values: None, subject=False) == {"PROVED": 1}
    assert _of_edited(rule, _in_one_memory, subject=False) == REJECTED


def test_an_argument_that_names_a_call_and_something_more_is_rejected(certificates):
    """Such a call would be taken for an operand, and not as one that is read: overwritten or in flight, for all one
    knew."""

    def more(values):
        call = next(call for call in values[FILES[2]]["calls"] if call[1] == "aten.mul.Tensor")
        call[2][1][1].append(None)

    rule = next(
        x for x in certificates if x.case == "rule" and '"aten.mul.Tensor"' in contents_of(x)[FILES[2]].decode()
    )
    assert _of_edited(rule, lambda values: None, subject=False) != REJECTED
    assert _of_edited(rule, more, subject=False) == REJECTED


@pytest.mark.parametrize("written", ["", [], ["list"], 1, None])
def test_a_write_to_what_is_no_call_proves_nothing_more(certificates, written):
    def edit(values):
        call = next(call for call in values[FILES[2]]["calls"] if call[4] == ["self"])
        call[2][0][1] = written

    writing = [x for x in certificates if '["self"]' in contents_of(x)[FILES[2]].decode()]
    assert writing
    for certificate in writing:
        found = _of_edited(certificate, edit, subject=certificate.subject is not None)
        assert found == REJECTED or found == said_of(certificate)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_renamed("optimizer w.mean", "optimizer"), id="state without a name"),
        pytest.param(lambda v: v[FILES[0]]["subject"].update(extra_passes=""), id="passes that are a text"),
        pytest.param(lambda v: v[FILES[0]]["subject"].update(outputs={}), id="outputs that are an object"),
        pytest.param(
            lambda v: v[FILES[1]]["calls"][-1][3]["tensor"].__setitem__(2, {}), id="a shape that is an object"
        ),
    ],
)
def test_a_whole_step_that_contradicts_itself_is_rejected(certificates, edit):
    whole = next(x for x in certificates if x.case == "whole step")
    assert _of_edited(whole, lambda values: None) == {"PROVED": 5, ANY_NUMBER: 1}
    assert _of_edited(whole, edit) == REJECTED


def test_no_constant_is_an_optimizers_state():
    whole = of_a_whole_step(_set_to_a_number, _set_to_a_number, ("state",))
    assert _of_edited(whole, lambda values: None) == {"PROVED": 3, ANY_NUMBER: 1}
    assert _of_edited(whole, _as_constant) == REJECTED


def test_certificates_of_random_programs_are_accepted_with_the_provers_answers():
    for certificate in islice(of_random_programs(2), 10):
        assert said_of(certificate) == Counter(verdict for _, verdict in certificate.answers)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("translate", lambda w, shape, weights, others, more=0: w),
        ("_check_write", lambda g, call: None),
        ("_wait", lambda g, place, kind, storages: g["filling"].clear()),
        ("has", lambda dtype, value: True),
    ],
)
def test_a_checker_that_is_wrong_in_one_thing_says_something_else(certificates, monkeypatch, name, changed):
    right = [*map(said_of, certificates)]
    monkeypatch.setattr(checker, name, changed)
    assert [*map(said_of, certificates)] != right


def test_a_checker_that_trusts_the_shape_of_an_operand_is_deceived(monkeypatch):
    forged = [forged_certificate(random.Random(seed))[0] for seed in range(8)]
    right = [*map(said_of, forged)]
    monkeypatch.setitem(checker.TYPES, "exact", lambda types, op, dtype, device, x: [dtype, types[x[0]][1]])
    assert any(was == REJECTED != found for was, found in zip(right, map(said_of, forged), strict=True))


def test_a_checker_that_asks_for_no_assumption_accepts_a_certificate_without(certificates, monkeypatch):
    without = replace(certificates[0], assumptions=())
    assert said_of(without) == REJECTED
    monkeypatch.setattr(checker, "check_assumptions", lambda graphs, steps, assumptions: None)
    assert said_of(without) == {"PROVED": 5}


def test_the_page_stays_at_about_two_printed_pages():
    """In Chromium, on A4 in two columns of 9 pt, tables and code of 8 pt, margins of 10 mm, 17,950 characters fit."""
    page = PAGE.read_text()
    assert len(page.split()) <= 3240  # the paragraph on signatures goes onto a third page
    assert len(page) <= 18610


def test_the_page_has_every_rule_kind_of_term_operator_and_assumption():
    text = PAGE.read_text()
    numbers = re.findall(r"\bformat\W+(\d+)", text)
    assert len(numbers) == 2 and {*map(int, numbers)} == {checker.FORMAT}
    assert {*re.findall(r"^\| ((?:view|cat|exact|move|gather|reduce)_\w+) \|", text, re.MULTILINE)} == {*RULES}
    kinds = re.search(r"^\| term \|(.+?)\n\n", text, re.MULTILINE | re.DOTALL)[1]
    first = " ".join(row.split(" | ")[0] for row in kinds.splitlines())
    assert {*checker.GRAMMAR} <= {*re.findall(r"\w+", first)}
    line, reported = " ".join(text.split()), {name: text for name, text in ASSUMPTIONS}
    assert all(f'"{assumption}"' in line for _, assumption in ASSUMPTIONS)
    found = re.findall(r'((?:`\w+`(?: or )?)+): "([^"]+)"', line)
    assert {name: said for both, said in found for name in re.findall(r"\w{3,}", both)} == {
        name: said for name, said in reported.items() if name
    }
    names = {
        *checker.COPIES,
        *checker.EXACT,
        *checker.FILLS,
        *checker.CARRIERS,
        *checker.UPDATES,
        *checker.UNWRITTEN,
        *checker.WAITS,
        *checker.COLLECTIVES,
    }
    words = {*re.findall(r"\w+", text)}
    assert not {name for name in names if name.removesuffix(".default").split(".")[-2:][-1] not in words} - {
        *(name for name in names if name.endswith((".Tensor", ".Scalar", ".self"))),
    }


@pytest.mark.ranks
def test_it_imports_the_standard_library_alone_and_runs_as_one_copied_file(tmp_path):
    file = tmp_path / "copied.py"
    file.write_text(Path(checker.__file__).read_text())
    tree = ast.parse(file.read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= sys.stdlib_module_names
    write(tmp_path / "same", lambda w, x: (x + w, w * x))
    write(tmp_path / "other", lambda w, x: (x - w, w * x), name="other")
    run = lambda name: subprocess.run(  # noqa: E731
        [sys.executable, "-I", str(file), str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    assert (run("same").returncode, run("same").stdout) == (0, "accepted: 2 PROVED\ncovers one step\n")
    assert (run("other").returncode, run("other").stdout) == (1, "accepted: 1 NOT PROVED, 1 PROVED\ncovers one step\n")
    steps = tmp_path / "same" / "steps.json"
    steps.write_text(steps.read_text().replace("add", "sub", 1))
    assert (run("same").returncode, run("same").stdout) == (3, "REJECTED: 'not what was certified: steps.json'\n")


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(case="671B"),
        lambda m: m["subject"].update(machine=""),
        lambda m: m["subject"].update(code="0"),
        lambda m: m.update(subject=None),
        lambda m: m["subject"].update(more=1),
        lambda m: m["subject"]["outputs"].pop(),
        lambda m: m.update(format=5),
        lambda m: m.update(extra=1),
        lambda m: m["answers"].append(m["answers"][0]),
        lambda m: m["answers"].pop(),
        lambda m: m["assumptions"].append(5),
        lambda m: m["assumptions"].pop(0),
        lambda m: m["subject"].update(precompiled=True),
    ],
)
def test_what_a_certificate_is_about_is_checked_too(tmp_path, edit):
    write(tmp_path, lambda w, x: (x + w, w * x))
    assert checker.check_folder(tmp_path) == {"PROVED": 2}
    change(tmp_path, edit)
    with pytest.raises(checker.RejectedError):
        checker.check_folder(tmp_path)
