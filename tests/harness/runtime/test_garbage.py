from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

COMMAND = """
import gc, sys
from bitproof.__main__ import main
sys.argv = ["bitproof", "list"]
before = gc.get_threshold()[0]
try:
    main()
finally:
    print("THRESHOLD", gc.get_threshold()[0] > 10 * before, file=sys.stderr)
"""


def test_a_command_looks_for_garbage_seldom():
    found = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60)
    assert "THRESHOLD True" in found.stderr, found.stderr
    assert "moe_seq" in found.stdout
