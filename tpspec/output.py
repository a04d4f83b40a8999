"""Standard output as the front doors print to it: where it takes no more, that ends in words and not in a traceback.

Must not know what is printed.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from tpspec.errors import Unread, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Output:
    """A stream that raises UserError where it cannot be written: Unread where its reader has gone, as `head` does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._in_words():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._in_words():
            self._stream.flush()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._give_up()
            if isinstance(error, BrokenPipeError):
                raise Unread from error
            raise UserError(f"standard output: cannot be written: {error.strerror}") from error
        except UnicodeEncodeError as error:
            raise UserError(
                f"standard output: {error.encoding} has no {error.object[error.start]!r}; should be UTF-8, "
                "as with PYTHONIOENCODING=utf-8"
            ) from error

    def _give_up(self) -> None:
        """Python tries once more when it ends, with a traceback of its own."""
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def output_in_words() -> Iterator[None]:
    """What is printed meanwhile goes through Output, all of it by the end."""
    output = Output(sys.stdout)
    with redirect_stdout(cast("TextIO", output)):
        yield
        output.flush()
