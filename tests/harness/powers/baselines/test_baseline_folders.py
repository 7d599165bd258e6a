"""Recordings filed as baselines, and held against them: by hand-made recordings first, then by a run of toys."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict, replace

import pytest

from bitproof.harness.capture.recording_files import read_manifest, read_recording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.commands.record import Target, diff, record
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.compare.drift import measure_drift
from bitproof.harness.compare.recorded_environment import environment_of
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.baselines.baseline_folders import (
    compare_with_baselines,
    environment_id,
    store_baseline,
    values_to_keep,
)
from bitproof.harness.powers.baselines.check import BaselineCheck, BaselineOptions
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.baselines.report import baselines_of
from bitproof.harness.records import GraphIdentity, Key, Manifest, PassSettings
from bitproof.harness.report import json as report_json
from bitproof.harness.report.status import case_status
from tests.harness.forging import at, flip_lowest_bit, make_recording, rewrite_recording, vouch
from tests.hosts import one_host

pytestmark = pytest.mark.ranks

CASE = Case(
    name="toy", family="x", reference="a:b", candidate="c:d", steps=2, parallelism=Parallelism(world_size=2, ep=1)
)
GRAD = Key(1, "grad", "w", 1)
MACHINE = {"torch": "2.13.0+cpu", "cpu": "Model T", "cpu_count": 2, "platform": "Linux-1", "bitproof": "0.1.0"}


@pytest.fixture
def baselines(tmp_path):
    """A folder with one baseline, of system toy."""
    made = make_recording(tmp_path / "made", CASE, machine=MACHINE)
    store_baseline(made, tmp_path / "baselines", CASE, "toy")
    return tmp_path / "baselines"


@pytest.fixture
def held(tmp_path, baselines):
    """What the baselines say of a recording made with changes."""

    def hold(change=lambda key, tensor: tensor, patterns=("*",), measure=measure_drift, **about):
        here = make_recording(tmp_path / "here", CASE, change, patterns, **{"machine": MACHINE} | about)
        return compare_with_baselines(here, baselines, CASE, "toy", measure)

    return hold


def only(baselines):
    [folder] = (baselines / "toy" / "toy").iterdir()
    return folder


def another(baselines, name, **about):
    """One more baseline, of another environment."""
    shutil.copytree(min((baselines / "toy" / "toy").glob("cpu-*")), baselines / "toy" / "toy" / name)
    vouch(baselines / "toy" / "toy" / name, **about)


def stating(manifest, **changes):
    """The manifest, with fields as a file would state them."""
    return Manifest.of(json.loads(json.dumps(manifest.to_dict() | changes)))


# Environments.

BARE = {"case": {}, "system": "toy", "world_size": 1, "steps": 1}


def test_a_baseline_lies_under_its_case_its_system_and_its_environment(baselines):
    folder = only(baselines)
    assert folder.relative_to(baselines).parts[:2] == ("toy", "toy")
    assert folder.name == environment_id(read_manifest(folder))
    assert folder.name.startswith("cpu-torch2.13.0-") and len(folder.name) == len("cpu-torch2.13.0-") + 8
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "change",
    [
        {"system": "other"},
        {"device": "cuda"},
        {"backend": "nccl"},
        {"shared_gpus": True},
        {"machine": MACHINE | {"torch": "2.14.0"}},
        {"machine": MACHINE | {"numpy": "3.0"}},
        {"machine": MACHINE | {"cpu": "Model A"}},
        {"machine": MACHINE | {"gpu_models": ["H200"]}},
        {"environment": {"OMP_NUM_THREADS": "2"}},
        {"determinism": {"num_threads": 2}},
        {"case": replace(CASE, seed=1).to_dict()},
        {"graph": {"passes": [{"name": "chunk", "settings": {"dim": "seq"}}]}},
        {"graph": {"passes": [{"name": "chunk", "settings": None}, {"name": "bucket", "settings": None}]}},
        {"ranks": [{"data_sha256": "0"}]},
    ],
)
def test_what_can_change_a_bit_makes_another_environment(baselines, change):
    manifest = stating(read_manifest(only(baselines)), graph={"passes": [{"name": "chunk", "settings": None}]})
    assert environment_of(manifest) != environment_of(stating(manifest, **change))
    assert environment_id(manifest) != environment_id(stating(manifest, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"commit": "c" * 40},
        {"fault": "flip-bit:grad=w,rank=0,step=0"},
        {"arm": "control"},
        {"values": []},
        {"machine": MACHINE | {"bitproof": "0.2.0", "platform": "Linux-2", "cpu_count": 4}},
        {"machine": MACHINE | {"sums_over_ranks": "additions: Triton is not installed"}},
        {"case": replace(CASE, name="renamed", reference="eager", expected="CLOSE", close_within=1.0).to_dict()},
        {"graph": {"code_hash": "other", "passes": []}},
    ],
)
def test_the_code_and_what_changes_no_bit_are_not_in_the_environment(baselines, change):
    change = json.loads(json.dumps(change))
    manifest = stating(read_manifest(only(baselines)), graph={"code_hash": "one", "passes": []})
    assert environment_of(manifest) == environment_of(stating(manifest, **change))
    assert environment_id(manifest) == environment_id(stating(manifest, **change))


def test_another_version_of_a_users_file_is_no_other_environment_and_other_data_are():
    said = [{"data_sha256": "d", "sha256": "one"}, {"data_sha256": "d", "sha256": "another"}, {"data_sha256": "e"}]
    one, another, data = (environment_of(Manifest(**BARE, ranks=[rank])) for rank in said)
    assert one == another != data


def test_a_build_that_the_cuda_version_shows_is_the_same_with_and_without_it_in_torchs_version():
    environments = [
        environment_of(Manifest(**BARE, machine={"torch": version, "cuda": cuda}))
        for version, cuda in [("2.15.0", "13.2"), ("2.15.0+cu132", "13.2"), ("2.15.0+cu132", "13.0"), ("2.15.0", None)]
    ]
    assert environments[0] == environments[1]
    assert environments[0] not in environments[2:]
    assert (
        environment_of(Manifest(**BARE, machine={"torch": "2.13.0+cpu", "cuda": None}))["machine"]["torch"]
        == "2.13.0+cpu"
    )


def test_a_baseline_from_before_a_case_had_a_setting_is_of_the_same_environment_where_it_has_its_default():
    case = Case(name="a", family="b", reference="eager")

    def stated(pipeline):
        return environment_of(Manifest(**BARE | {"case": case.to_dict() | {"pipeline": pipeline}}))

    now = case.to_dict()["pipeline"]
    before = {name: value for name, value in now.items() if name != "isolate_gathers"}
    assert stated(before) == stated(now) != stated(now | {"isolate_gathers": True})
    asking = environment_of(Manifest(**BARE | {"case": replace(case, grad_norm=True).to_dict()}))
    assert asking != stated(now), "a recording that shows the norm is comparable with none that does not"


def test_the_settings_of_every_run_of_a_pass_are_in_the_environment():
    a, b, c = (PassSettings(name="mine", settings={"file": name}) for name in "abc")
    environments = [
        environment_of(Manifest(**BARE, graph=GraphIdentity(passes=passes))) for passes in ([a, c], [b, c], [c, a], [c])
    ]
    assert not any(left == right for left, right in itertools.combinations(environments, 2))


# Filing.


def test_a_second_baseline_of_one_environment_is_refused_and_says_whether_its_bits_differ(tmp_path, baselines):
    same = make_recording(tmp_path / "same", CASE, machine=MACHINE)
    with pytest.raises(UsageError) as error:
        store_baseline(same, baselines, CASE, "toy")
    assert str(error.value) == (
        "UsageError: there is a baseline of this environment already\n"
        "  expected: none, or --force to replace it\n"
        f"  found: {only(baselines)}, which has the same bits"
    )
    other = make_recording(tmp_path / "other", CASE, at(GRAD, flip_lowest_bit), machine=MACHINE)
    with pytest.raises(UsageError, match="which has other bits"):
        store_baseline(other, baselines, CASE, "toy")


def test_force_replaces_the_baseline_of_this_environment_whole(tmp_path, baselines):
    folder = only(baselines)
    other = make_recording(tmp_path / "other", CASE, at(GRAD, flip_lowest_bit), machine=MACHINE)
    digest = read_recording(other).records[GRAD].digest
    assert store_baseline(other, baselines, CASE, "toy", force=True) == folder == only(baselines)
    assert read_recording(folder).records[GRAD].digest == digest
    assert not other.exists()


def test_a_baseline_under_another_name_is_found_by_its_manifest(tmp_path, baselines):
    only(baselines).rename(baselines / "toy" / "toy" / "mine")
    with pytest.raises(UsageError, match="mine, which has the same bits"):
        store_baseline(make_recording(tmp_path / "same", CASE, machine=MACHINE), baselines, CASE, "toy")


def test_another_environment_gets_a_baseline_of_its_own(tmp_path, baselines):
    newer = make_recording(tmp_path / "newer", CASE, machine=MACHINE | {"torch": "2.14.0"})
    assert store_baseline(newer, baselines, CASE, "toy").name.startswith("cpu-torch2.14.0-")
    assert len(list((baselines / "toy" / "toy").iterdir())) == 2


def test_a_systems_name_cannot_lead_out_of_the_folder(tmp_path, baselines):
    folder = store_baseline(make_recording(tmp_path / "odd", CASE), baselines, CASE, "../../..")
    assert folder.parent.parent == baselines / "toy"


# Held against a baseline.


def test_the_same_bits_in_the_same_environment_are_equal(held, baselines):
    assert held() == BaselineResult(status=BaselineStatus.EQUAL, path=str(only(baselines)), compared=20)


def test_other_bits_in_the_same_environment_have_drifted(held):
    found = held(at(GRAD, flip_lowest_bit))
    assert (found.status, found.mismatched, found.compared, found.reasons) == ("DRIFTED", 1, 20, [])
    [entry] = found.drift
    assert (entry.name, entry.step, entry.rank, entry.max_ulp) == ("w", 1, 1, 1)
    assert (entry.reference_bits, entry.candidate_bits) == ("0x3f80", "0x3f81"), "the baseline comes first"


def test_where_bits_drifted_the_code_that_did_is_named_the_generated_one_too(held, baselines):
    vouch(only(baselines), graph={"code_hash": "one", "generated_hash": "a", "passes": []})
    found = held(at(GRAD, flip_lowest_bit), graph={"code_hash": "one", "generated_hash": "b", "passes": []})
    assert (found.status, found.reasons) == ("DRIFTED", ['graph.generated_hash: "a" in the baseline, "b" here'])


def test_other_code_with_the_same_bits_is_no_drift(held, baselines):
    vouch(only(baselines), graph={"code_hash": "one", "generated_hash": "a", "passes": []})
    found = held(graph={"code_hash": "one", "generated_hash": "b", "passes": []})
    assert (found.status, found.reasons) == ("EQUAL", [])


def test_another_machine_is_not_comparable_whatever_the_bits(held, baselines):
    for change in (lambda key, tensor: tensor, at(GRAD, flip_lowest_bit)):
        found = held(change, machine=MACHINE | {"cpu": "Model A", "torch": "2.14.0"})
        assert (found.status, found.drift, found.path) == ("NOT COMPARABLE", [], str(only(baselines)))
        assert found.reasons == [
            'machine.cpu: "Model T" in the baseline, "Model A" here',
            'machine.torch: "2.13.0+cpu" in the baseline, "2.14.0" here',
        ]


def test_where_versions_alone_differ_the_drift_is_reported(held):
    found = held(at(GRAD, flip_lowest_bit), machine=MACHINE | {"torch": "2.14.0", "triton": "3.5"})
    assert found.status == "NOT COMPARABLE"
    assert found.reasons == [
        'machine.torch: "2.13.0+cpu" in the baseline, "2.14.0" here',
        'machine.triton: null in the baseline, "3.5" here',
    ]
    assert (found.compared, found.mismatched, found.tensors_drifted) == (20, 1, 1)
    assert [(entry.kind, entry.max_ulp) for entry in found.drift] == [("grad", 1)]


def test_where_versions_alone_differ_and_nothing_drifted_that_is_reported_too(held):
    found = held(machine=MACHINE | {"torch": "2.14.0"})
    assert (found.status, found.compared, found.mismatched) == ("NOT COMPARABLE", 20, 0)


@pytest.mark.parametrize("library", ["nccl", "cudnn", "cublas", "driver"])
def test_a_baseline_from_another_of_cudas_libraries_is_not_comparable_and_says_so(held, baselines, library):
    vouch(only(baselines), machine=MACHINE | {library: "2.26.2"})
    assert held(machine=MACHINE | {library: "2.26.2"}).status == "EQUAL"
    found = held(machine=MACHINE | {library: "2.27.5"})
    assert found.status == "NOT COMPARABLE"
    assert found.reasons == [f'machine.{library}: "2.26.2" in the baseline, "2.27.5" here']


def test_nccls_own_sums_are_comparable_with_no_sums_in_rank_order(held):
    for collectives in ("gloo", "shared", "nccl"):
        assert held(collectives=collectives).status == "EQUAL"
    found = held(collectives="native")
    assert (found.status, found.reasons) == ("NOT COMPARABLE", ['sums: null in the baseline, "native" here'])


def test_the_nearest_of_several_baselines_is_named(held, baselines):
    another(baselines, "a-far", device="cuda", machine=MACHINE | {"torch": "2.12.0"})
    another(baselines, "b-near", machine=MACHINE | {"torch": "2.12.0"})
    another(baselines, "c-far", machine=MACHINE | {"torch": "2.12.0", "cpu": "Model A"})
    shutil.rmtree(min((baselines / "toy" / "toy").glob("cpu-*")))
    found = held()
    assert found.path.endswith("b-near")
    assert found.reasons == ['machine.torch: "2.12.0" in the baseline, "2.13.0+cpu" here']


def test_a_baseline_of_the_same_environment_is_found_among_others(held, baselines):
    for name in ("a", "z"):
        another(baselines, name, device="cuda")
    assert (held().status, held(at(GRAD, flip_lowest_bit)).status) == ("EQUAL", "DRIFTED")


def test_a_long_value_is_cut(held):
    [reason] = held(environment={"OMP_X": "x" * 500}).reasons
    assert reason == f'environment: null in the baseline, {{"OMP_X": "{"x" * 89}... here'


def test_no_baseline_is_reported(tmp_path, held, baselines):
    assert compare_with_baselines(tmp_path, baselines, CASE, "other", measure_drift).status == "NO BASELINE"
    assert compare_with_baselines(tmp_path, tmp_path / "none", CASE, "toy", measure_drift).status == "NO BASELINE"
    shutil.rmtree(only(baselines))
    assert held().status == "NO BASELINE"


def test_drift_without_values_is_still_drift(held):
    found = held(at(GRAD, flip_lowest_bit), patterns=())
    assert (found.status, found.mismatched) == ("DRIFTED", 1)
    assert [(entry.name, entry.measured) for entry in found.drift] == [("w", 0)]


def test_drift_that_cannot_be_measured_is_still_drift(held):
    def fail(baseline, here):
        raise RecordingError("the values are gone")

    found = held(at(GRAD, flip_lowest_bit), measure=fail)
    assert (found.status, found.mismatched, found.drift) == ("DRIFTED", 1, [])
    assert found.reasons == ["the drift cannot be measured:\nRecordingError: the values are gone"]


def test_a_tensor_that_the_baseline_lacks_makes_it_unverified(tmp_path, held, baselines):
    manifest = read_manifest(only(baselines))
    recording = read_recording(only(baselines))
    from bitproof.harness.capture.recording_files import write_recording

    for key in [key for key in recording.records if key.kind == "buffer"]:
        del recording.records[key]
    write_recording(only(baselines), manifest, recording.records.items())
    found = held()
    assert found.status == "UNVERIFIED"
    assert found.reasons[0].startswith("the evidence is incomplete\n  ")
    assert "the baseline" in found.reasons[0]


def test_a_damaged_baseline_is_unverified_unless_another_is_of_this_environment(held, baselines):
    another(baselines, "damaged")
    (baselines / "toy" / "toy" / "damaged" / "manifest.json").write_text("{")
    assert held().status == "EQUAL"
    vouch(min((baselines / "toy" / "toy").glob("cpu-*")), device="cuda")
    found = held()
    assert found.status == "UNVERIFIED"
    assert "damaged/manifest.json is damaged" in found.reasons[0]


def test_damaged_digests_of_this_environments_baseline_are_unverified(held, baselines):
    (only(baselines) / "digests.parquet").write_bytes(b"")
    found = held()
    assert found.status == "UNVERIFIED"
    assert "digests.parquet is damaged" in found.reasons[0]


def test_a_run_that_left_no_recording_is_unverified(tmp_path, baselines):
    found = compare_with_baselines(tmp_path / "none", baselines, CASE, "toy", measure_drift)
    assert found.status == "UNVERIFIED"
    assert "manifest.json cannot be read" in found.reasons[0]


def test_the_report_has_the_first_hundred_tensors_and_the_number_of_all(held):
    entry = {"kind": "grad", "name": "w"}
    found = held(at(GRAD, flip_lowest_bit), measure=lambda baseline, here: [entry] * 150)
    assert (found.tensors_drifted, len(found.drift)) == (150, 100)


def test_a_run_keeps_the_values_that_any_of_its_baselines_holds(baselines):
    another(baselines, "other", values=["0/*", "*/param/*"])
    assert sorted(values_to_keep(baselines, CASE, "toy")) == ["*", "*/param/*", "0/*"]
    assert values_to_keep(baselines, CASE, "other") == ()


ABSURD = [None, True, -1, 10**400, float("nan"), "", "x" * 5000, "\x1b[2J\n", [], [[]], {}, {"": {"": None}}, ["*"]]


@pytest.mark.parametrize("name", ["case", "machine", "environment", "determinism", "graph", "ranks", "values", "fault"])
def test_absurd_manifests_are_refused_or_not_comparable_and_never_a_traceback(tmp_path, held, baselines, name):
    held()  # makes the recording
    for value in [*ABSURD, {"passes": 1}, {"passes": [1, {"name": []}]}, {"steps": 10**400}, {"name": "../.."}]:
        vouch(only(baselines), **{name: value})
        found = compare_with_baselines(tmp_path / "here", baselines, CASE, "toy", measure_drift)
        assert found.status in ("EQUAL", "NOT COMPARABLE", "UNVERIFIED")
        json.dumps(asdict(found))
        lines: list[str] = []
        for pair in ((only(baselines), tmp_path / "here"), (tmp_path / "here", only(baselines))):
            try:
                assert diff(*pair, lines.append) in (0, 3)
            except RecordingError as error:
                lines.append(str(error))
        assert not any("\x1b" in line for line in lines)


# A run of toys.

TOY = "tests.harness.toy_systems:steady"
CPU = RunOptions(device="cpu", timeout=60.0, control="never")
NAMES = ("same", "regressed", "newer", "elsewhere", "absent", "damaged")


def toy_case(name):
    return replace(CASE, name=name, reference=TOY, candidate=TOY)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The report of a run of cases that agree in every bit, whose baselines differ: (folder, report, exit status)."""
    folder = tmp_path_factory.mktemp("run")
    baselines = folder / "baselines"
    with one_host():
        record(toy_case("same"), TOY, CPU, Target(baseline_dir=baselines), folder / "reports")
    for name in NAMES:
        if name not in ("same", "absent"):
            shutil.copytree(baselines / "same", baselines / name)
    machine = read_manifest(next((baselines / "same").glob("*/*"))).machine
    weight = Key(1, "param", "weight", 1)
    place = {name: next((baselines / name).glob("*/*")) for name in NAMES if name != "absent"}
    rewrite_recording(place["regressed"], at(weight, flip_lowest_bit))
    rewrite_recording(place["newer"], at(weight, flip_lowest_bit), machine=machine | {"torch": "2.99.0"})
    rewrite_recording(place["elsewhere"], at(weight, flip_lowest_bit), machine=machine | {"cpu": "Model T"})
    (place["damaged"] / "digests.parquet").write_bytes(b"")
    options = replace(CPU, active=(BaselineCheck(BaselineOptions(baselines)),))
    with one_host():
        status = run_and_report([toy_case(name) for name in NAMES], options, folder / "reports")
    return folder, report_json.read(folder / "reports" / "latest" / "report.json"), status


def baseline_of(run, name):
    [result] = [result for result in run[1].cases if result.case.name == name]
    return result, baselines_of(result)["candidate"]


def test_systems_that_agree_with_each_other_and_with_the_baseline_are_as_expected(run):
    result, found = baseline_of(run, "same")
    assert (result.verdict, result.as_expected) == ("EQUAL", True)
    assert {side: baseline.status for side, baseline in baselines_of(result).items()} == {
        "reference": "EQUAL",
        "candidate": "EQUAL",
    }
    assert found.compared == 16


def test_systems_that_agree_and_have_both_drifted_are_not_as_expected(run):
    result, found = baseline_of(run, "regressed")
    assert (result.verdict, result.as_expected, result.error) == ("EQUAL", False, None)
    assert case_status(result) == 1
    assert [baseline.status for baseline in baselines_of(result).values()] == ["DRIFTED", "DRIFTED"]
    [entry] = found.drift
    assert (entry.kind, entry.name, entry.step, entry.rank) == ("param", "weight", 1, 1)
    assert (entry.elements_differing, entry.elements, entry.max_ulp) == (1, 6, 1)


def test_another_torch_is_no_regression_and_its_drift_is_reported_in_ulps(run):
    result, found = baseline_of(run, "newer")
    assert (case_status(result), found.status, len(found.reasons)) == (0, "NOT COMPARABLE", 1)
    assert found.reasons[0].startswith('machine.torch: "2.99.0" in the baseline, "')
    assert [(entry.name, entry.max_ulp) for entry in found.drift] == [("weight", 1)]


def test_another_machine_or_no_baseline_has_no_say(run):
    for name, status in (("elsewhere", "NOT COMPARABLE"), ("absent", "NO BASELINE")):
        result, found = baseline_of(run, name)
        assert (case_status(result), found.status, found.drift) == (0, status, [])


def test_a_damaged_baseline_leaves_a_case_unjudged(run):
    result, found = baseline_of(run, "damaged")
    assert (result.verdict, result.as_expected, found.status) == ("EQUAL", False, "UNVERIFIED")
    assert run[2] == run[1].exit_status == 3


def test_a_runs_recordings_keep_the_values_that_its_baselines_keep(run):
    files = (run[0] / "reports" / "latest" / "recordings").rglob("*.safetensors")
    kept = {path.parts[-4] for path in files}
    assert kept == set(NAMES) - {"absent"}
    assert read_manifest(next((run[0] / "baselines" / "same").glob("*/*"))).values == ["0/*", "1/*"]


def test_a_baseline_that_an_earlier_version_filed_is_still_found_and_replaced_where_it_is(tmp_path):
    """There `sub/t.py:make` and `sub-t.py:make` have one folder; the manifest says whose a baseline is."""
    baselines, systems = tmp_path / "baselines", ("sub/t.py:make", "sub-t.py:make")
    earlier = baselines / "toy" / "sub-t.py-make"
    for system in systems:
        made = make_recording(tmp_path / "made", CASE, machine=MACHINE, system=system)
        folder = store_baseline(made, baselines, CASE, system)
        assert folder.parent != earlier
        earlier.mkdir(exist_ok=True)
        folder.rename(earlier / f"cpu-{systems.index(system)}")
    for index, system in enumerate(systems):
        made = make_recording(tmp_path / "again", CASE, machine=MACHINE, system=system)
        found = compare_with_baselines(made, baselines, CASE, system, lambda *_: [])
        assert (found.status, found.path) == ("EQUAL", str(earlier / f"cpu-{index}"))
        assert store_baseline(made, baselines, CASE, system, force=True) == earlier / f"cpu-{index}"


def test_a_baseline_of_a_system_with_a_long_name_is_filed_and_found(tmp_path):
    system = "自" * 90 + "/t.py:make"
    for _ in range(2):
        made = make_recording(tmp_path / "made", CASE, machine=MACHINE, system=system)
        store_baseline(made, tmp_path / "baselines", CASE, system, force=True)
    made = make_recording(tmp_path / "made", CASE, machine=MACHINE, system=system)
    assert compare_with_baselines(made, tmp_path / "baselines", CASE, system, lambda *_: []).status == "EQUAL"
