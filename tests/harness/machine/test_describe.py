from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bitproof.harness.capture.manifest import machine as machine_of_manifest
from bitproof.harness.machine import describe as machine
from bitproof.harness.machine.describe import describe_machine


def test_torch_has_the_version_that_it_gives_itself():
    assert describe_machine()["torch"] == str(torch.__version__)
    assert machine_of_manifest()["torch"] == str(torch.__version__)


def test_a_build_that_the_package_metadata_leave_out_is_reported(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__all__ = ['__version__']\n__version__ = '2.15.0+cu132'\ncuda = '13.2'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    assert describe_machine()["torch"] == "2.15.0+cu132"


def test_without_that_file_the_metadata_count(monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    assert describe_machine()["torch"] == importlib.metadata.version("torch")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert describe_machine()["torch"] == importlib.metadata.version("torch")


@pytest.mark.ranks
def test_reporting_loads_no_torch():
    code = "from bitproof.harness.machine.describe import describe_machine as tell; tell()"
    code += "; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
