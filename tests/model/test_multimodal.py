"""Models that see besides reading run as their text model does, whatever their tensors and modules are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.checkpoints import AKIN, BASE, KINDS, LIKE, MUSES_EYES, WITHIN, randomise, write_tokenizer
from tests.worlds import serve, topology
from tpspec.comm.communicator import Communicator
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import UserError
from tpspec.model.batch import Span
from tpspec.model.loader import Loader
from tpspec.model.weights import SINGLE
from tpspec.published.formats import Scheme, Stored
from tpspec.published.multimodal import FLAT, spellings, text_config, text_name
from tpspec.published.shape import ModelShape, vocab_of
from tpspec.request import Request, Sampling
from tpspec.text import Text
from tpspec.topology.shards import split

IDS = tuple(torch.randint(3, 263, (30,), generator=torch.Generator().manual_seed(0)).tolist())
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2_vision", {"image_token_id": 262, "alignment_intermediate_size": 16}),
    "cohere2_moe": ("cohere2_vision", {"image_token_id": 262, "alignment_intermediate_size": 16}),
    "exaone4": ("exaone4_5", {"image_token_id": 262, "video_token_id": 261}),
    "gemma3": ("gemma3", {"mm_tokens_per_image": 4, "image_token_index": 262, "boi_token_index": 261}),
    "mistral": ("mistral3", {"image_token_index": 262}),
    "ministral3": ("mistral3", {"image_token_index": 262}),
    "mistral4": ("mistral3", {"image_token_index": 262}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "deepseek_v3": ("kimi_k25", {"image_token_id": 262, "video_token_id": 261}),
    "qwen3": ("internvl", {"image_token_id": 262}),
    "lfm2": ("lfm2_vl", {"image_token_id": 262}),
    "lfm2_moe": ("lfm2_vl", {"image_token_id": 262}),
    "lfm3": ("lfm3_vl", {"image_token_id": 262, "video_token_id": 261, "vision_start_token_id": 260}),
    "llama4": ("llama4", {"image_token_index": 262}),
    "llama": ("llava", {"image_token_index": 262}),
    "llama3": ("llava_next", {"image_token_index": 262}),
    "qwen2": ("llava_onevision", {"image_token_index": 262}),
    "muse_glimmer": ("muse_glimmer", {key: MUSES_EYES[key] for key in MUSES_EYES if key != "vision_config"}),
    "step3p5": ("step3p7", {"image_token_id": 262}),
    **{kind: (kind.removesuffix("_text"), {}) for kind in LIKE},
}


SEES: dict[str, dict[str, Any]] = {
    "exaone4_5": {"out_hidden_size": 96, "fullatt_block_indexes": [0], "num_key_value_heads": 1},
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 96},
    "qwen2_5_vl": {"out_hidden_size": 96, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"out_hidden_size": 96, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"out_hidden_size": 96, "deepstack_visual_indexes": [0]},
    "glm4v": {"out_hidden_size": 96},
    "glm4v_moe": {"out_hidden_size": 96},
    "kimi_k25": {"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
}


def seeing(folder: Path, text: str, **keys: Any) -> torch.Tensor:
    """Writes a model of a text kind and eyes; the logits it has for IDS."""
    model_type, more = WHOLE[text]
    fields = BASE | (KINDS | AKIN | WITHIN)[LIKE.get(text, text)] | keys
    if text in LIKE:  # whose rope turns by three positions, which are the same for text
        part = fields.get("partial_rotary_factor", 1.0)
        sections = {"mrope_section": [round(4 * part), round(2 * part), round(2 * part)], "partial_rotary_factor": part}
        fields |= {"model_type": text, "rope_parameters": MROPE | sections}
    config = AutoConfig.for_model(model_type, text_config=fields, vision_config=VISION | _eyes(model_type), **more,
                                  tie_word_embeddings=fields["tie_word_embeddings"])  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    if model_type == "kimi_k25":  # whose layers transformers saves as it does those of the eyes
        rename(folder, "language_model.model.blocks.", "language_model.model.layers.")
    write_tokenizer(folder, 263)
    reads = model.language_model if model_type == "llama4" else model  # which fails where there is nothing to see
    with torch.inference_mode():
        made: torch.Tensor = reads(input_ids=torch.tensor([IDS])).logits[0]
    return made * fields.get("logit_scale", 1.0)  # which transformers leaves out there: it moves no argmax


def _eyes(model_type: str) -> dict[str, Any]:
    if model_type == "muse_glimmer":
        return MUSES_EYES["vision_config"] | {"model_type": "muse_glimmer_vision"}
    if model_type in SEES:
        return SEES[model_type] | {"model_type": f"{model_type}_vision", "depth": 1, "num_heads": 2}
    if model_type.startswith("qwen3_5"):
        return {"model_type": f"{model_type}_vision", "depth": 1, "num_heads": 2, "out_hidden_size": 96}
    eyes = {"mistral3": "pixtral", "internvl": "internvl_vision", "llava": "clip_vision_model"}
    return {"model_type": eyes.get(model_type, "siglip_vision_model")}


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / SINGLE)
    assert any(name.startswith(old) for name in tensors)
    save_file({name.replace(old, new, 1) if name.startswith(old) else name: x for name, x in tensors.items()},
              folder / SINGLE)  # fmt: skip


def logits(folder: Path, parts: tuple[float, ...] = (1.0,)) -> torch.Tensor:
    """parts: of ranks."""
    shards, span = split(ModelShape.of(folder), parts), Span(0, 0, IDS, ((0, len(IDS)),), len(IDS))

    def rank(comm: Communicator) -> torch.Tensor:
        loader = Loader.open(folder, shards[comm.rank], torch.float32, torch.device("cpu"))
        return loader.decoder(comm, 64).forward([span])

    return torch.cat(ThreadWorld(len(parts)).run(rank), 1)


@pytest.mark.parametrize("text", WHOLE)
def test_the_text_model_of_one_that_sees_computes_what_transformers_does(text: str, tmp_path: Path) -> None:
    """Stands against tensors not found under the names of either of transformers' ways to write them, and against a
    section of config.json that is not read: the sizes outside of it are another's, or missing."""
    expected = seeing(tmp_path, text)
    assert (logits(tmp_path) - expected).abs().max() < 1e-4
    names = set(load_file(tmp_path / SINGLE))
    old, new = "language_model.model.", "model.language_model."
    if WHOLE[text][0] in (*FLAT, "step3p7"):
        old, new = "model.layers.", "model.language_model.layers."
    old, new = (old, new) if any(name.startswith(old) for name in names) else (new, old)
    rename(tmp_path, old, new)
    assert (logits(tmp_path) - expected).abs().max() < 1e-4
    assert Text.load(tmp_path).vocab_size == 263


def test_what_says_of_text_may_stand_beside_what_says_of_eyes(tmp_path: Path) -> None:
    """As Qwen2.5-VL was published, with the type of rope that it had. Stands against a model that has no sizes."""
    expected = seeing(tmp_path, "qwen2_5_vl_text")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    path.write_text(json.dumps({key: text[key] for key in text if key != "rope_parameters"} | config))
    assert (logits(tmp_path) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("parts", [(1.0, 1.0), (3.0, 1.0, 2.0)], ids=str)
def test_ranks_share_a_text_model_that_is_none_alone(parts: tuple[float, ...], tmp_path: Path) -> None:
    """Mistral 4. Stands against queries of which what latents are made of does not grow with the position."""
    expected = seeing(tmp_path, "mistral4")
    assert (logits(tmp_path, parts) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0)], ids=str)
@pytest.mark.parametrize("block", [None, (16, 24)], ids=str)
@pytest.mark.parametrize("lies", [False, True], ids=["a row for each output", "a row for each input"])
def test_experts_of_a_layer_may_be_one_tensor_of_floats(
    lies: bool, block: tuple[int, int] | None, parts: tuple[float, ...], tmp_path: Path
) -> None:
    """As Mistral Small 4 was published: FP8, with a scale for each expert, of what makes gate and up for each half.
    Stands against experts that have their neighbour's scale, and gates that have that of the others."""
    seeing(tmp_path, "mistral4")
    meant, coded = load_file(tmp_path / SINGLE), {}
    for name, x_NOI in meant.items():
        if ".experts." not in name:
            continue
        (count, outputs, inputs), halves = x_NOI.shape, 2 if name.endswith("gate_up_proj") else 1
        rows, columns = block or (outputs // halves, inputs)
        num_rows, num_columns = -(-outputs // rows), -(-inputs // columns)
        scales = 0.01 + torch.rand(count, num_rows, num_columns, generator=torch.Generator().manual_seed(0))
        spread = scales.repeat_interleave(rows, 1)[:, :outputs].repeat_interleave(columns, 2)[..., :inputs]
        coded |= {name: (x_NOI / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        meant[name] = coded[name].float() * spread
        if lies:
            coded |= {one: coded[one].transpose(1, 2).contiguous() for one in (name, f"{name}_scale_inv")}
        coded[f"{name}_activation_scale"] = torch.ones(count)
    save_file(meant, tmp_path / SINGLE)
    expected = logits(tmp_path)
    save_file(meant | coded, tmp_path / SINGLE)
    path, said = (
        tmp_path / "config.json",
        {"quant_method": "fp8", "weight_block_size": block},
    )  # of outputs and inputs, however they lie
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    assert (logits(tmp_path, parts) - expected).abs().max() < 1e-4
    name = next(name for name in coded if name.endswith("_scale_inv"))
    for wrong, why in ((coded[name].flatten(1), "has shape"), (None, "is missing")):
        rest = {other: x for other, x in (meant | coded).items() if other != name}
        save_file(rest if wrong is None else rest | {name: wrong.clone()}, tmp_path / SINGLE)
        with pytest.raises(UserError, match=f"_proj_scale_inv {why}"):
            logits(tmp_path)


@pytest.mark.parametrize("names", [("kimi_k25", "kimi_k2"), ("kimi_vl", "deepseek_v3"), ("kimi_k2", None)], ids=str)
def test_a_type_may_have_the_name_that_it_was_published_by(names: tuple[str, str | None], tmp_path: Path) -> None:
    """Kimi K2.5, VL and K2, all of which compute as DeepSeek-V3 does."""
    expected = seeing(tmp_path, "deepseek_v3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"] | {"model_type": names[1]}
    path.write_text(json.dumps((config | {"text_config": text} if names[1] else text) | {"model_type": names[0]}))
    assert (logits(tmp_path) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0)], ids=str)
def test_experts_lie_or_stand(parts: tuple[float, ...], tmp_path: Path) -> None:
    """Qwen3-VL's were published with a row for each input; transformers writes them with one for each output."""
    expected = seeing(tmp_path, "qwen3_vl_moe_text")
    tensors = load_file(tmp_path / SINGLE)
    turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in tensors.items()}
    assert any(turned[name].shape != tensors[name].shape for name in tensors)
    save_file(turned, tmp_path / SINGLE)
    assert (logits(tmp_path, parts) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("text", ["qwen3_vl_text", "glm4v_moe_text"])
def test_texts_are_those_of_plain_decoding(text: str, tmp_path: Path) -> None:
    """Two ranks, with drafts of some of its own layers. Stands against another tokenizer, rope or head than a whole
    model has."""
    seeing(tmp_path, text)
    asks = [Request(0, IDS, 9), Request(1, IDS[:7], 9, Sampling(temperature=0.8, seed=5))]
    told = serve(topology(tmp_path, 2, draft={"source": "early_exit", "tokens": 2}), asks)
    assert told.texts() == serve(topology(tmp_path), asks).texts()
    assert told.stats[-1].drafted > 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_says_whether_its_head_is_the_table(tied: bool, tmp_path: Path) -> None:
    """As transformers reads it, and writes a tied model: with the text model's own word, which says no. Stands against
    such a model that is refused, and one with a head of its own that is answered from the table."""
    expected = seeing(tmp_path, "qwen3_5", tie_word_embeddings=tied)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = tied, not tied
    path.write_text(json.dumps(config))
    assert ("lm_head.weight" in load_file(tmp_path / SINGLE)) is not tied
    assert (logits(tmp_path) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llava", {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064}),
        ("llava_next", {"model_type": "mistral", "max_position_embeddings": 32768, "vocab_size": 32064}),
        ("llava_onevision", {"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
                             "num_key_value_heads": 2, "intermediate_size": 4864}),
        ("internvl", {"model_type": "qwen3"}),
    ],
)  # fmt: skip
def test_sizes_that_a_section_leaves_out_are_those_of_transformers(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """As LLaVA was published: of its text model it says what differs from transformers' own."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": said, "vision_config": {}}))
    ours, theirs = ModelShape.of(tmp_path), AutoConfig.from_pretrained(tmp_path)
    text = theirs.text_config
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size")  # fmt: skip
    assert (ours.hidden, ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.intermediate, ours.vocab) == tuple(
        getattr(text, key) for key in keys
    )
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


@pytest.mark.parametrize("whole", [None, False, True])
@pytest.mark.parametrize("section", [None, False, True])
@pytest.mark.parametrize(
    "kind",
    ["glm4v", "glm4v_moe", "llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
     "qwen3_vl_moe", "internvl", "kimi_k25", "glm46v", "llama4", "muse_glimmer", "step3p7"],
)  # fmt: skip
def test_a_head_is_tied_where_transformers_ties_it(kind: str, section: bool | None, whole: bool | None) -> None:
    """Older transformers saved it in the section. Stands against a head that is called missing, or counted twice."""
    text: dict[str, Any] = {} if section is None else {"tie_word_embeddings": section}
    config: dict[str, Any] = {} if whole is None else {"tie_word_embeddings": whole}
    theirs = AutoConfig.for_model(kind, text_config=dict(text), **config)
    said = text_config({"model_type": kind, "text_config": {**text, "hidden_size": 64}, **config})
    ties = theirs.text_config if kind == "llama4" else theirs  # of which Step's and Muse's have none
    assert said["tie_word_embeddings"] is getattr(ties, "tie_word_embeddings", False)


def test_what_a_config_leaves_out_of_its_text_section_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    """Stands against a published Gemma 3 of 4B that is refused: its config.json has neither heads nor vocabulary."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": said, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(tmp_path)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab) == (8, 4, 256, 262208)
    assert shape.tied
    assert vocab_of(config, "here") == 262208


def test_a_module_is_stored_as_its_publishers_lists_say_in_their_own_names() -> None:
    """Stands against a quantized model whose lists name modules as the whole model does: a head read as codes."""
    scheme = Scheme("packed", 4, 128)
    lists = ("language_model.lm_head", r"re:model\.language_model\.layers\.0\..*", "language_model.model.layers.1.mlp",
             r"re:transformer\.h\.2\..*")  # fmt: skip
    stored = Stored("test", ((("Linear",), scheme),), lists)
    assert stored.scheme_of("lm_head") is None
    assert stored.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert stored.scheme_of("model.layers.1.mlp.up_proj") is None
    assert stored.scheme_of("model.layers.1.self_attn.q_proj") == scheme
    assert stored.scheme_of("model.layers.2.attn.attention.q_proj") is None


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_every_spelling_of_a_name_is_read_back(name: str) -> None:
    """Stands against a prefix that is taken off one way and put on another."""
    assert {text_name(spelling) for spelling in spellings(name)} == {name}
    assert text_name("vision_tower.encoder.layers.0.weight") == "vision_tower.encoder.layers.0.weight"
