import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from bitproof.harness.case import Case
from bitproof.harness.certificate_checker import FILES
from bitproof.harness.cli import main
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.certify import (
    certificate_of,
    digests_of,
    subject_of,
    sums_of,
    write_certificate,
)
from tests.harness.powers.proofs.toy_graphs import as_data, randn, trace

W, X = randn(4, 6), randn(4, 6)
ADD, SUB = (lambda w, x: (w + x, w * x)), (lambda w, x: (w - x, w * x))


def write(folder, candidate, name="same"):
    """The certificate of a step that returns a loss and the gradient of its one parameter."""
    graphs = [as_data(trace(step, (W, X)), (W, X)) for step in (ADD, candidate)]
    names = ("loss", "gradient of 0")
    graphs = [
        replace(graph, outputs=tuple((name, at) for name, (_, at) in zip(names, graph.outputs, strict=True)))
        for graph in graphs
    ]
    proof = prove_graphs(*graphs)
    case = Case(name=name, family="test", reference="eager", candidate="graph")
    write_certificate(certificate_of(name, proof, subject_of(case, proof)), folder)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "same", lambda w, x: (x + w, w * x))
    return tmp_path


def seal(folder):
    """Make digests fit again, as somebody with intent would."""
    contents = {name: (folder / name).read_bytes() for name in FILES}
    values = json.loads(contents["certificate.json"])
    values["files"] = digests_of({name: contents[name] for name in FILES[1:]})
    contents["certificate.json"] = json.dumps(values).encode()
    (folder / "certificate.json").write_bytes(contents["certificate.json"])
    (folder / "SHA256SUMS").write_text(sums_of(contents))


def change(folder, edit, *names):
    for name in names or ("certificate.json",):
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))
    seal(folder)


def change_case(folder, edit):
    def edit_text(values):
        case = json.loads(values["subject"]["case"])
        edit(case)
        values["subject"]["case"] = json.dumps(case)

    change(folder, edit_text)


def output_of(folder, capsys, status):
    assert main(["check-certificate", str(folder)]) == status
    return capsys.readouterr().out


def test_an_accepted_certificate_is_reported_with_what_it_is_about_and_what_it_assumes(folder, capsys):
    first, second, third, fourth, *others = output_of(folder / "same", capsys, 0).splitlines()
    assert first.endswith("same: accepted: case same, 5 steps; outputs: 2 PROVED")
    assert second.startswith("  sha256 of certificate.json: ")
    assert third == "  is about graph against eager, deepseek_v3 tiny, 8 ranks"
    assert fourth == "  covers one step, not what follows"
    assert others[0] == "  no case same comes with bitproof: what it is, certificate.json says"
    assert others[1].startswith("  NOT CHECKED: that these are the graphs of this case, and were made by code ")
    assert others[2].startswith("  assumes that torch traces what eager runs")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda m: m.update(case="671B"), "it names case 671B, and holds case same"),
        (
            lambda m: m["subject"].update(torch="9.9.9"),
            "made with torch 9.9.9, and the checker knows operators of 2.11 to 2.15",
        ),
        (lambda m: m["subject"].update(torch=""), "made with torch , and the checker knows"),
        (lambda m: m["subject"].update(machine=""), " is no kind of machine"),
        (lambda m: m["subject"].update(code="0"), "0 is no digest of code"),
        (lambda m: m.update(subject=None), "it does not say what it is about"),
        (lambda m: m.update(subject={}), "what it is about has other parts"),
        (lambda m: m["subject"].update(more=1), "what it is about has other parts"),
        (lambda m: m["subject"]["outputs"].pop(), "its list of outputs is not that of its graphs"),
        (lambda m: m["subject"].update(case="{}"), "it lacks: 'name'"),
        (lambda m: m.update(format=5), "a certificate of format 5, which is not 10: made by another version"),
        (lambda m: m.update(format=True), "a truth value"),
        (lambda m: m.update(format=6.0), "the value 6.0"),
        (lambda m: m.update(extra=1), "its parts are not"),
        (lambda m: m["answers"].append(m["answers"][0]), "outputs and answers differ"),
        (lambda m: m["answers"].pop(), "outputs and answers differ: gradient of 0 is PROVED"),
        (lambda m: m["assumptions"].append(5), "5 is no text"),
    ],
)
def test_a_certificate_that_is_sealed_anew_is_rejected_where_it_is_not_about_its_graphs(folder, capsys, edit, reason):
    change(folder / "same", edit)
    assert reason in output_of(folder / "same", capsys, 3)


def test_an_output_is_left_out_of_no_graph_and_no_list(folder, capsys):
    change(folder / "same", lambda graph: graph["outputs"].pop(), "reference.json", "candidate.json")
    change(folder / "same", lambda m: (m["answers"].pop(), m["subject"]["outputs"].pop()))
    reported = output_of(folder / "same", capsys, 3)
    assert "the reference does not return the step's outputs: gradient of 0" in reported


def test_outputs_that_are_exchanged_are_rejected(folder, capsys):
    change(folder / "same", lambda graph: graph["outputs"].reverse(), "reference.json", "candidate.json")
    assert "the reference does not return the step's outputs: in another order" in output_of(folder / "same", capsys, 3)


def test_an_output_that_is_listed_twice_is_rejected(folder, capsys):
    change(folder / "same", lambda graph: graph["outputs"].append(graph["outputs"][0]), "reference.json")
    assert "a name stands for two outputs" in output_of(folder / "same", capsys, 3)


def test_a_case_of_fewer_fields_or_of_wrong_values_is_rejected(folder, capsys):
    change_case(folder / "same", lambda case: case["model"].update(layers="many"))
    assert "it holds no case" in output_of(folder / "same", capsys, 3)


def test_a_case_that_is_not_the_one_of_its_name_here_is_reported_with_what_differs(folder, capsys):
    write(folder / "moe_seq", lambda w, x: (x + w, w * x), name="moe_seq")
    reported = output_of(folder / "moe_seq", capsys, 0)
    assert "  not as case moe_seq comes with bitproof: " in reported


def test_a_candidate_that_is_the_reference_is_reported(folder, capsys):
    (folder / "same" / "candidate.json").write_bytes((folder / "same" / "reference.json").read_bytes())
    seal(folder / "same")
    assert "  both graphs are the same, call for call" in output_of(folder / "same", capsys, 0)


def test_a_name_that_stands_twice_is_rejected(folder, capsys):
    path = folder / "same" / "certificate.json"
    path.write_text(path.read_text().replace('"answers":', '"answers": [],\n "answers":', 1))
    assert "a name stands twice" in output_of(folder / "same", capsys, 3)


def test_a_pipe_is_rejected_and_not_waited_for(folder, capsys):
    (folder / "same" / "steps.json").unlink()
    os.mkfifo(folder / "same" / "steps.json")
    assert "steps.json is no regular file" in output_of(folder / "same", capsys, 3)


def test_the_option_for_a_second_checker_has_no_effect_and_says_so(folder, capsys):
    assert main(["check-certificate", str(folder / "same"), "--second"]) == 0
    out, err = capsys.readouterr()
    assert "outputs: 2 PROVED" in out
    assert err == "--second has no effect: the checker that it asked for is now the only one\n"


def test_options_of_a_retrace_without_one_are_a_wrong_call(folder, capsys):
    assert main(["check-certificate", str(folder / "same"), "--extra-pass", "a:b"]) == 2
    assert "--retrace beside them" in capsys.readouterr().err


def test_a_retrace_runs_no_pass_that_the_certificate_alone_names(folder, capsys):
    change(folder / "same", lambda m: m["subject"].update(extra_passes=["os:abort"]))
    assert main(["check-certificate", str(folder / "same"), "--retrace"]) == 2
    reported = capsys.readouterr().err
    assert "expected: --extra-pass os:abort" in reported
    assert "found: none" in reported


def test_a_retrace_rejects_what_was_made_by_other_code_or_another_torch(folder, capsys):
    change(folder / "same", lambda m: m["subject"].update(torch="2.14.1"))
    assert main(["check-certificate", str(folder / "same"), "--retrace"]) == 3
    assert "its graphs cannot be made again here: made with torch 2.14.1, here is " in capsys.readouterr().out
    change(folder / "same", lambda m: m["subject"].update(code="0" * 64))
    assert main(["check-certificate", str(folder / "same"), "--retrace"]) == 3
    assert "made with code 0000" in capsys.readouterr().out


def test_all_certificates_of_a_folder_are_checked_and_the_worst_counts(folder, capsys):
    write(folder / "other", SUB, name="other")
    assert main(["check-certificate", str(folder)]) == 1
    assert "outputs: 1 NOT PROVED, 1 PROVED" in capsys.readouterr().out
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
    reported = capsys.readouterr().out
    assert "gone: REJECTED" in reported
    assert "same: REJECTED" in reported


def test_words_of_a_certificate_cannot_say_that_another_is_accepted(folder, capsys):
    name = "x\nother: accepted\x1b[8m"
    change(folder / "same", lambda m: m["assumptions"].append(name))
    reported = output_of(folder / "same", capsys, 0)
    assert reported.endswith("  assumes that x\\nother: accepted\\x1b[8m\n")


@pytest.mark.ranks
def test_checking_loads_neither_torch_nor_the_prover(tmp_path):
    write(tmp_path, ADD)
    code = (
        "import sys, json; from pathlib import Path;"
        "from bitproof.harness.powers.proofs.certificate_command import check_certificates;"
        f"status = check_certificates(Path({str(tmp_path)!r}));"
        "proves = any(name.startswith('bitproof.harness.powers.proofs.prover') for name in sys.modules);"
        "print(json.dumps([status, 'torch' in sys.modules, proves]))"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "accepted: case same" in lines[0]
    assert json.loads(lines[-1]) == [0, False, False]


@pytest.fixture
def keygen(tmp_path):
    """`ssh-keygen`, a key of its own, and a file that allows its signatures."""
    if shutil.which("ssh-keygen") is None:
        pytest.fail("tests of signatures need ssh-keygen")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f'kim@example.org namespaces="bitproof-certificate,other" {key.with_suffix(".pub").read_text()}')

    def sign(folder, namespace="bitproof-certificate"):
        words = ["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", namespace, folder / "certificate.json"]
        subprocess.run(words, check=True, capture_output=True)

    return sign, signers


def test_a_signed_certificate_is_accepted_by_the_name_of_its_signer(folder, keygen, capsys):
    sign, signers = keygen
    sign(folder / "same")
    assert main(["check-certificate", str(folder / "same"), "--signers", str(signers)]) == 0
    assert f"  signed by kim@example.org, as {signers} knows whose key that is" in capsys.readouterr().out
    assert main(["check-certificate", str(folder / "same")]) == 0  # who does not ask is told nothing


@pytest.mark.parametrize("flaw", ["none", "namespace", "signer", "changed", "other's"])
def test_a_certificate_without_its_signature_is_rejected(folder, keygen, capsys, flaw):
    sign, signers = keygen
    same, text = folder / "same", "its signature is of something else, or for something else"
    if flaw != "none":
        sign(same, "other" if flaw == "namespace" else "bitproof-certificate")
    if flaw == "none":
        text = "it is not signed: there is no certificate.json.sig"
    if flaw == "signer":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "others"], check=True)
        signers.write_text(f"kim@example.org {(folder / 'others.pub').read_text()}")
        text = "not signed by any of the allowed signers"
    if flaw == "changed":
        change(same, lambda values: values["answers"].reverse())
    if flaw == "other's":
        write(folder / "less", SUB)
        shutil.copy(same / "certificate.json.sig", folder / "less")
        same = folder / "less"
    assert main(["check-certificate", str(same), "--signers", str(signers)]) == 3
    assert f"REJECTED: {text}" in capsys.readouterr().out
