"""Start `bitproof` and `python -m bitproof`: set up signals and streams before anything else is imported."""

from __future__ import annotations


def main() -> int:
    """Run the command of the command line and return its exit status."""
    # First of all: the imports below take long enough for a user to press Ctrl-C.
    _end_when_interrupted()
    from bitproof.harness.runtime import garbage, interrupts, output, text_loader

    garbage.collect_rarely()
    text_loader.claim()
    interrupts.end_at_once()
    output.fill_closed_descriptors()
    # Only now, with signals and streams set up: this imports most of the code that a command needs.
    from bitproof.harness import cli

    status = cli.main()
    # A signal during the interpreter's shutdown would replace the status.
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
            # At once, without the cleanup of a half-imported interpreter; 3 is the status of a run that is not
            # judged.
            os._exit(3)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # Under nohup SIGHUP is ignored, and must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


if __name__ == "__main__":
    import sys

    sys.exit(main())
