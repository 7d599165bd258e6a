from __future__ import annotations

import contextlib
import copy
import itertools
import json

import pytest

from bitproof.harness.case import KINDS
from bitproof.harness.cli import main
from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.merge.merge_command import merge
from bitproof.harness.powers.sensitivity.records import Sensitivity, SensitivityRow
from bitproof.harness.powers.sensitivity.report import finding_of, measured
from bitproof.harness.records import ROLES, BlamedCall, Divergence, Verification
from bitproof.harness.report import json as report_json
from tests.harness.forging import make_recording
from tests.harness.reports import COMPARED, case, result, write_report, write_shard

SELECTION = [case("a"), case("b")]


def put(*path, value):
    def change(entry):
        for name in path[:-1]:
            entry = entry[name]
        entry[path[-1]] = value

    return change


TAMPERED = [
    (put("losses", "candidate", 1, value="0x1p+1"), "verdict", "no EQUAL, as losses differ"),
    (put("losses", value={"reference": [], "candidate": []}), "losses.reference", "as many at each of 2 steps"),
    (put("compared", value=dict.fromkeys(KINDS, 1)), "compared.loss", "at least 4, one for each step and rank"),
    (put("compared", "grad", value=5), "compared.grad", "as many at each of 2 steps"),
    (put("compared", "optimizer", value=0), "verdict", "no EQUAL, as a kind was not compared"),
    (put("steps", value=20), "steps", "2, by its case"),
    (put("world_size", value=4), "world_size", "2, by its case"),
    (put("error", value="rank 0 died"), "verdict", "no EQUAL, as there is an error"),
    (put("mismatched", "grad", value=1), "verdict", "no EQUAL, as records differ"),
    (put("control", value={"reference": "DIFFERENT"}), "verdict", "no EQUAL, as a control is DIFFERENT"),
    (put("as_expected", value=False), "as_expected", "true, by its verdict"),
]


def test_calls_that_are_seen_were_tried(tmp_path):
    row = SensitivityRow(module="norm", direction="forward", calls=5, tried=4, seen=3, at_once=2, blind=1)
    reported = Sensitivity(steps=1, ranks=2, rows=[row])
    run_dir = write_report(tmp_path, [result(case(), checks={"sensitivity": finding_of(reported)})])
    assert measured(report_json.read(run_dir / "report.json").cases[0]) == reported
    for wrong in ({"seen": 4}, {"tried": 6}, {"at_once": 4}, {"blind": 2}):
        tamper(run_dir, put("checks", "sensitivity", "data", "rows", 0, value=vars(row) | wrong))
        with pytest.raises(RecordingError, match=r"checks\.sensitivity\.data\.rows\[0\] is damaged"):
            report_json.read(run_dir / "report.json")


def tamper(run_dir, change):
    path = run_dir / "report.json"
    values = json.loads(path.read_text())
    change(values["cases"][0])
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(("change", "field", "expected"), TAMPERED)
def test_an_equal_that_its_own_numbers_contradict_is_refused(tmp_path, change, field, expected):
    run_dir = write_report(tmp_path, [result(case())])
    assert report_json.read(run_dir / "report.json").exit_status == 0
    tamper(run_dir, change)
    with pytest.raises(RecordingError) as error:
        report_json.read(run_dir / "report.json")
    assert (error.value.what, error.value.expected) == (f"report.cases[0].{field} is damaged", expected)


@pytest.mark.parametrize("change", [change for change, _, _ in TAMPERED])
def test_no_command_takes_a_tampered_equal_for_one(tmp_path, capsys, change):
    shards = [write_shard(tmp_path, index, 2, SELECTION) for index in (1, 2)]
    tamper(shards[0], change)
    assert main(["report", str(shards[0])]) == 3
    assert main(["merge", *map(str, shards), "--report-dir", str(tmp_path / "merged")]) == 3
    assert "1 EQUAL, 1 UNVERIFIED" in capsys.readouterr().out


def test_a_case_that_needs_no_device_cannot_have_been_left_out(tmp_path, capsys):
    shards = [write_shard(tmp_path, index, 2, SELECTION) for index in (1, 2)]
    path = shards[0] / "report.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"cases": [], "not_run": {"a": "no GPU"}}))
    assert merge(shards, tmp_path / "merged") == 3
    assert "found: 'a'" in capsys.readouterr().err


def test_a_case_that_needs_a_device_may_have_been_left_out(tmp_path):
    selection = [case("a", requires="cuda"), case("b")]
    shards = [write_shard(tmp_path, i, 2, selection, not_run={"a": "no GPU"} if i == 1 else {}) for i in (1, 2)]
    assert merge(shards, tmp_path / "merged") == 0


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        (put("mismatched", value=dict.fromkeys(KINDS, 0)), "verdict", "no DIFFERENT, as no record differs"),
        (put("differing_kinds", value=["param"]), "differing_kinds", "kinds of records that differ"),
        (put("mismatched", "grad", value=165), "mismatched.grad", "164 at most, as many as compared"),
        (put("losses", "reference", value=["0x1p+0"]), "losses.reference", "as many at each of 2 steps"),
    ],
)
def test_a_different_that_its_own_numbers_contradict_is_refused(tmp_path, change, field, expected):
    run_dir = write_report(tmp_path, [result(case(), "DIFFERENT")])
    tamper(run_dir, change)
    with pytest.raises(RecordingError) as error:
        report_json.read(run_dir / "report.json")
    assert (error.value.what, error.value.expected) == (f"report.cases[0].{field} is damaged", expected)


VERIFIED = {"status": "verified", "tensors": 9, "differing": 4, "remaining": 0, "accounts": 4, "reverse": True}


@pytest.mark.parametrize(
    ("change", "claims"),
    [
        ({}, None),
        ({"status": "in part"}, None),  # less than the numbers support
        ({"remaining": 1}, "in part, by its numbers"),
        ({"reverse": False}, "in part, by its numbers"),
        ({"reverse": None}, "in part, by its numbers"),
        ({"differing": 0}, "not verified, by its numbers"),
        ({"status": "in part", "remaining": 4}, "not verified, by its numbers"),
    ],
)
def test_a_verification_that_claims_more_than_its_numbers_is_refused(tmp_path, change, claims):
    first = Divergence(
        step=0, rank=0, kind="grad", name="w", call=BlamedCall(operator="mm", verification=Verification(**VERIFIED))
    )
    run_dir = write_report(tmp_path, [result(case(), "DIFFERENT", first_divergence=first)])
    tamper(run_dir, put("first_divergence", "verification", value=VERIFIED | change))
    if claims is None:
        assert report_json.read(run_dir / "report.json").cases
        return
    with pytest.raises(RecordingError, match=r"first_divergence\.verification\.status is damaged") as error:
        report_json.read(run_dir / "report.json")
    assert error.value.expected == claims


FORGED = [
    (lambda r: r.update(not_run={"moe": "it needs a GPU"}), "not_run"),
    (lambda r: r.update(not_run={"moe": "x"}, left_out=[r["cases"][0]["case"] | {"name": "moe"}]), "not_run"),
    (lambda r: r.update(options=["--no-control"]), "remarks"),
    (lambda r: r.update(options=["--stress"], remarks=["all is well"]), "remarks"),
    (lambda r: r["cases"][0].update(control={"reference": None, "candidate": None}), "cases[0].control"),
    (lambda r: r["cases"][0].update(control={"reference": "EQUAL"}), "cases[0].control"),
    (lambda r: r["cases"][0]["losses"].update(candidate=["0x1p+0"] * 4), "losses"),
    (lambda r: r["cases"][0]["losses"].update(dict.fromkeys(("reference", "candidate"), ["0x1p+0"] * 20)), "loss"),
    (lambda r: r["cases"][0]["compared"].update(grad=4), "compared.grad"),
    (lambda r: r["cases"][0]["compared"].update(param=4), "compared.grad"),
    (lambda r: r["cases"][0]["compared"].update(optimizer=12), "compared.optimizer"),
    (lambda r: r["cases"][0].update(verdict="NONDETERMINISTIC"), "verdict"),
    (lambda r: r["cases"].append(r["cases"][0]), "report.cases is"),
    (lambda r: r["cases"][0].update(backend="nccl"), "cases[0].backend"),
    (lambda r: r["cases"][0]["seconds"].update(trace=-1.0), "cases[0].seconds"),
    (lambda r: r["cases"][0]["seconds"].update(control={"reference": -1.0}), "cases[0].seconds"),
]


@pytest.mark.parametrize(("change", "field"), FORGED)
def test_a_report_that_does_not_bear_itself_out_is_refused(tmp_path, change, field):
    path = write_report(tmp_path, [result(case())]) / "report.json"
    assert report_json.read(path).exit_status == 0
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(RecordingError) as error:
        report_json.read(path)
    assert field in error.value.what


def test_what_bears_itself_out_is_read(tmp_path):
    """The nearest neighbours of what is refused."""
    left_out = case("moe", requires="cuda")
    alone = result(case(), control=dict.fromkeys(("reference", "candidate")))
    for number, facts in enumerate(
        (
            {"not_run": {"moe": "it needs a GPU"}, "left_out": (left_out,)},
            {"options": ("--stress",), "remarks": ("--stress: each system ran once more",)},
        )
    ):
        folder = write_report(tmp_path / str(number), [result(case())], **facts)
        assert report_json.read(folder / "report.json").exit_status == 0
    said = {"options": ("--no-control",), "remarks": ("--no-control: no system ran twice",)}
    assert report_json.read(write_report(tmp_path / "alone", [alone], **said) / "report.json").exit_status == 0
    folder = write_report(tmp_path / "when", [alone], options=("--control", "when-different"))
    assert report_json.read(folder / "report.json").exit_status == 0


def test_merged_reports_keep_what_was_said_of_their_shards(tmp_path):
    said = {"options": ("--no-control",), "remarks": ("--no-control: no system ran twice",)}
    shards = [write_shard(tmp_path, index, 2, SELECTION, **said) for index in (1, 2)]
    assert merge(shards, tmp_path / "merged") == 0
    [path] = (tmp_path / "merged").glob("2*/report.json")
    assert report_json.read(path).remarks == said["remarks"]


def test_no_two_reports_parts_make_a_third_that_claims_more(tmp_path):
    """Every part of a report of one run in the place of another's, one and two at a time: refused, or no better."""
    runs = {
        "equal": result(case()),
        "different": result(case(), "DIFFERENT"),
        "noisy": result(case(), "NONDETERMINISTIC"),
        "longer": result(case(steps=4), compared=dict.fromkeys(KINDS, 16)),
        "unseen": result(case(), "UNVERIFIED", error="a rank died", compared=dict.fromkeys(COMPARED, 0)),
    }
    entries = {}
    for name, found in runs.items():
        path = write_report(tmp_path / name, [found]) / "report.json"
        entries[name] = json.loads(path.read_text())
    parts = ("compared", "mismatched", "losses", "control", "error", "steps", "differing_kinds", "case", "verdict")
    tried = accepted = 0
    for to, source in itertools.permutations(entries, 2):
        for chosen in [*itertools.combinations(parts, 1), *itertools.combinations(parts, 2)]:
            values = copy.deepcopy(entries[to])
            entry, other = values["cases"][0], entries[source]["cases"][0]
            entry.update({part: other[part] for part in chosen})
            entry.pop("as_expected")
            tried += 1
            for status in (0, 1, 3):
                with contextlib.suppress(RecordingError):
                    read = report_json.parse(json.dumps(values | {"exit_status": status}))
                    accepted += 1
                    if read.cases[0].verdict == "EQUAL":
                        assert to in ("equal", "longer")
                        assert not any(read.cases[0].mismatched.values()) and read.cases[0].error is None
                        assert sum(read.cases[0].compared.values()) >= 8 * 5
    assert (tried, accepted > 0) == (900, True)


def test_fewer_comparisons_than_the_recordings_beside_a_report_show_are_refused(tmp_path, capsys):
    one = case("one")
    counts = {"loss": 4, "grad": 4, "param": 4, "buffer": 4, "optimizer": 4}
    folder = write_report(tmp_path, [result(one, compared=counts, losses=dict.fromkeys(ROLES, [(2.0).hex()] * 2))])
    for system in (one.reference, one.candidate):
        make_recording(folder / "recordings" / "one" / system, one, system=system)
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    tamper(folder, put("compared", "buffer", value=2))
    assert report_json.read(folder / "report.json").exit_status == 0, "by itself it is a report as good as any"
    assert main(["report", str(folder)]) == 3
    assert "report.cases[0].compared is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"grad": 160, "param": 160, "optimizer": 480}, "compared.grad is damaged"),
        ({"optimizer": 164}, "compared.optimizer is damaged"),
        ({"buffer": 0}, "compared.buffer is damaged"),
    ],
)
def test_counts_that_are_not_those_of_the_case_s_model_are_refused_where_no_recordings_are_left(
    tmp_path, capsys, changes, expected
):
    run_dir = write_report(tmp_path, [result(case())])
    assert main(["report", str(run_dir)]) == 0
    tamper(run_dir, lambda entry: entry["compared"].update(changes))
    assert report_json.read(run_dir / "report.json"), "its own numbers agree"
    assert main(["report", str(run_dir)]) == 3
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("model", [{"family": "gpt_9"}, {"flavor": "huge"}])
def test_a_model_that_nobody_can_build_does_not_get_a_report_around_its_counts(tmp_path, capsys, model):
    run_dir = write_report(tmp_path, [result(case())])
    tamper(run_dir, lambda entry: entry["case"]["model"].update(model))
    assert report_json.read(run_dir / "report.json"), "its own numbers agree"
    assert main(["report", str(run_dir)]) == 3
    assert "report.cases[0].case.model is damaged" in capsys.readouterr().err
