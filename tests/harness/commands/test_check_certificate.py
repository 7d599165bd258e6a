import pytest

from bitproof.harness.cli import main
from bitproof.harness.prove.certify import certificate_of, write_certificate
from tests.harness.prove.graphs import compare, randn

W, X = randn(4, 6), randn(4, 6)
ADD, SUB = (lambda w, x: w + x), (lambda w, x: w - x)


@pytest.fixture
def folder(tmp_path):
    write_certificate(certificate_of("same", compare(ADD, lambda w, x: x + w, W, X)), tmp_path / "same")
    return tmp_path


def test_an_accepted_certificate_is_told_with_what_it_assumes(folder, capsys):
    assert main(["check-certificate", str(folder / "same")]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("same: accepted: case same, 4 steps; outputs: 1 PROVED")
    assert second.startswith("  assumes that torch traces what eager runs")


def test_all_certificates_of_a_folder_are_checked_and_the_worst_counts(folder, capsys):
    write_certificate(certificate_of("other", compare(ADD, SUB, W, X)), folder / "other")
    assert main(["check-certificate", str(folder)]) == 1
    assert "outputs: 1 NOT PROVED" in capsys.readouterr().out
    (folder / "same" / "steps.json").write_text("[]")
    assert main(["check-certificate", str(folder)]) == 3
    assert "same: REJECTED: not what was certified: steps.json" in capsys.readouterr().out


def test_a_folder_without_a_certificate_is_a_wrong_call(tmp_path):
    assert main(["check-certificate", str(tmp_path)]) == 2


def test_a_part_of_a_certificate_is_one_that_is_rejected(folder, capsys):
    (folder / "gone").mkdir()
    (folder / "same" / "steps.json").rename(folder / "gone" / "steps.json")
    (folder / "same" / "certificate.json").unlink()
    assert main(["check-certificate", str(folder)]) == 3
    told = capsys.readouterr().out
    assert "gone: REJECTED" in told
    assert "same: REJECTED" in told


def test_words_of_a_certificate_cannot_say_that_another_is_accepted(folder, capsys):
    write_certificate(certificate_of("x\nother: accepted\x1b[8m", compare(ADD, ADD, W, X)), folder / "same")
    assert main(["check-certificate", str(folder / "same")]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("same: accepted: case x\\nother: accepted\\x1b[8m, 3 steps; outputs: 1 PROVED")
    assert second.startswith("  assumes that")
