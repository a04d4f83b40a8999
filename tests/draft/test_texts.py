"""What heads remember of texts: in blocks, as if it were one tensor, and no more than plans count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given as drawn, settings
from hypothesis.strategies import DataObject, data, integers, sampled_from

from tests.checkpoints import tiny
from tests.draft.heads import mtp
from tests.draft.heads.checked import given
from tests.draft.heads.eagle import Target, first, third
from tests.worlds import topology
from tpspec.draft.eagle import EagleRun, Head
from tpspec.draft.eagle_checkpoint import load_head
from tpspec.draft.mtp import load_mtp
from tpspec.draft.protocol import Taps
from tpspec.draft.texts import Features, OverTexts, as_it_is
from tpspec.model.batch import Span
from tpspec.published.shape import ModelShape
from tpspec.topology.caches import BLOCK, draft_slots, head_cache, layer_cache, target_slots
from tpspec.topology.config import Topology
from tpspec.topology.sizes import last_layer


@settings(max_examples=100, deadline=None)
@drawn(data=data())
def test_features_are_read_as_they_were_written(data: DataObject) -> None:
    """Texts go on, and are told anew from somewhere; a piece may lie in several blocks, or end where one does."""
    length, longest, edges = 0, 0, [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]
    features, whole = Features(2, torch.float32, torch.device("cpu")), torch.zeros(9 * BLOCK, 2)
    for _ in range(data.draw(integers(1, 4))):
        first = min(length, data.draw(integers(0, length)))
        size = edges[data.draw(integers(0, len(edges) - 1))]
        rows = torch.randn(size, 2)
        features.write(first, rows)
        whole[first : first + size] = rows
        length = first + size
        longest = max(longest, length)
        start = data.draw(integers(0, length))
        stop = data.draw(integers(0, length))
        assert torch.equal(features.read(start, stop), whole[start:stop])
        assert longest <= len(features._blocks) * BLOCK < longest + BLOCK


@settings(max_examples=60, deadline=None)
@drawn(data=data())
def test_texts_that_begin_alike_share_what_is_known_of_that(data: DataObject) -> None:
    """However they are told and read, in pieces, again from somewhere, or before all of it is known. Stands against a
    block of another text's, one that is not whole, and sixteen copies of a prompt that sixteen texts begin with."""
    run = OverTexts(as_it_is, torch.float32, torch.device("cpu"))
    beginning = [number % 7 for number in range(3 * BLOCK)]
    steps = sampled_from([2 * BLOCK, BLOCK - 1, 40])
    texts = {seq: beginning[: data.draw(integers(0, len(beginning)))] + [100 + seq] * data.draw(integers(1, BLOCK + 9))
             for seq in range(3)}  # fmt: skip
    for seq, tokens in texts.items():
        told = read = 0
        while read < len(tokens):
            again, told = told - data.draw(integers(0, told)), min(told + data.draw(steps), len(tokens))
            before = data.draw(integers(0, again))  # what others have read, if it begins anew
            rows = {seq: (again if before == 0 else before, _made_of(tokens)[before or again : told])}
            run.observe(Taps(rows, {seq: _made_of(tokens)[:before]} if before else {}))
            start, stop = read - data.draw(integers(0, read)), min(read + data.draw(steps), told + 3, len(tokens))
            run._read([Span(seq, start, tuple(tokens[start:stop]), ((start, stop - start),), 1)])
            read = max(read, min(stop, told))
    for seq, tokens in texts.items():
        assert torch.equal(run._texts[seq].features.read(0, len(tokens)), _made_of(tokens))
    whole = {tuple(tokens[:stop]) for tokens in texts.values() for stop in range(BLOCK, len(tokens) + 1, BLOCK)}
    held = {id(block) for text in run._texts.values() for block in text.features._blocks}
    parts = sum(len(tokens) % BLOCK > 0 for tokens in texts.values())
    assert len(held) == len(whole) + parts
    for seq in texts:
        run.forget(seq)
    assert not run._blocks


def test_what_others_have_read_is_made_when_a_text_is_read_and_once_for_all_that_begin_so() -> None:
    """Stands against a prompt of 100,000 tokens that comes to a card in one piece, 2 GB of three layers, and again for
    every text that begins with it."""
    made: list[int] = []

    def project(rows_nW: torch.Tensor) -> torch.Tensor:
        made.append(len(rows_nW))
        return rows_nW * 2

    run, size = OverTexts(project, torch.float32, torch.device("cpu")), 2 * BLOCK + 5
    tokens = [number % 7 for number in range(size + 1)]
    rows = _made_of(tokens)
    for seq in range(3):
        run.observe(Taps({seq: (size, rows[size:])}, {seq: rows[:size]}))
    assert max(made) == 5  # those behind the whole blocks, where it goes on
    made.clear()
    for seq in range(3):
        for start in range(0, size + 1, 64):
            stop = min(start + 64, size + 1)
            run._read([Span(seq, start, tuple(tokens[start:stop]), ((start, stop - start),), 1)])
        assert torch.equal(run._texts[seq].features.read(0, size + 1), 2 * rows)
    assert made == [BLOCK, BLOCK]


def _made_of(tokens: Sequence[int]) -> torch.Tensor:
    """Of each token and all before it."""
    return torch.tensor(tokens, dtype=torch.float64).mul(torch.arange(1, len(tokens) + 1)).cumsum(0).float()[:, None]


def _eagle(folder: Path, write: Callable[[Target, Path], object]) -> tuple[Head, Topology, int]:
    target, head = tiny("smollm2", folder / "target", num_hidden_layers=4), folder / "head"
    write(Target.read(target), head)
    made = topology(target, draft={"source": "eagle", "model": str(head), "tokens": 2})
    return load_head(given(target, head)), made, head_cache(made, ModelShape.of(target), head)


def _mtp(folder: Path, kind: str) -> tuple[Head, Topology, int]:
    target = tiny(kind, folder / "target", num_hidden_layers=2)
    (mtp.deepseek(target) if kind == "qwen3" else mtp.glm(target, folder / "alone", kind))
    made = topology(target, draft={"source": "mtp", "tokens": 2})
    return load_mtp(given(target, target)), made, layer_cache(made, last_layer(ModelShape.of(target)))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: _eagle(folder, first),
        lambda folder: _eagle(folder, lambda target, head: first(target, head, wrapped=True)),
        lambda folder: _eagle(folder, third),
        lambda folder: _eagle(folder, lambda target, head: third(target, head, layout="speculators")),
        lambda folder: _mtp(folder, "qwen3"),
        lambda folder: _mtp(folder, "deepseek_v3"),
        lambda folder: _mtp(folder, "glm_moe_dsa"),
    ],
    ids=["eagle 1", "wrapped", "eagle 3", "speculators", "mtp", "mtp of latents", "mtp with an index"],
)
def test_what_a_head_keeps_is_counted(make: Callable[[Path], tuple[Head, Topology, int]], tmp_path: Path) -> None:
    """Plans knew of a head's files alone: of an 8B target's EAGLE head, 400 MiB too few for 32,768 tokens."""
    head, made, counted = make(tmp_path)
    run = EagleRun(head, 263, draft_slots(made))
    kept = sum(cells.numbers_GSE.numel() for cells in run.store.cells)
    features = head.embedding.width * (target_slots(made) + made.serve.max_running * BLOCK)
    assert counted == 4 * (kept + features)
