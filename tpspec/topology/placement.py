"""Where a topology's drafter runs, and how a file says so. Knows no other key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the drafter runs; rank is None for inline. In YAML: inline | {dedicated: 7} | {gaps: 3}."""

    kind: Literal["inline", "dedicated", "gaps"] = "inline"
    rank: int | None = None

    @classmethod
    def parse(cls, value: object) -> Placement:
        match value:
            case Placement():
                return value
            case "inline":
                return cls()
            case {"dedicated": int(rank)} if _is_lone_rank(value, rank):
                return cls("dedicated", rank)
            case {"gaps": int(rank)} if _is_lone_rank(value, rank):
                return cls("gaps", rank)
            case _:
                raise ValueError("no placement")

    def plain(self) -> str | dict[str, int]:
        return "inline" if self.rank is None else {self.kind: self.rank}


def _is_lone_rank(value: object, rank: int) -> bool:
    return isinstance(value, dict) and len(value) == 1 and not isinstance(rank, bool) and rank >= 0
