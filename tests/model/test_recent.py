"""Layers with a window compute the same whether they have the slots that all have or few of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.recent import told, whole_and_windowed
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.cache.pages import PagePool
from tpspec.cache.windows import WindowedPool
from tpspec.comm.communicator import OneRank
from tpspec.model.loader import Loader
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.caches import kv_bytes, recent_slots, target_slots
from tpspec.topology.shards import split

CPU = torch.device("cpu")
GEMMA4 = ("gemma4", "gemma4_moe", "gemma4_small")  # whose layers keep heads of two sizes, or nothing
WINDOWED = ("gemma2", "gemma3", *GEMMA4, "gpt_oss", "llama4", "mistral", "phi3")  # with a window of 8, or chunks of 7
NUM_RECENT = 96
NUM_LEAST = 176  # tokens that windows need for so few requests and rows: no fewer than all need
FEW = {"serve": {"max_running": 3}, "engine": {"max_rows": 24}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: tiny(kind, root / kind) for kind in WINDOWED}


@pytest.mark.parametrize("more", [{}, {"compiled": False}, {"fixed_rows": 40}, {"small_cache": True}], ids=str)
@pytest.mark.parametrize("kind", WINDOWED)
def test_logits_have_the_same_bits(kind: str, more: dict[str, bool], folders: dict[str, Path]) -> None:
    """Stands against a key that is written or looked for where the other layers have it, in a chunk, a tree, behind a
    path that moved, and in pieces."""
    shard = split(ModelShape.of(folders[kind]), (1.0, 0.7))[0]
    loader = Loader.open(folders[kind], shard, torch.float32, CPU)
    pools = whole_and_windowed(NUM_RECENT)
    whole, windowed = (
        told(loader.decoder(OneRank(), 256, num_recent=num_recent, **more), pool)
        for pool, num_recent in zip(pools, (0, NUM_RECENT), strict=True)
    )
    assert torch.equal(whole, windowed)


@pytest.mark.parametrize("kind", ["gemma3", *GEMMA4])
def test_the_cache_is_as_large_as_is_counted(kind: str, folders: dict[str, Path]) -> None:
    """Stands against a saving on paper alone: the sum of all tensors is what memory checks and `check` say."""
    shape = ModelShape.of(folders[kind])
    for shard in split(shape, (1.0, 2.0)):
        loader = Loader.open(folders[kind], shard, torch.bfloat16, CPU)
        store = loader.decoder(OneRank(), 256, num_recent=NUM_RECENT).store
        tensors = [cells.numbers_GSE for cells in store.cells]
        assert sum(one.nbytes for one in tensors) == kv_bytes(shape, shard, "bfloat16", 256, NUM_RECENT)
    assert kv_bytes(shape, shard, "bfloat16", 256, NUM_RECENT) < kv_bytes(shape, shard, "bfloat16", 256)


SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=5)}


@pytest.mark.parametrize("sampling", ["sampled", *slowly("greedy")])
@pytest.mark.parametrize(
    ("kind", "source"),
    [*(("gemma3", source) for source in ("none", "ngram", "lookahead", "early_exit")), ("gemma4", "early_exit"),
     ("gemma4_small", "ngram"), ("llama4", "ngram")],
)  # fmt: skip
def test_texts_are_those_of_a_whole_cache(kind: str, source: str, sampling: str, folders: dict[str, Path]) -> None:
    """Stands against a prefix whose window is gone, a draft in the target's cache that reads or writes another's keys,
    and rows that find no place: six texts, three at a time, two of which begin as another did."""
    begin = tuple(range(3, 40))
    prompts = [begin, (9, 8, 7) * 5, (*begin, 50, 51), (4, 5) * 20, begin[:20], (6,) * 30]
    requests = [Request(i, prompt, 40, SAMPLINGS[sampling]) for i, prompt in enumerate(prompts)]
    texts, pools = [], []
    for num_tokens in (2048, NUM_LEAST):
        draft = {"source": source} | ({} if source == "none" else {"tokens": 5})
        made = topology(folders[kind], 2, draft=draft, cache={"tokens": num_tokens}, **FEW)
        told = serve(made, requests, watch=lambda engine: pools.append(type(engine.pool)))
        assert source == "none" or told.stats[-1].drafted > 0
        texts.append(told.texts())
    assert pools == [WindowedPool] * 2 + [PagePool] * 2
    assert texts[0] == texts[1]


def test_sizes_are_for_as_many_as_may_run() -> None:
    """Three texts with windows that begin anywhere, and the rows of a round, in pages of 16."""
    made = topology("google/gemma-3-27b-it", cache={"tokens": 32768}, **FEW)
    shape = ModelShape(62, 1, 1, 1, 1, 1, 1, False, False, "gemma3_text", window=1024, num_windowed=52)
    assert recent_slots(made, shape) == (3 * (64 + 2) + 2) * 16
    assert recent_slots(topology("x", cache={"tokens": 3000}, **FEW), shape) == 0
    assert target_slots(made) == 32768
