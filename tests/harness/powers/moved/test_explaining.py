"""A certificate explains the drift between its own two recordings, and no other."""

import json
from dataclasses import replace

import pytest

from bitproof.harness.capture.recording_files import read_manifest, read_recording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.checks.explanation import explainer_of
from bitproof.harness.cli import main
from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.moved.recording_identity import identity_of
from bitproof.harness.powers.moved.records import digest_of, write_certificate
from bitproof.harness.records import Key
from tests.harness.forging import at, flip_lowest_bit, make_recording
from tests.harness.powers.baselines.test_accept_command import MOVED, SYSTEM
from tests.harness.powers.moved.test_moved_records import GOOD

CASE = Case(
    name="toy", family="x", reference="a:b", candidate="c:d", steps=2, parallelism=Parallelism(world_size=2, ep=1)
)
NEW = {"torch": "2.15.0", "cpu": "Model T"}
DRIFT = at(Key(1, "grad", "w", 1), flip_lowest_bit)


@pytest.fixture
def recordings(tmp_path):
    """The folders of an old and a new recording, and their certificate."""
    folders = make_recording(tmp_path / "old", CASE), make_recording(tmp_path / "new", CASE, DRIFT, machine=NEW)
    write_certificate(tmp_path / "moved.json", certified(*folders))
    return *folders, tmp_path / "moved.json"


def certified(old, new, **changes):
    pair = [identity_of(read_recording(folder)) for folder in (old, new)]
    return replace(GOOD, program="toy", system="eager", recordings=pair, **changes)


def diff(*words):
    return main(["diff", *map(str, words)])


def test_a_drift_is_explained_by_the_certificate_of_its_recordings_in_either_order(recordings, capsys):
    old, new, certificate = recordings
    for folders in ((old, new), (new, old)):
        assert diff(*folders, "--certificate", certificate) == 1, "bits still differ"
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "drift explained by 1 moved call of eager: aten.mm.default"


def test_another_system_of_the_same_bits_has_the_same_explanation(recordings, tmp_path, capsys):
    pair = (
        make_recording(tmp_path / "a", CASE, system="graph"),
        make_recording(tmp_path / "b", CASE, DRIFT, machine=NEW, system="graph"),
    )
    diff(*pair, "--certificate", recordings[2])
    assert "drift explained by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        (at(Key(0, "loss", "loss", 0), flip_lowest_bit), {}, "its records have other bits"),
        (at(Key(1, "grad", "w", 0), flip_lowest_bit), {}, "its records have other bits"),
        (DRIFT, {"machine": NEW | {"torch": "2.14.0"}}, 'machine.torch is "2.15.0" in the certificate, "2.14.0" here'),
        (DRIFT, {"machine": NEW | {"cpu": "Model U"}}, "machine.cpu"),
        (DRIFT, {"environment": {"ATEN_CPU_CAPABILITY": "avx2"}}, "environment"),
        (DRIFT, {"determinism": {"num_threads": 2}}, "determinism"),
        (DRIFT, {"device": "cuda"}, "device"),
        (DRIFT, {"backend": "nccl"}, "backend"),
    ],
)
def test_a_foreign_recording_is_unexplained_with_the_fact_that_differs(
    recordings, tmp_path, capsys, change, about, text
):
    other = make_recording(tmp_path / "other", CASE, change, **{"machine": NEW} | about)
    assert diff(recordings[0], other, "--certificate", recordings[2]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("drift unexplained: the certificate is of other recordings: ") and text in last


def test_a_recording_of_another_case_is_unexplained(recordings, tmp_path):
    other = make_recording(tmp_path / "other", replace(CASE, seed=1), DRIFT, machine=NEW)
    found = explainer_of(recordings[2])(read_recording(recordings[0]), read_recording(other))
    assert not found.is_whole and "case.seed is 0 in the certificate, 1 here" in found.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verified": replace(GOOD.verified, with_exchange="DIFFERENT", remainder="a setting")}, "for it: a setting"),
        ({"verified": replace(GOOD.verified, with_exchange="not run")}, "for it: the program is DIFFERENT"),
        ({"verified": replace(GOOD.verified, plain="NONDETERMINISTIC", with_exchange="not run")}, "NONDETERMINISTIC"),
        ({"verified": replace(GOOD.verified, plain="not run", with_exchange="not run")}, "the program is not run"),
    ],
)
def test_a_certificate_that_does_not_account_for_everything_explains_nothing(recordings, changes, text):
    old, new, certificate = recordings
    write_certificate(certificate, replace(certified(old, new), **changes))
    found = explainer_of(certificate)(read_recording(old), read_recording(new))
    assert not found.is_whole and text in found.text


def test_a_certificate_of_a_script_explains_no_recordings(recordings, tmp_path):
    write_certificate(tmp_path / "script.json", GOOD)
    found = explainer_of(tmp_path / "script.json")(*map(read_recording, recordings[:2]))
    assert found.text.startswith("drift unexplained: the certificate is of train.py, which has no recordings")


def test_every_changed_byte_of_a_certificate_is_refused(recordings, tmp_path):
    content = recordings[2].read_bytes()
    count = 0
    for place in range(0, len(content), max(1, len(content) // 400)):
        for flip in (1, 4):
            damaged = bytearray(content)
            damaged[place] ^= flip
            (tmp_path / "damaged.json").write_bytes(damaged)
            if json.loads(content) == _loaded(damaged):
                continue
            with pytest.raises(RecordingError):
                explainer_of(tmp_path / "damaged.json")
            count += 1
    assert count > 500


def _loaded(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"format": "moved-9"}', '{"format": []}', "[" * 10_000])
def test_a_file_that_is_no_certificate_is_refused(recordings, tmp_path, capsys, content):
    (tmp_path / "none.json").write_text(content)
    assert diff(*recordings[:2], "--certificate", tmp_path / "none.json") == 3
    assert "RecordingError: the certificate" in capsys.readouterr().err


def test_equal_recordings_leave_nothing_to_explain(recordings, tmp_path, capsys):
    again = make_recording(tmp_path / "again", CASE)
    assert diff(recordings[0], again, "--certificate", recordings[2]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to explain: EQUAL"


def test_a_difference_between_environments_ends_in_the_command_that_explains_it(recordings, tmp_path, capsys):
    diff(*recordings[:2])
    assert f"bitproof diff {recordings[0]} {recordings[1]} --certificate upgrade/moved.json" in capsys.readouterr().out
    diff(recordings[0], make_recording(tmp_path / "here", CASE, DRIFT))
    assert "--certificate" not in capsys.readouterr().out, "one environment: no operator moved"


@pytest.mark.slow
@pytest.mark.ranks
def test_accept_takes_a_drift_that_a_certificate_explains_and_no_other_without_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SYSTEM)
    name, case = f"{tmp_path}/mine.py:make", "case.json"
    toy = Case(
        **{"name": "mine", "family": "toys", "reference": name, "candidate": name, "expected": "EQUAL"},
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    (tmp_path / case).write_text(case_text(toy))
    common = ["--case", case, "--device", "cpu"]
    assert main(["accept", *common, "--new", "--why", "first"]) == 0
    [baseline] = (tmp_path / "baselines").glob("mine/*/*")
    assert main(["accept", *common]) == 2 and "--why TEXT" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(MOVED)
    assert main(["record", case, "--system", name, "--device", "cpu", "--out", "moved"]) == 0
    pair = baseline, tmp_path / "moved"
    write_certificate(tmp_path / "right.json", certified(*pair))
    write_certificate(tmp_path / "foreign.json", certified(baseline, baseline, verified=replace(GOOD.verified)))
    contradicting = json.loads((tmp_path / "foreign.json").read_text())
    contradicting.pop("digest")
    contradicting["recordings"][1]["digest"] = "0" * 64
    (tmp_path / "foreign.json").write_text(json.dumps(contradicting | {"digest": digest_of(contradicting)}))
    before = read_manifest(baseline)

    capsys.readouterr()
    assert main(["accept", *common, "--certificate", "foreign.json"]) == 1
    assert "drift unexplained: the certificate is of other recordings" in capsys.readouterr().out
    assert read_manifest(baseline) == before, "a refused drift leaves its baseline"
    (tmp_path / "damaged.json").write_text((tmp_path / "right.json").read_text().replace("mm", "nn"))
    assert main(["accept", *common, "--certificate", "damaged.json"]) == 3
    assert main(["accept", *common, "--certificate", "foreign.json", "--certificate", "right.json"]) == 0
    assert read_manifest(baseline).accepted.why == "drift explained by 1 moved call of eager: aten.mm.default"
    (tmp_path / "mine.py").write_text(SYSTEM)
    assert main(["accept", *common, "--certificate", "foreign.json", "--why", "back"]) == 0
    assert read_manifest(baseline).accepted.why == "back"
