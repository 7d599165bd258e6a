"""The program `bitproof`, also `python -m bitproof`: what must be in order before anything else is imported."""

import sys

from bitproof.harness.program import interrupts, output


def main() -> int:
    """Run the command that the command line names; returns its exit status, which no signal changes any more."""
    interrupts.end_at_once()
    output.fill_closed_descriptors()
    from bitproof.harness import cli

    status = cli.main()
    interrupts.ignore()
    return status


if __name__ == "__main__":
    sys.exit(main())
