"""What a run prints outlives its reader. Imports no torch."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """A stream that goes on as another one when nobody reads it any more, as after Ctrl-C in ``... | tee log``.

    Args:
        stream: of a file descriptor, which is what changes: others may have it too.
        instead: where the rest goes; without it, or when nobody reads that either, nowhere.
    """

    def __init__(self, stream: TextIO, instead: TextIO | None) -> None:
        self._stream, self._instead = stream, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._go_on()
            if getattr(self._stream, "write_through", False):  # PYTHONUNBUFFERED: nothing was kept
                return self.write(text)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._go_on()

    def _go_on(self) -> None:
        """What could not be written is in the buffer still, if there is one."""
        with open(os.devnull, "w") as nowhere:
            os.dup2((self._instead or nowhere).fileno(), self._stream.fileno())
        self._instead = None
        self.flush()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, a closed pipe is no error: it would end a run that is about to save its last checkpoint. The standard
    output goes on as the error output. Lines are seen when they are complete, in a pipe too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    out, err = _Lasting(sys.stdout, sys.stderr), _Lasting(sys.stderr, None)
    with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, err)):
        try:
            yield
        finally:
            out.flush()
            err.flush()
