"""How drafts are judged: rules, sampling and noise, as pure functions of logits. Knows the nouns and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.verify.match import Match
from tpspec.verify.rejection import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.verify.rows import Rule

RULES: dict[str, Callable[[], Rule]] = {"match": Match, "rejection": Rejection}


def rule(name: str) -> Rule:
    """The rule of acceptance called `name`. Raises UserError, with the choices, for any other name."""
    if name not in RULES:
        raise UserError(f"unknown rule of acceptance {name!r}; choose one of: {', '.join(RULES)}")
    return RULES[name]()
