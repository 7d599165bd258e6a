"""Standard output and standard error that cannot end a command, and never contain terminal or CI commands.

A pipe's reader may end, and a disk may be full: a run's results must not depend on that. After the first failure the
rest is dropped, and at its end the command reports the effect on its exit status.

All output of a command goes through `SafeStream.write`, so that no foreign text moves a terminal's cursor or acts as a
command to the CI system that stores the log: GitHub runs lines that begin with `::`, Azure Pipelines and TeamCity text
after `##vso[` or `##teamcity[`. Only our own escape sequences, for a table's colours, go through `styled`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from bitproof.harness.printable import printable

_LEADING_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_BRACKETED_COMMAND = re.compile(r"##(?=\w*\[)")


def shown(text: str) -> str:
    r"""Return a text made safe for a terminal and the log of a CI system: `::error` becomes `\x3a:error`.

    JSON keeps its meaning.
    """
    return _BRACKETED_COMMAND.sub(r"#\\u0023", _LEADING_COMMAND.sub(r"\1\\x3a", printable(text)))


class SafeStream:
    """A text stream whose `write` and `flush` never fail. `lost` is the first failure, or None.

    Characters that the stream's encoding lacks are escaped, and so are terminal and CI commands. A reader that ended is
    no failure.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 (lives as long)
        self.lost = OSError(errno.EBADF, "it is closed") if stream is None else None

    def write(self, text: str) -> int:
        """Write a text, made safe by `shown`; returns its length."""
        self.write_as_it_is(shown(text))
        return len(text)

    def write_as_it_is(self, text: str) -> int:
        """Write our own text with escape sequences for colours; returns its length."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write_as_it_is(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts in sequence."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        """Remember the failure, and redirect the descriptor to /dev/null: the rest of the buffer goes there."""
        if error.errno != errno.EPIPE:
            self.lost = self.lost or error
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class _Styled:
    """A stream that passes escape sequences, over a stream that escapes them."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self.write = stream.write_as_it_is

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(stream: TextIO) -> TextIO:
    """Return the stream to write colours to. The writer must escape foreign text in it."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, SafeStream) else stream


@contextlib.contextmanager
def safe_output() -> Iterator[SafeStream]:
    """Context in which standard output, which it yields, and error are safe; both are flushed at the end."""
    streams = sys.stdout, sys.stderr
    out, err = (SafeStream(stream) for stream in streams)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = streams


def fill_closed_descriptors() -> None:
    """Open /dev/null at closed descriptors among 0 to 2: else a log or a pipe would get their number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor: this one
