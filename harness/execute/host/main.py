"""The host process, `python -m bitproof.harness.execute.host.main`: imports torch once, and forks all other processes.

It reads a request per line from standard input. It writes to a separate pipe, which a stray print of a library cannot
damage. For each request it writes any number of events, then an answer or a Problem (an error).

It never runs autograd, traces, loads a user's code or touches a device, so the processes that it forks start with a
freshly imported torch. It ends, together with its descendants, at the end of standard input or, on Linux, when its
parent dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bitproof.harness.capture.recording_files import warm_up
from bitproof.harness.execute.failures import Problem
from bitproof.harness.execute.host.answerer import Answerer
from bitproof.harness.execute.host.worker import preload
from bitproof.harness.execute.requests import REQUESTS, Request
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import send
from bitproof.harness.processes.process import adopt_orphans, die_with_parent, end_children, keep_private
from bitproof.harness.runtime import garbage
from bitproof.harness.runtime.sources import installation

_LAST_MOMENT = 0.3  # seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=int, help="file descriptor to answer through")
    parser.add_argument("--parent", type=int, help="pid of a parent to end with")
    parser.add_argument("--signalled", action="store_true", help="get a signal when the parent's thread ends")
    parser.add_argument("--temporary", type=Path, help="folder to remove where the parent cannot")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        if options.signalled:  # the end of input may never come: other children of the parent inherited our input
            die_with_parent(options.parent, signal.SIGTERM)
        serve(options)
    finally:
        # A second SIGTERM must not interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children(but=set())
        if options.temporary and options.parent and _is_gone(options.parent):
            shutil.rmtree(options.temporary, ignore_errors=True)


def serve(options: argparse.Namespace) -> None:
    # Processes that a system leaves behind become our children, so that we can end them.
    adopt_orphans()
    os.set_inheritable(options.answers, False)
    keep_private(options.answers)
    faulthandler.enable()
    # A hung host writes its stack into its log on this signal.
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("bitproof").setLevel(logging.DEBUG if options.verbose else logging.INFO)

    def answer_with(message: Any) -> None:
        send(options.answers, message)

    preload()

    set_determinism(0)  # imports 800 modules of torch, 0.7 s; forked ranks inherit them
    warm_up()
    fingerprint = installation()  # now, as loaded modules do not depend on any request yet
    gc.freeze()  # forked processes never collect garbage among the imports
    garbage.collect_rarely()
    gc.enable()

    answerer = Answerer(answer_with, hangup=0, fingerprint=fingerprint)
    try:
        for line in sys.stdin:
            request: Request[Any] = framing.read(line, *REQUESTS)
            try:
                answer = answerer.answer(request)
            except Exception as error:
                traceback.print_exc()
                answer_with(Problem.of(error, request.about))
            else:
                answer_with(answer)
    finally:
        answerer.close()


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _is_gone(parent: int) -> bool:
    # The kernel closes this process's input shortly before its parent's id changes.
    limit = time.monotonic() + _LAST_MOMENT
    while os.getppid() == parent and time.monotonic() < limit:
        time.sleep(0.01)
    return os.getppid() != parent


if __name__ == "__main__":
    main()
