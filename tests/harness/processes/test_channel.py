"""Messages arrive as they were sent, whatever pieces a pipe makes of them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import pytest

from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import Inlet, send


@dataclass(frozen=True)
class Said:
    """A message."""

    text: str


@pytest.fixture
def ends():
    reader, writer = os.pipe()
    inlet = Inlet(reader)
    yield inlet, writer
    inlet.close()


def test_lines_arrive_whole_and_in_order_and_the_end_is_seen(ends):
    inlet, writer = ends
    os.write(writer, b"fir")
    inlet.read()
    assert (list(inlet.lines), inlet.is_over) == ([], False)
    os.write(writer, b"st\n\nthi")
    os.write(writer, b"rd\nno end")
    os.close(writer)
    inlet.read()
    assert (list(inlet.lines), inlet.is_over) == ([b"first", b"", b"third"], True)


def test_one_who_waits_gets_a_line_that_comes_in_pieces_and_gives_up_in_time(ends):
    inlet, writer = ends
    os.write(writer, b"a piece")
    began = time.monotonic()
    assert inlet.wait(0.2) is None
    assert 0.2 <= time.monotonic() - began < 5
    later = threading.Timer(0.1, lambda: (os.write(writer, b", and the rest\n"), os.close(writer)))
    later.start()
    assert inlet.wait(None) == b"a piece, and the rest"
    assert inlet.wait(None) is None
    assert inlet.is_over
    later.join()


def test_a_message_longer_than_a_pipe_goes_through(ends):
    inlet, writer = ends
    message = Said("x" * 10_000_000)
    thread = threading.Thread(target=lambda: (send(writer, message), os.close(writer)))
    thread.start()
    line = inlet.wait(20)
    thread.join()
    assert line is not None
    assert framing.read(line, Said) == message


def test_nobody_reads_any_more(ends):
    inlet, writer = ends
    inlet.close()
    inlet.close()
    with pytest.raises(BrokenPipeError):
        send(writer, Said("to nobody"))
    os.close(writer)
