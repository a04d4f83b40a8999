"""Models that keep states: whatever drafts, chains and trees, right and wrong, the text is that of plain decoding.

A state cannot give a token up, so what is shown is that none is taken in that may have to go, and none twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import tiny
from tests.draft.heads import mtp
from tests.slow import slowly
from tests.worlds import serve, topology
from tpspec.cache.pages import PagePool
from tpspec.comm.communicator import OneRank
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.draft.protocol import Ask, Given, Needs, Taps
from tpspec.draft.run import load_run
from tpspec.errors import UserError
from tpspec.model.batch import Carried, Span
from tpspec.model.loader import load_whole
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.roles.build import build_engine
from tpspec.tokens import NO_DRAFT, TokenTree, Verdict
from tpspec.verify.noise import CounterNoise

CPU = torch.device("cpu")
KINDS = (
    "qwen3_5", "qwen3_next", "nemotron_h", "granite_hybrid", "olmo_hybrid", "kimi_linear", "falcon_h1", "lfm2",
    "lfm2_moe", "lfm3",
)  # fmt: skip
SEVERAL = ("qwen3_5", "granite_hybrid", "kimi_linear", "lfm2")  # one of each way
WARM = Sampling(temperature=0.8, seed=5)
ASKS = [
    Request(0, (5, 6, 7, 8) * 3, 40),
    Request(1, tuple(Random(1).randrange(3, 20) for _ in range(90)), 30, WARM),  # longer than a chunk
    Request(2, (9,), 35, WARM),
]
ROOM = "two at a time, and one that makes room"
WORLDS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "prompts in pieces": {"engine": {"max_rows": 10}},
    ROOM: {"serve": {"max_running": 2}, "cache": {"tokens": 160, "page": 16}},
    "deterministic": {"deterministic": True, "engine": {"fixed_rows": 12}},
}


class Oracle:
    """Knows what will be said: trees in which that is one path, to some depth, among others that are wrong."""

    needs = Needs()

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self._texts, self._random = texts, Random(3)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> TokenTree:
        said = self._texts[ask.seq][len(ask.tokens) - ask.num_prompt :]
        tokens, parents, right = list[int](), list[int](), -1
        for token in said[: self._random.randrange(5)]:
            wrong = [(other, self._random.randrange(-1, len(tokens))) for other in self._random.sample(range(3, 60), 2)]
            for other, parent in [*wrong[: self._random.randrange(3)], (token, right)]:
                beside = {one for one, above in zip(tokens, parents, strict=True) if above == parent}
                if other in beside:
                    return TokenTree(tuple(tokens), tuple(parents)) if tokens else NO_DRAFT
                tokens.append(other)
                parents.append(parent)
            right = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents)) if tokens else NO_DRAFT

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {kind: tiny(kind, root / kind) for kind in KINDS}


def test_a_plain_text_is_that_of_transformers(targets: dict[str, Path]) -> None:
    """Token by token behind a prompt, where transformers computes the whole text at once."""
    ask = ASKS[0]
    for kind, folder in targets.items():
        (said,) = serve(topology(folder, 2), [ask]).texts()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            logits = model(torch.tensor([[*ask.prompt, *said]])).logits[0]
        assert logits.argmax(1)[len(ask.prompt) - 1 : -1].tolist() == said, kind


@pytest.mark.parametrize(
    ("kind", "world", "num_ranks"),
    [
        *((kind, ROOM, 1) for kind in KINDS),
        *((kind, "deterministic", 3) for kind in SEVERAL),
        *slowly(*((kind, "deterministic", 3) for kind in KINDS if kind not in SEVERAL)),
        *slowly(*((kind, *world) for kind in KINDS for world in (("as it comes", 1), ("prompts in pieces", 3)))),
    ],
)
def test_trees_that_are_right_and_wrong_leave_the_text_as_it_is(
    kind: str, world: str, num_ranks: int, targets: dict[str, Path]
) -> None:
    """Stands against a rejected row that a state has taken in, an accepted one that it has not, and the state of a text
    that gave its place up."""
    plain = serve(topology(targets[kind], num_ranks, **WORLDS[world]), ASKS)
    texts = dict(enumerate(plain.texts()))
    made = topology(targets[kind], num_ranks, draft={"source": "ngram", "tokens": 9}, **WORLDS[world])
    told = serve(made, ASKS, drafter=lambda: Oracle(texts))
    assert told.texts() == plain.texts()
    assert told.stats[-1].accepted > 20
    assert told.stats[-1].rounds < plain.stats[-1].rounds


@pytest.mark.parametrize(
    ("source", "tree", "accept"),
    [
        ("ngram", "chain", "match"),
        ("suffix", "dynamic", "rejection"),
        *product(["mtp"], ["chain", "dynamic"], ["match", "rejection"]),
        *slowly(("ngram", "chain", "rejection"), *product(["ngram"], ["dynamic"], ["match", "rejection"])),
        *slowly(("suffix", "dynamic", "match"), *product(["suffix"], ["chain"], ["match", "rejection"])),
    ],
)
def test_sources_leave_the_text_as_it_is(source: str, tree: str, accept: str, tmp_path: Path) -> None:
    """Greedy ones by either rule. The layer for multi-token prediction is one with attention, whatever the target's."""
    folder = tiny("qwen3_5", tmp_path / "target")
    if source == "mtp":
        mtp.hybrid(folder, tmp_path / "alone", "qwen3_5")
    asks = [Request(ask.id, ask.prompt, ask.max_tokens) for ask in ASKS]
    plain = serve(topology(folder), asks)
    draft = {"source": source, "tree": tree, "tokens": 4}
    told = serve(topology(folder, 2, draft=draft, accept=accept), asks)
    assert told.texts() == plain.texts()
    assert told.stats[-1].drafted > 0


@pytest.mark.parametrize("world", [ROOM, "prompts in pieces", *slowly("as it comes", "deterministic")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_keeps_states_drafts_for_itself_and_is_always_right(
    kind: str, world: str, targets: dict[str, Path]
) -> None:
    """Greedily and drawn, as the target draws. Stands against a draft model whose state has taken drafts in, or lacks a
    token of the text."""
    plain = serve(topology(targets[kind], **WORLDS[world]), ASKS)
    draft = {"source": "model", "model": str(targets[kind]), "tokens": 4}
    told = serve(topology(targets[kind], 2, draft=draft, **WORLDS[world]), ASKS)
    assert told.texts() == plain.texts()
    assert told.stats[-1].accepted == told.stats[-1].drafted > 60


@pytest.mark.parametrize("policy", [Policy(), Policy(branches=3), Policy(ahead=True, width=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_that_keeps_states_drafts_is_what_it_says_of_the_text_alone(
    kind: str, policy: Policy, targets: dict[str, Path]
) -> None:
    """Whatever became of its drafts before, ragged lengths, texts that take turns. Stands against a draft model that
    remembers what was not accepted, or the text of another."""
    given = Given(CounterNoise(), "match", 263, targets[kind], targets[kind], torch.float32, CPU, 512, num_states=2)
    drafter = Grown(Ahead(ModelDrafter(CounterNoise(), "coupled", 263), load_run(given), PagePool(32, 16), policy))
    alone = load_whole(targets[kind], ModelShape.of(targets[kind]), torch.float32, CPU, 512)

    def best(text: Sequence[int]) -> list[int]:
        span = Span(0, 0, tuple(text), ((0, len(text)),), 1, carried=Carried.alone(0, len(text)))
        return list(alone.forward([span])[0].topk(policy.branches).indices.tolist())

    source, texts = Random(4), {0: [5, 6, 7, 8] * 3, 1: [9]}
    for _ in range(8):
        asks = [Ask(seq, list(text), 1, source.randrange(1, 6), Sampling()) for seq, text in texts.items()]
        for ask, tree in zip(asks, drafter.propose(asks), strict=True):
            assert len(tree) == ask.num_tokens
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                assert token in best([*ask.tokens, *(tree.tokens[at] for at in tree.path(parent))])
            path = [tree.tokens[at] for at in tree.path(source.randrange(-1, len(tree)))]
            texts[ask.seq] += [*path, source.randrange(3, 60)]


@pytest.mark.parametrize(
    ("draft", "fault"),
    [
        ({"source": "early_exit"}, "qwen3_5_text keeps states of texts.*such as mtp or ngram"),
        ({"source": "pard", "model": "itself"}, r"draft.model .*qwen3_5_text keeps states.* or source model"),
        ({"source": "mtp"}, r"has no layer for multi-token prediction"),
    ],
)
def test_drafts_that_could_not_be_taken_back_are_refused(
    draft: dict[str, str], fault: str, targets: dict[str, Path]
) -> None:
    """Before a weight is read. Stands against a state that has taken its own drafts in."""
    folder = targets["qwen3_5"]
    section = draft | ({"model": str(folder)} if "model" in draft else {})
    with pytest.raises(UserError, match=fault):
        build_engine(topology(folder, draft=section), OneRank(), CPU)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "layer_types is .* should be"),
        ({"layer_types": ["linear_attention"]}, "for each of 3 layers"),
        ({"linear_num_value_heads": 7}, r"linear_num_value_heads is 7; should be a multiple of .* \(3\)"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; should be a whole number above 0"),
        ({"linear_key_head_dim": 12}, r"conv1d.weight has shape \[144, 1, 4\], config.json asks for \[156, 1, 4\]"),
    ],
)
def test_configs_of_no_such_layers_are_refused_by_name(wrong: dict[str, Any], fault: str, tmp_path: Path) -> None:
    folder = tiny("qwen3_5", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | wrong
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=fault):
        build_engine(topology(folder), OneRank(), torch.device("cpu"))
