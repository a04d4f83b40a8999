"""Attention by FlashInfer, where it is installed: here by a stand-in that does, in torch, what FlashInfer documents.

What it cannot show: that FlashInfer does so, and how fast. On a machine with a card and FlashInfer: tests/gpu."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.model.test_card_many import BEHIND, IDS, pair
from tests.recent import WINDOW, told, whole_and_windowed
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder

pytest.importorskip("triton")
from tpspec.model.card import flash as card_flash

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tries the real one")
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}


@dataclass
class Documented:
    """In place of flashinfer.BatchPrefillWithPagedKVCacheWrapper, whose parameters have these names. off: what it adds
    to what it should give."""

    float_workspace_buffer: torch.Tensor
    kv_layout: str = "NHD"
    off: float = 0.0
    plans: list[dict[str, Any]] = field(default_factory=list)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        assert {one.dtype for one in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        assert paged_kv_last_page_len.tolist() == [page_size] * (len(qo_indptr) - 1)
        assert num_qo_heads % num_kv_heads == 0
        self.plans.append({name: value for name, value in locals().items() if name != "self"})

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        made, plan = out, self.plans[-1]
        plan["runs"] = 1 + plan.get("runs", 0)
        assert q.dtype == plan["q_data_type"]
        assert (self.kv_layout, plan["page_size"], plan["causal"]) == ("HND", 1, True)
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        rows, ends = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for text in range(len(rows) - 1):
            pages = plan["paged_kv_indices"][ends[text] : ends[text + 1]].long()
            k, v = (cache[pages].squeeze(2).transpose(0, 1) for cache in paged_kv_cache)  # heads, keys, numbers
            own = q[rows[text] : rows[text + 1]].transpose(0, 1)
            k, v = (x.repeat_interleave(plan["num_qo_heads"] // plan["num_kv_heads"], 0) for x in (k, v))
            at = torch.arange(own.shape[1])[:, None] + k.shape[1] - own.shape[1]
            seen = torch.arange(k.shape[1]) <= at
            if plan["window_left"] >= 0:
                seen &= torch.arange(k.shape[1]) >= at - plan["window_left"]
            scores = (own.float() @ k.float().mT * plan["sm_scale"]).masked_fill(~seen, -torch.inf)
            made[rows[text] : rows[text + 1]] = (scores.softmax(-1) @ v.float()).transpose(0, 1).to(q.dtype)
        return made.add_(self.off)


def install(monkeypatch: pytest.MonkeyPatch, off: float = 0.0) -> list[Documented]:
    """Those that are made from now on. It is quicker than Triton's interpreter."""
    made: list[Documented] = []

    def make(*given: Any) -> Documented:
        made.append(Documented(*given, off=off))
        return made[-1]

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=make))
    monkeypatch.setattr(card_flash, "CACHED", 70)
    monkeypatch.setattr(card_flash, "ROWS", 4)
    monkeypatch.setattr(card_flash, "TIMES", 1)
    monkeypatch.setattr(card_flash, "CALLS", 1)
    return made


def halves(folder: Path, **more: Any) -> tuple[Decoder, Decoder]:
    """By torch, and by the kernels and FlashInfer, in 16 bits."""
    torchs, cards = pair(folder, dtype=torch.float16, **more)
    cards._runner.many.agree_on_flash(lambda holds: holds)
    return torchs, cards


def rounds(decoder: Decoder) -> torch.Tensor:
    """Chains in scattered slots, of some tokens behind others; then one beside a tree, which is not FlashInfer's."""
    spans = [Span(0, 0, IDS[:40], ((0, 30), (128, 10)), 5), Span(1, 0, IDS[:3], ((256, 3),), 3)]
    said = [decoder.forward(spans).clone()]
    said.append(decoder.forward([Span(0, 40, IDS[40:45], ((0, 30), (128, 15)), 5)]).clone())
    tree = Span(1, 3, IDS[90:102], ((256, 15),), 12, BEHIND)
    said.append(decoder.forward([Span(0, 45, IDS[45:48], ((0, 30), (128, 18)), 3), tree]))
    return torch.cat(said)


def test_rounds_are_what_torch_makes_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against pages, rows or heads that are told otherwise than FlashInfer reads them, a plan of the last
    round, a tree taken for a chain, and rounds that are planned and then go another way."""
    made = install(monkeypatch)
    torchs, cards = halves(tiny("smollm2", tmp_path, **EVEN))
    assert (rounds(cards) - rounds(torchs)).abs().max() < 0.02
    assert [len(one.plans) for one in made] == [1 + 2]  # the trial's, and of two rounds of three
    assert [plan["runs"] for plan in made[0].plans[1:]] == [len(cards.store.keys)] * 2
    cards._runner.many.agree_on_flash(lambda holds: not holds)
    assert len(made) == 1  # who has agreed is not asked again


def test_layers_with_a_window_find_their_keys_in_slots_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a window that is a key too wide, and pages of the other layers."""
    install(monkeypatch)
    torchs, cards = halves(tiny("mistral", tmp_path, **EVEN, sliding_window=WINDOW), num_recent=160)
    said = [told(decoder, whole_and_windowed(160)[1], num_steps=1, chunks=(40, 3)) for decoder in (torchs, cards)]
    assert cards._runner.many._flash is not None
    assert (said[0] - said[1]).abs().max() < 0.05


def test_two_threads_have_room_of_their_own(tmp_path: Path) -> None:
    """A shard and the drafter beside it read prompts at the same time; models of one thread take turns. Stands against
    parts of one's sums that the other finds in their place."""
    shape = pair(tiny("llama", tmp_path, **EVEN))[0].shape
    rooms = list[int]()

    def made() -> None:
        card_flash.Flash(shape, lambda room, layout: rooms.append(room.data_ptr()))

    for _ in range(2):
        made()
    thread = threading.Thread(target=made)
    thread.start()
    thread.join()
    assert rooms[0] == rooms[1] != rooms[2]


def test_who_computes_something_else_is_left_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against wrong texts from a version whose parameters mean something else."""
    install(monkeypatch, off=0.5)
    with caplog.at_level(logging.WARNING):
        _, cards = halves(tiny("smollm2", tmp_path, **EVEN))
    assert cards._runner.many._flash is None
    assert "it computes something else" in caplog.text


def test_who_fails_is_left_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against a server that does not start where there is no compiler for FlashInfer's kernels."""
    install(monkeypatch)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(Documented, "run", fails)
    with caplog.at_level(logging.WARNING):
        _, cards = halves(tiny("smollm2", tmp_path, **EVEN))
    assert cards._runner.many._flash is None
    assert "do not go through FlashInfer: RuntimeError: Could not find nvcc" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({"num_attention_heads": 6}, {}),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, {}),
        ({"head_dim": 48}, {}),
        ({}, {"small_cache": True}),
    ],
    ids=["uneven heads", "as many as of even ones, but for one", "other heads", "8 bits"],
)
def test_what_it_has_no_kernel_for_is_not_tried(
    sizes: dict[str, int], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = install(monkeypatch)
    _, cards = halves(tiny("smollm2", tmp_path, **(EVEN | sizes)), parts=(1.0, 0.7) if sizes else (1.0,), **more)
    assert (cards._runner.many._flash, made) == (None, [])


def test_where_a_rank_has_none_no_rank_has_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against ranks of which one waits, while others compile, for longer than a start may take."""
    made, said = install(monkeypatch), list[bool]()
    _, cards = pair(tiny("smollm2", tmp_path, **EVEN), dtype=torch.float16)
    many = cards._runner.many

    def everywhere(holds: bool) -> bool:
        said.append(holds)
        return len(said) < 2

    many.agree_on_flash(everywhere)
    assert (said, len(made), many._flash) == ([True, True], 1, None)


def test_it_is_not_missed_where_it_is_not_installed_or_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = install(monkeypatch)
    monkeypatch.setenv(card_flash.SWITCH, "off")
    folder = tiny("smollm2", tmp_path, **EVEN)
    with caplog.at_level(logging.WARNING):
        assert halves(folder)[1]._runner.many._flash is None
        monkeypatch.delenv(card_flash.SWITCH)
        monkeypatch.delitem(sys.modules, "flashinfer")
        assert halves(folder)[1]._runner.many._flash is None
    assert (made, caplog.text) == ([], "")
