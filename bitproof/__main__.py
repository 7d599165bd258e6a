"""`bitproof` and `python -m bitproof`: the command, whatever else is named `harness` where Python looks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> int:
    """Run the command with bitproof's own packages, and return its exit status."""
    runpy.run_path(str(Path(__file__).parents[1] / "harness" / "program" / "start.py"))
    from harness import __main__ as program

    return program.main()


if __name__ == "__main__":
    sys.exit(main())
