"""`bitproof` and `python -m bitproof`: the command, whatever else is named `harness` where Python looks."""

from __future__ import annotations


def main() -> int:
    """Run the command with bitproof's own packages, and return its exit status."""
    _end_when_interrupted()
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).parents[1] / "harness" / "program" / "start.py"))
    from bitproof.harness import __main__ as program

    return program.main()


def _end_when_interrupted() -> None:
    """From the first moment, do as harness/program/interrupts.py does, which takes longer to load."""
    import os
    import signal

    def end(number: int, frame: object) -> None:
        try:
            os.write(2, b"bitproof: interrupted\n")
        finally:
            os._exit(3)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


if __name__ == "__main__":
    import sys

    sys.exit(main())
