"""The shape of a static tree as a file lists it, by rank paths: (0, 2) is the third candidate after the first.

Numbers and YAML; must not know odds, tokens or how such a tree is drafted.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tpspec.errors import UserError

RankPath = tuple[int, ...]
CHOICES = "choices"  # the option that names such a file
MOST_RANKS = 64  # of candidates after a node: no draft has more tokens


def read_choices(file: str) -> list[RankPath]:
    """From a JSON or YAML file, as [[0], [0, 0], [1]]. UserError where it lists no rank paths."""
    try:
        listed = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, yaml.YAMLError) as error:  # RecursionError is one of them
        raise UserError(f"draft.options: choices {file}: cannot be read as JSON or YAML: {error}") from error
    if not isinstance(listed, list) or not listed or not all(map(_is_rank_path, listed)):
        raise UserError(
            f"draft.options: choices {file}: should be a list of rank paths, such as [[0], [0, 0], [1]], with ranks "
            f"from 0 to {MOST_RANKS - 1}"
        )
    return [tuple(ranks) for ranks in listed]


def _is_rank_path(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_rank, value))


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_RANKS
