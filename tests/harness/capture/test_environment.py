from __future__ import annotations

import json

import pytest

from bitproof.harness.capture.environment import environment_of_keys, environment_variables
from bitproof.harness.capture.manifest import build_manifest
from bitproof.harness.case import Case
from bitproof.harness.machine.devices import Placement

SECRET = "s3cr3t" * 3
SECRETS = [
    *("TORCH_HUB_TOKEN", "PYTORCH_API_KEY", "TORCH_HUBTOKEN", "NCCL_SECRET", "CUDA_LICENSE_KEY", "OMP_PASSWORD"),
    *("TORCHINDUCTOR_REDIS_PASSWORD", "TORCHINDUCTOR_AUTH", "TORCH_COMPILE_API_KEY", "PYTORCH_JIT_TOKEN", "torch_key"),
]
SECRET_VALUES = [
    f"redis://me:{SECRET}@host:1",
    f"https://host/x?sig={SECRET}",
    f"Bearer {SECRET}",
    "ghp_" + "a1B2" * 9,
    "hf_" + "a1B2" * 8,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.s3cr3ts3cr3ts3cr3t",
    "0123456789abcdef" * 2,
    f"backend=x;password={SECRET}",
]


def test_what_can_change_a_bit_is_reported_and_nothing_else(monkeypatch):
    for name in ("OMP_TEST", "NCCL_TEST", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_BLAS_PREFER_CUBLASLT", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "1")
    for name in ("TORCHELASTIC_TEST", "SECRET_TEST", "TORCH_HOME", "TORCH_ANYTHING", "PYTORCH_BUILD_URL"):
        monkeypatch.setenv(name, "2")
    found = environment_variables()
    assert {"OMP_TEST", "NCCL_TEST", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_BLAS_PREFER_CUBLASLT"} <= found.keys()
    assert found["PYTHONHASHSEED"] == "1"
    assert "2" not in found.values()


@pytest.mark.parametrize("name", SECRETS)
def test_what_is_called_as_secrets_are_stands_nowhere(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)
    for found in (environment_variables(), environment_of_keys()):
        assert name not in found and SECRET not in json.dumps(found)


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_of_a_value_that_looks_like_a_secret_a_digest_is_reported(monkeypatch, value):
    monkeypatch.setenv("TORCHINDUCTOR_REMOTE_CACHE", value)
    first = environment_variables()["TORCHINDUCTOR_REMOTE_CACHE"]
    assert first.startswith("withheld, sha256 ") and environment_of_keys()["TORCHINDUCTOR_REMOTE_CACHE"] == first
    monkeypatch.setenv("TORCHINDUCTOR_REMOTE_CACHE", value + "x")
    assert environment_variables()["TORCHINDUCTOR_REMOTE_CACHE"] != first


@pytest.mark.parametrize(
    "value",
    ["1", "expandable_segments:True,max_split_size_mb:128", "0-3,8-11", "/opt/libs/some/long/path/of/2.13.0/x.so"],
)
def test_settings_are_reported_as_they_are(monkeypatch, value):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert environment_variables()["PYTORCH_CUDA_ALLOC_CONF"] == value


def test_a_key_changes_with_every_variable_of_torch_without_holding_its_value(monkeypatch):
    monkeypatch.setenv("TORCH_SOMETHING_NEW", "a path of mine")
    before = environment_of_keys()
    assert "a path of mine" not in json.dumps(before)
    monkeypatch.setenv("TORCH_SOMETHING_NEW", "another")
    assert environment_of_keys() != before


def test_a_manifest_holds_no_secret(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TORCHINDUCTOR_REMOTE_CACHE", SECRET_VALUES[0])
    about = {"determinism": {}, "graph": None, "fault": None, "systems": []}
    found = build_manifest(
        Case(name="a", family="toys", reference="eager"),
        "eager",
        "first",
        Placement(),
        gpu_environments=[{"NCCL_X": SECRET_VALUES[1]}],
        **about,
    )
    assert SECRET not in json.dumps(found.to_dict())
