"""GPUs that are unlike fail; those that do not reach each other are named."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.powers.doctor import topology
from bitproof.harness.powers.doctor.setting import Setting
from bitproof.harness.powers.doctor.topology import Gpu, check_topology

CPU = Setting(device="cpu", ranks=3)
GPU = Gpu("H200", "9.0", 132, frozenset({0, 1, 2}))


def of(monkeypatch, *gpus: Gpu) -> tuple[bool, str]:
    monkeypatch.setattr(topology, "gpus_of", lambda setting: [*gpus])
    return check_topology(CPU)


def test_gpus_of_one_kind_pass() -> None:
    assert check_topology(CPU) == (True, "3 x CPU, 0.0, 1 multiprocessors; each reads the others' memory")


def test_a_gpu_of_another_kind_fails_and_is_named(monkeypatch) -> None:
    for other in (replace(GPU, name="H100"), replace(GPU, capability="8.0"), replace(GPU, multiprocessors=114)):
        is_ok, found = of(monkeypatch, GPU, GPU, other)
        assert not is_ok and found.startswith(f"GPU 2 is {other.name}, {other.capability}, ")


def test_gpus_that_go_through_the_host_are_named(monkeypatch) -> None:
    is_ok, found = of(monkeypatch, GPU, GPU, replace(GPU, peers=frozenset({0})))
    assert is_ok and found.endswith("; 1 pairs go through the host, first (2, 1)")
