"""What a host lets pass of a source that fails."""

from __future__ import annotations

import pytest

from tests.draft.liar import Liar
from tests.draft.table import ask
from tpspec.draft.protocol import Ask
from tpspec.engine.hosts import InlineHost
from tpspec.errors import WorldFailure
from tpspec.tokens import TokenTree


class Lost(Liar):
    def propose(self, asks: list[Ask]) -> list[TokenTree]:  # type: ignore[override]
        raise WorldFailure("rank 1 is gone")


def test_a_lost_rank_is_not_a_failed_draft() -> None:
    """Against a rank that decodes on without drafts after a draft's collective failed: the next one hangs."""
    with pytest.raises(WorldFailure, match="rank 1 is gone"):
        InlineHost(Lost(263)).ask([ask(0, [1, 2])])
