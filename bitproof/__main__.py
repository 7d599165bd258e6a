"""Start `bitproof` and `python -m bitproof`: set up signals and streams before anything else is imported."""

from __future__ import annotations


def main() -> int:
    """Run the command of the command line and return its exit status.

    Afterwards signals are ignored, so that they cannot change the status.
    """
    _end_when_interrupted()
    from bitproof.harness.runtime import garbage, interrupts, output, text_loader

    garbage.look_seldom()
    text_loader.claim()
    interrupts.end_at_once()
    output.fill_closed_descriptors()
    from bitproof.harness import cli

    status = cli.main()
    interrupts.ignore()
    return status


def _end_when_interrupted() -> None:
    """End the process at a signal, as harness/runtime/interrupts.py does; used until that module is loaded."""
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
