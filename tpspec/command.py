"""How the commands read their options, and how they end. Knows no other room."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from tpspec.errors import UserError
from tpspec.output import output_in_words

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130  # as a shell says of what Ctrl-C has ended


class Parser(argparse.ArgumentParser):
    """A wrong command is one line, as every other error; an option has one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def ended(run: Callable[[], int], tell: Callable[[UserError], object]) -> int:
    """The exit code of `run`. What a user can cause ends in words instead of a traceback: `tell` says them, unless a
    process of ours has, or nobody wants to know."""
    try:
        with output_in_words():
            return run()
    except UserError as error:
        if str(error):
            tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
