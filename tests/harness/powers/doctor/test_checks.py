"""Each check passes on a CPU, where gloo stands in for NCCL, and fails where what it checks is broken."""

from __future__ import annotations

import inspect
import re
import textwrap
import time

import pytest
import torch

from bitproof.harness.graph import offload_operators
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.doctor import checks, run
from bitproof.harness.powers.doctor.check_result import CheckResult
from bitproof.harness.powers.doctor.checks import check_attention, check_digests
from bitproof.harness.powers.doctor.run import ALONE, PROCESSES, TOGETHER
from bitproof.harness.powers.doctor.setting import Setting
from bitproof.harness.powers.doctor.together import sizes
from bitproof.reference.parallel import collectives, device_order_group, mesh
from bitproof.reference.parallel.other_order_group import OtherOrderGroup
from tests.harness.powers.doctor.lagging_device import LaggingDevice

CPU = Setting(device="cpu", ranks=3, max_bytes=2**14)


@pytest.fixture(autouse=True)
def switches():
    """What every check's own process has set."""
    set_determinism(0)


@pytest.mark.parametrize("name", [name for name in ALONE if name != "digest bandwidth"])
def test_a_check_of_one_device_passes_on_a_cpu(name):
    is_ok, found = ALONE[name](CPU)
    assert is_ok, found


def test_digests_are_of_hundreds_of_layouts_and_one_that_differs_is_named(monkeypatch):
    assert check_digests(CPU) == (
        True,
        "320 layouts, 0 with another digest than the CPU's; 13 changed elements, 0 unseen",
    )
    moved = checks.to_device

    def wrong(tensor, device):
        made = moved(tensor, device)
        return -made if tensor.dtype == torch.float16 and tensor.shape == (1,) else made

    monkeypatch.setattr(checks, "to_device", wrong)
    is_ok, found = check_digests(CPU)
    assert not is_ok and "layouts, 0 with" not in found
    assert "; first torch.float16 (1,) " in found


@pytest.mark.parametrize(("place", "sentences"), [(0, "element 0 of 1"), (-1, "element 0 of 1"), (3, "element 3 of 7")])
def test_a_digest_that_drops_an_element_is_seen_though_the_cpus_drops_it_too(monkeypatch, place, sentences):
    def drops(x):
        flat = x.clone().flatten()
        if -len(flat) <= place < len(flat):
            flat[place] = 0
        return right(flat.view(x.shape))

    right = checks.digest
    monkeypatch.setattr(checks, "digest", drops)
    is_ok, found = check_digests(CPU)
    assert not is_ok and "0 with another digest" in found and found.endswith(f"; first {sentences}")


def test_attention_that_does_not_repeat_itself_or_is_cudnns_fails(monkeypatch):
    attend, calls = checks.attend, iter(range(100))
    monkeypatch.setattr(checks, "attend", lambda *given: (attend(*given)[0], [str(next(calls))]))
    is_ok, found = check_attention(CPU)
    assert not is_ok and "(other bits the second time)" in found
    monkeypatch.setattr(checks, "attend", lambda *given: (["_cudnn_attention"], ["same"]))
    is_ok, found = check_attention(CPU)
    assert not is_ok and "cudnn" in found


class OtherOrder(torch.autograd.Function):
    """Attention whose backward adds in another order every second time."""

    calls = 0

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return query.clone()

    @staticmethod
    def backward(ctx, upstream):
        OtherOrder.calls += 1
        query, key, value = ctx.saved_tensors
        parts = [x.float().mean(2, keepdim=True) for x in (query, key)] + [torch.full_like(query[:, :, :1], 1e4)]
        order = parts if OtherOrder.calls % 2 else parts[::-1]
        total = (order[0] + order[1]) + order[2]
        return tuple(total.to(x.dtype)[..., :1].expand_as(x) for x in (query, key, value))


def test_attention_whose_backward_adds_in_another_order_fails(monkeypatch):
    monkeypatch.setattr(
        checks.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: OtherOrder.apply(q, k, v)
    )
    is_ok, found = check_attention(CPU)
    assert not is_ok and "(other bits the second time)" in found


def test_a_copy_that_comes_back_with_other_bits_fails(monkeypatch):
    monkeypatch.setattr(checks, "WAIT_RELOAD", lambda x: x if x.numel() < 50_000 else torch.zeros_like(x))
    is_ok, found = checks.check_offload(CPU)
    assert not is_ok and found.startswith(
        "7 ways in which one stream lags behind another, 4 sizes of each, 10 with other"
    )
    assert found.endswith("; first offloaded while it is computed, 70000 elements")


GUARDS = {
    "offloaded while it is computed": "an offload waits for the current stream",
    "written after its offload was waited for": "wait_offload",
    "freed while it is offloaded": "an offload's source is recorded",
    "reloaded where something else is being written": "a reload waits for the current stream",
    "read after its reload was waited for": "wait_reload",
    "freed while it is reloaded": "a reload's target is recorded",
}
"""By the way in which a stream lags, the guard of `harness/graph/offload_operators.py` that it is there for."""


def test_offload_passes_on_streams_that_lag(lagging):
    assert lagging() == []


@pytest.mark.parametrize("name", GUARDS)
def test_offload_fails_where_a_guard_is_taken_away(lagging, name):
    lost = lagging(without=GUARDS[name])
    assert name in lost
    assert lost == [name] or GUARDS[name] == "wait_reload", "nothing that comes back may be read without that"


def weakened():
    """The functions that copy, each without one of the lines that wait, or with its event recorded too early."""
    for function in (offload_operators.begin_copy, offload_operators.end_copy, offload_operators.land):
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
        for number, line in enumerate(lines):
            indent = line[: len(line) - len(line.lstrip())]
            if re.search(r"\.(wait_stream|wait_event|record_stream|synchronize)\(", line):
                yield (
                    f"without {line.strip()}",
                    function.__name__,
                    [*lines[:number], f"{indent}pass", *lines[number + 1 :]],
                )
            elif ".record_event()" in line:
                before = max(n for n in range(number) if not lines[n].lstrip().startswith("#"))
                early = [*lines[:before], line, *lines[before:number], *lines[number + 1 :]]
                yield f"too early {line.strip()}", function.__name__, early


WEAKENED = {sentences: (name, "\n".join(lines)) for sentences, name, lines in weakened()}


def test_every_line_that_waits_is_taken_away():
    """Whatever asks for a stream or an event is one of those lines, or what they are asked for."""
    text = inspect.getsource(offload_operators)
    asked = re.findall(r"\.(wait_\w+|record_\w+|synchronize)\(", text)
    assert len(asked) == len(WEAKENED) == 5


@pytest.mark.parametrize("sentences", WEAKENED)
def test_offload_fails_without_any_one_of_the_lines_that_wait(lagging, monkeypatch, sentences):
    name, text = WEAKENED[sentences]
    made = {}
    exec(compile("from __future__ import annotations\n" + text, name, "exec"), offload_operators.__dict__, made)
    monkeypatch.setattr(offload_operators, name, made[name])
    monkeypatch.setattr(checks, "land", offload_operators.land)
    assert lagging()


@pytest.fixture
def lagging(monkeypatch):
    """The ways that lose bits on a device whose streams run as late as they may, without one of the guards."""

    def lost(without=None):
        found = []
        for name, way in checks.OFFLOADS.items():
            device = LaggingDevice(without)
            with monkeypatch.context() as patch:
                device.stand_in(patch)
                if way(4, device).read() != [checks.TEST_VALUE] * 4:
                    found.append(name)
        return found

    return lost


def test_a_digest_that_is_slow_fails(monkeypatch):
    monkeypatch.setattr(checks, "seconds_of", lambda call, device: 1.0 if call.__name__ == "clone" else 0.1)
    assert checks.check_bandwidth(CPU)[0]
    monkeypatch.setattr(checks, "seconds_of", lambda call, device: 1.0 if call.__name__ == "clone" else 20.0)
    is_ok, found = checks.check_bandwidth(CPU)
    assert not is_ok and found.endswith(": 2%; at least 5% are needed")


def found_by(name, setting=CPU, compute=None):
    """The result of a check of several processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "ALONE", {})
        patch.setattr(run, "PROCESSES", {x: compute or check for x, check in PROCESSES.items() if x == name})
        patch.setattr(run, "TOGETHER", {x: check for x, check in TOGETHER.items() if x == name})
        [found] = run.run_checks(setting, 60.0, [name])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*PROCESSES, *TOGETHER])
def test_a_check_of_all_ranks_passes_over_gloo(name):
    found = found_by(name)
    assert found.is_ok, found


@pytest.mark.ranks
def test_sums_in_another_order_than_that_of_ranks_fail(monkeypatch):
    def disordered(group):
        return device_order_group.DeviceOrderGroup(group)

    monkeypatch.setattr(mesh, "RankOrderGroup", disordered)
    assert found_by("sums in rank order").is_ok
    monkeypatch.setattr(
        device_order_group, "sum_in_rank_order", lambda parts: parts.flip(0).cumsum(0, dtype=parts.dtype)[-1]
    )
    found = found_by("sums in rank order")
    assert not found.is_ok and "not in rank order" in found.found


@pytest.mark.ranks
def test_native_sums_fail_where_their_order_depends_on_the_place_in_a_message(monkeypatch):
    """As a ring's does: what is fused lies elsewhere than what is summed apart."""

    def ring(group):
        return OtherOrderGroup(group, "position", lambda: True, lambda: None)

    monkeypatch.setattr(mesh, "RankOrderGroup", ring)
    found = found_by("native sums")
    assert not found.is_ok and "fused is not apart" in found.found and "not in rank order" not in found.found


@pytest.mark.ranks
def test_rows_that_arrive_elsewhere_fail(monkeypatch):
    right = collectives.all_to_all
    monkeypatch.setattr(collectives, "all_to_all", lambda *given: right(*given).flip(0) + 1)
    found = found_by("all-to-all")
    assert not found.is_ok and found.found.startswith("rank 0: 20 rounds of uneven parts")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("check", "sentences"),
    [
        (lambda setting: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda setting: run.os._exit(1), "its process ended without an answer"),
        (lambda setting: time.sleep(60), "no answer within 1 s"),
    ],
)
def test_a_check_that_raises_crashes_or_hangs_has_failed_and_the_others_run(monkeypatch, check, sentences):
    monkeypatch.setattr(run, "ALONE", {"broken": check, "fine": lambda setting: (True, "fine")})
    monkeypatch.setattr(run, "PROCESSES", {})
    monkeypatch.setattr(run, "TOGETHER", {})
    broken, fine = run.run_checks(CPU, 1.0, ["broken", "fine"])
    assert broken == CheckResult(name="broken", is_ok=False, found=sentences)
    assert fine.is_ok


def test_sizes_go_up_by_fours_to_the_largest():
    assert sizes(64 * 2**20)[:2] == [4096, 16384] and sizes(64 * 2**20)[-1] == 64 * 2**20
    assert sizes(100) == [100]


@pytest.mark.parametrize(("ranks", "names"), [(1, [*ALONE, *PROCESSES]), (2, [*ALONE, *PROCESSES, *TOGETHER])])
def test_one_rank_checks_what_needs_no_other(monkeypatch, ranks, names):
    sentences = []

    def forked(name, bodies, seconds):
        sentences.append((name, len(bodies)))
        return CheckResult(name=name, is_ok=True, found=""), [""] * len(bodies)

    monkeypatch.setattr(run, "_forked", forked)
    list(run.run_checks(Setting(device="cpu", ranks=ranks)))
    each = [(name, ranks if name in TOGETHER or name in PROCESSES else 1) for name in names]
    assert list(dict.fromkeys(sentences)) == each and sentences.count(("repeatability", ranks)) == 2
    sentences.clear()
    list(run.run_checks(Setting(device="cpu", ranks=ranks), names=["offload", "all-to-all"]))
    assert [name for name, _ in sentences] == [name for name in names if name in ("offload", "all-to-all")]
