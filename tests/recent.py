"""What a decoder says over a cache whose layers with a window have few slots of their own, and over a whole one."""

from __future__ import annotations

import torch

from tpspec.cache.pages import PagePool
from tpspec.cache.windows import WindowedPool
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder

PAGE, WINDOW = 4, 8
IDS = tuple(torch.randint(3, 263, (140,), generator=torch.Generator().manual_seed(0)).tolist())
TREE = (-1, 0, 0, 1, 1, 2)  # rows 0, 2 and 5 are a path


def whole_and_windowed(num_recent: int) -> tuple[PagePool, WindowedPool]:
    return PagePool(64, PAGE), WindowedPool(64, PAGE, WINDOW, num_recent // PAGE)


def told(
    decoder: Decoder, pool: PagePool, *, num_steps: int = 12, chunks: tuple[int, ...] = (30, 8, 1, 38)
) -> torch.Tensor:
    """Two texts that grow by turns, so that both lie in pieces; a tree, the path that is kept of it, and what is said
    behind it."""
    made: list[torch.Tensor] = []

    def span(seq: int, start: int, tokens: tuple[int, ...], parents: tuple[int, ...] | None = None) -> Span:
        stop = start + len(tokens)
        pool.pass_by(seq, start)
        pool.grow(seq, stop)
        pool.grow_recent(seq, stop)
        recent = pool.recent_runs(seq, start, stop)
        return Span(seq, start, tokens, pool.runs(seq, stop), len(tokens), parents, recent)

    start = 0
    for count in chunks:
        made += [decoder.forward([span(seq, start, IDS[seq + start : seq + start + count])]).clone() for seq in (0, 1)]
        start += count
    rows = IDS[100:106]
    made.append(decoder.forward([span(0, start, rows, TREE), span(1, start, IDS[50:53])]).clone())
    slots, recent = pool.slots(0, start, start + 6), pool.recent_slots(0, start, start + 6)
    path = ([2, 5], [1, 2])
    moves = [[place[node] for node in nodes] for place in (slots, recent) if place for nodes in path]
    decoder.store.move(*moves)
    pool.shrink(0, start + 4)
    for step in range(num_steps):
        made.append(decoder.forward([span(seq, start + 3 + step, (IDS[seq + step],)) for seq in (0, 1)]).clone())
    return torch.cat(made)
