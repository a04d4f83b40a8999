"""Assistants of Gemma 4 say what transformers has them say, beside any number of shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

from tests.checkpoints import tiny
from tests.draft.heads.assistant import assistant
from tests.worlds import serve, topology
from tpspec.draft.assistant import AssistantRun
from tpspec.draft.assistant_checkpoint import load_assistant
from tpspec.draft.protocol import Given, Taps
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.loader import load_whole
from tpspec.published.assistants import check_assistant
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.caches import BLOCK, draft_slots, head_cache, target_slots
from tpspec.verify.noise import CounterNoise

CPU = torch.device("cpu")
KINDS_OF_TARGETS = ("gemma4", "gemma4_moe", "gemma4_small")
WARM = Sampling(temperature=0.8, seed=5)
PROMPT = (5, 6, 7, 8) * 6


def given(target: Path, folder: Path) -> Given:
    return Given(CounterNoise(), "match", 263, target, folder, torch.float32, CPU, num_slots=128)


@pytest.mark.parametrize("kind", KINDS_OF_TARGETS)
@pytest.mark.parametrize("length", [2, 7, 30])
@torch.inference_mode()
def test_drafts_are_those_of_transformers(kind: str, length: int, tmp_path: Path) -> None:
    """Three drafts behind a text, in pieces of slots; its keys come in two parts. Stands against keys of another layer,
    position or norm, a draft that sees drafts, and one that stands where it would be if it were text."""
    target = tiny(kind, tmp_path / "target")
    folder = assistant(target, tmp_path / "assistant")
    ids = torch.randint(3, 263, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    told = reference(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    drafter = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    drafter.config.text_config.sliding_window = 7  # of which it sees one more, and a target's row its own besides
    hidden, token, expected, drafts = told.hidden_states[-1][:, -1:], ids[-1], [], []
    for _ in range(3):
        embedded = reference.get_input_embeddings()(torch.tensor([[token]]))
        made = drafter(inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=torch.tensor([[length - 1]]),
                       shared_kv_states=told.shared_kv_states)  # fmt: skip
        expected.append(made.logits[0, 0])
        hidden, token = made.last_hidden_state, int(made.logits.argmax())
        drafts.append(token)

    loaded = load_assistant(given(target, folder))
    run = AssistantRun(loaded, 263)
    own = load_whole(target, ModelShape.of(target), torch.float32, CPU, 128)
    rows = own.tapped([Span(0, 0, tuple(ids[:-1]), ((0, length - 1),), 1)], loaded.taps).tapped
    taps = torch.cat([rows[tap] for tap in loaded.taps], 1)
    half = (length - 1) // 2
    for first, stop in ((0, half), (half, length - 1)):
        if first < stop:
            run.observe(Taps({7: (first, taps[first:stop])}))
    assert run.can_read(7, length)
    slots = (40, half + 1), (80, length - half + 2)
    if half:
        assert len(run([Span(7, 0, tuple(ids[:half]), ((40, half),), 0)])) == 0
    made = [run([Span(7, half, tuple(ids[half:]), (slots[0], (80, length - half - 1)), 1)])]
    for i, token in enumerate(drafts[:2]):
        made.append(run([Span(7, length + i, (token,), (slots[0], (80, length - half + i)), 1)]))
    for ours, its in zip(made, expected, strict=True):
        assert (ours[0] - its).abs().max() < 1e-4


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS_OF_TARGETS)
def test_texts_are_those_of_plain_decoding(kind: str, sampling: Sampling, tmp_path: Path) -> None:
    """Two ranks. Stands against taps that one rank has otherwise than another, and texts that begin in the middle."""
    target = tiny(kind, tmp_path / "target")
    folder = assistant(target, tmp_path / "assistant")
    asks = [Request(0, PROMPT, 12, sampling), Request(1, (*PROMPT[:11], 9), 12, sampling)]
    plain = serve(topology(target, 2), asks)
    for more in ({"tokens": 3}, {"tokens": 6, "tree": "dynamic"}):
        told = serve(topology(target, 2, draft={"source": "eagle", "model": str(folder), **more}), asks)
        assert told.stats[-1].drafted > 9
        assert told.texts() == plain.texts()


def test_what_it_keeps_is_counted(tmp_path: Path) -> None:
    """Stands against a card that is full of keys which no plan knew of."""
    target = tiny("gemma4", tmp_path / "target")
    folder = assistant(target, tmp_path / "assistant")
    loaded = load_assistant(given(target, folder))
    made = topology(target, draft={"source": "eagle", "model": str(folder), "tokens": 2})
    slots = draft_slots(made)
    kept = sum(2 * heads.num_kv * heads.dim for heads in (one.sight.heads for one in loaded.keepers.values()))
    products = 48 * (2 * 3 * 16 + 2 * 32)  # of 3 heads keys and values, and of 2 keys alone
    taps = 3 * 48 * (target_slots(made) + made.serve.max_running * BLOCK)
    assert head_cache(made, ModelShape.of(target), folder) == 4 * (kept * slots + products + taps)
    assert sum(one.numbers_GSE.numel() for one in loaded.model.store.cells) == kept * 128


def test_one_of_another_target_is_refused(tmp_path: Path) -> None:
    """Stands against a product of sizes that do not fit, while loading or in the first round."""
    target = tiny("gemma4", tmp_path / "target")
    folder = assistant(target, tmp_path / "assistant")
    written = json.loads((folder / "config.json").read_text())
    for key, value, why in (
        ("layer_types", ["full_attention"] * 3, "its layers all see alike"),
        ("rope_parameters", written["text_config"]["rope_parameters"] | {"sliding_attention": {
            "rope_type": "default", "rope_theta": 500.0}}, "should be the target's"),
    ):  # fmt: skip
        text = written["text_config"] | {key: value}
        if key == "layer_types":
            text["per_layer_config"] = {str(i): written["text_config"]["per_layer_config"]["2"] for i in range(3)}
        other = tmp_path / key
        other.mkdir()
        (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        (other / "config.json").write_text(json.dumps(written | {"text_config": text}))
        with pytest.raises(UserError, match=why):
            load_assistant(given(target, other))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(written | {"text_config": None}))
    with pytest.raises(UserError, match="text_config is missing; should be the config of the assistant's layers"):
        load_assistant(given(target, bare))
    with pytest.raises(UserError, match="backbone_hidden_size is 48; should be the target's hidden size, 72"):
        load_assistant(given(tiny("gemma4", tmp_path / "larger", hidden_size=72), folder))
    with pytest.raises(UserError, match=r"an assistant of Gemma 4; should stand beside .*, not llama"):
        load_assistant(given(tiny("llama", tmp_path / "llama"), folder))
    (bare / "config.json").write_text(json.dumps(written | {"text_config": {"model_type": "gemma3_text"}}))
    with pytest.raises(UserError, match=r"text_config.model_type is gemma3_text; should be gemma4_text or"):
        check_assistant(ModelShape.of(target), bare)
    with pytest.raises(UserError, match=r"an assistant of Gemma 4; should stand beside .*, not gemma3_text"):
        load_assistant(given(tiny("gemma3", tmp_path / "gemma3"), folder))
    with pytest.raises(UserError, match=r"layers with kv heads, .*\(3, 16, 8\); should be the target's \(3, 16, 9\)"):
        load_assistant(given(tiny("gemma4", tmp_path / "wide", sliding_window=9), folder))
