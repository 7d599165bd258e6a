"""Standard output and standard error that cannot end a command, and that carry nothing which a reader would obey.

A pipe's reader may end, and a disk may be full: what a run found must not depend on that. After
the first failure the rest is dropped, and at its end the command says what that means for its exit status.

All that a command prints goes through `SafeStream.write`, so that no text of others moves a terminal's cursor, and none
is a command to the CI system that keeps the log: GitHub runs lines that begin with `::`, Azure Pipelines and TeamCity
what follows `##vso[` or `##teamcity[`. Only what is made here to be obeyed, a table's colours, goes by `styled`.
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
    """A text, or a part of one, as a terminal and the log of a CI system may have it. JSON stays the same JSON."""
    return _BRACKETED_COMMAND.sub(r"#\\u0023", _LEADING_COMMAND.sub(r"\1\\x3a", printable(text)))


class SafeStream:
    """A text stream whose `write` and `flush` never fail. `lost` is the first failure; a reader that left is none.

    Characters that the stream's encoding lacks are spelled out, and so is what a reader would obey.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 (lives as long)
        self.lost = OSError(errno.EBADF, "it is closed") if stream is None else None

    def write(self, text: str) -> int:
        """Write a text, as `shown`; returns its length."""
        self.write_as_it_is(shown(text))
        return len(text)

    def write_as_it_is(self, text: str) -> int:
        """Write a text that was made to be obeyed where it has colours; returns its length."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write_as_it_is(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after the other."""
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
    """A stream that takes escape sequences, over one that else does not."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self.write = stream.write_as_it_is

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(stream: TextIO) -> TextIO:
    """The stream to write colours to. Who writes there answers for the text of others in it."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, SafeStream) else stream


@contextlib.contextmanager
def safe_output() -> Iterator[SafeStream]:
    """Make this process's standard output and error safe, flushed in the end; yields standard output."""
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
    """Open nothing at those of descriptors 0 to 2 that are closed: else a log or a pipe would be put there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
