"""How the commands read their options. Knows no other room."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tpspec.errors import UserError


class Parser(argparse.ArgumentParser):
    """A wrong command is one line, as every other error; an option has one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")
