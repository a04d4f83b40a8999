"""The sizes of a model, without its weights: from a config.json, or from the table of well-known models shipped here.

Knows numbers. Which layers an architecture has is `model/`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import yaml

from tpspec.errors import UserError
from tpspec.published import checkpoint, keys as published_keys, kimi_linear, mimo, step
from tpspec.published.blocks import MIXTURE, MLP, blocks_of
from tpspec.published.defaults import BIAS_KEY
from tpspec.published.delta_net import FULL, LINEAR, DeltaNet, delta_net_of
from tpspec.published.experts import Experts, experts_of
from tpspec.published.formats import Stored, plain_modules
from tpspec.published.gating import Gating, gating_of
from tpspec.published.global_heads import GlobalHeads, global_heads_of, key_heads, query_heads
from tpspec.published.indexer import Indexer, indexer_of
from tpspec.published.latent import Latent, latent_of
from tpspec.published.mixtures import channels_key, mlp_names
from tpspec.published.mlp_names import MlpNames
from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.multimodal import text_config
from tpspec.published.norm_names import USUAL as USUAL_NORMS, NormNames
from tpspec.published.per_layer import per_layer_of
from tpspec.published.quantizers import stored_as
from tpspec.published.reads import Reads
from tpspec.published.sharing import Sharing, sharing_of
from tpspec.published.short_conv import ShortConv, adjusted, short_conv_of
from tpspec.published.windows import windows_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tpspec.published.defaults import Defaults


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_heads query heads share num_kv_heads KV heads evenly, as they are cached: of a latent there is one, of
    head_dim numbers, that stand for key and value. vocab: rows of the head and of the embedding table.

    tied: the head is the embedding table. values: numbers of a head's value, which is filled up to as many as its key
    has where it is cached; 0: as many. qk_norm: a norm on queries and on keys in every layer, of head_dim, or of all
    heads together (Defaults.joint_norm); replicates_norm: of which every rank makes all heads, as its topology says
    (model/joint_norm.py). intermediate: channels of an MLP, or of each expert where a layer has a mixture in its place.
    num_windowed: layers where a token sees `window` last positions, its own among them. global_heads: of some of the
    others, if not like those. sharing: of layers that keep nothing of a token. per_layer: numbers that a token has for
    each layer besides (model/per_layer.py). num_made: of queries, keys and values, how many have matrices of their own:
    of the models of one sort of layers that `shards.by_heads` makes. max_positions: the longest text it was made for,
    however its rope is scaled; None where the config does not say. stored: how a published quantized checkpoint holds
    its matrices; None where they are plain. indexer: what chooses the tokens that rows attend to, or None: they attend
    to all. blocks: see blocks.py.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    model_type: str
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    values: int = 0
    qk_norm: bool = False
    replicates_norm: bool = False
    norms: NormNames = USUAL_NORMS
    window: int | None = None
    num_windowed: int = 0
    max_positions: int | None = None
    stored: Stored | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    gating: Gating | None = None
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    global_heads: GlobalHeads | None = None
    sharing: Sharing | None = None
    per_layer: int = 0
    num_made: int = 3
    blocks: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, object], where: str) -> ModelShape:
        """From the keys of a Hugging Face config; UserError names `where` and the key that is missing or wrong.

        By default each query head has a KV head of its own, and all together are as wide as the hidden state.
        """
        read = Reads(config, where)
        model_type = read.text("model_type")  # first, for the configs of others have other keys
        if model_type not in MODEL_TYPES:
            known = ", ".join(sorted(MODEL_TYPES))
            raise UserError(f"{where}: architecture {model_type!r} is not supported; supported are {known}")
        published_keys.check(read, model_type)
        usual = MODEL_TYPES[model_type]
        for key in usual.always:
            read.one_of(key, (True,), True)
        read.refuse(*usual.never)
        for key, value in usual.only:
            read.one_of(key, (value, False), False)
        biased = _qkv_bias(read, usual)
        hidden, heads = read.size("hidden_size", usual.hidden), read.size("num_attention_heads", usual.num_heads)
        # Null means that all together are as wide as the hidden state, left out what is usual.
        head_dim = (None if "head_dim" in config else usual.head_dim) or hidden // heads
        blocks, latent = blocks_of(read, model_type), latent_of(read, model_type)
        head_dim = latent.cached if latent else read.size("head_dim", head_dim)
        num_layers = len(blocks) or read.size("num_hidden_layers", usual.num_layers)
        step.check(read, model_type, num_layers)
        kimi_linear.check(read, model_type)
        mimo.check(read, model_type)
        heads = query_heads(read, model_type, num_layers, heads)
        windows = [window for window in windows_of(read, model_type, num_layers) if window is not None]
        experts = experts_of(read, model_type, blocks)
        channels = read.size(*(usual.intermediate if experts is None else channels_key(model_type)))
        intermediate = adjusted(read, model_type, channels)
        vocab = read.size("vocab_size", usual.vocab)
        per_layer = per_layer_of(read, model_type, vocab)
        head_bias, tied = read.said(usual.head_biased), read.flag("tie_word_embeddings", usual.tied)
        if head_bias and tied:
            raise read.refusal("tie_word_embeddings", "false, as the head has a bias")
        norms = usual.norms
        if usual.out_normed is not None and not read.flag(usual.out_normed, True):
            norms = replace(norms, attention_out=None, mlp_out=None)
        num_kv_heads = 1 if latent else read.divisor("num_key_value_heads", heads, usual.num_kv_heads)
        num_kv_heads = key_heads(read, model_type, num_layers, heads, num_kv_heads)
        return cls(
            num_layers=num_layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=vocab,
            tied=tied,
            qkv_bias=biased,
            model_type=model_type,
            o_bias=read.flag(usual.o_biased, False) if isinstance(usual.o_biased, str) else biased and usual.o_biased,
            mlp_bias=_mlp_bias(read, usual, biased=biased),
            values=_values_of(read, usual, head_dim),
            head_bias=head_bias,
            qk_norm=read.said(usual.normed),
            norms=norms,
            window=max(windows, default=None),
            num_windowed=len(windows),
            max_positions=read.size_if_given("max_position_embeddings"),
            stored=stored_as(config, where),
            experts=experts,
            latent=latent,
            indexer=indexer_of(read, model_type, num_layers, latent),
            gating=gating_of(read, model_type),
            delta_net=delta_net_of(read, model_type, num_layers, hidden, blocks),
            short_conv=short_conv_of(read, model_type, num_layers, hidden),
            global_heads=global_heads_of(read, model_type, num_layers, heads, num_kv_heads, head_dim),
            sharing=sharing_of(read, model_type, num_layers, intermediate),
            per_layer=per_layer,
            blocks=blocks,
        )

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Of the model in a folder."""
        shape = cls.from_config(checkpoint.read_config(folder), str(folder))
        if shape.stored is None:
            return shape
        seen = _plain_modules(folder, checkpoint.written(folder))
        return replace(shape, stored=replace(shape.stored, seen=seen))

    @property
    def usual(self) -> Defaults:
        """What its type means by keys that a config leaves out, and what is the same in all models of that."""
        return MODEL_TYPES[self.model_type]

    @property
    def group(self) -> int:
        """Query heads that read one KV head, of layers that have no GlobalHeads."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value, as checkpoints have it."""
        return self.values or self.head_dim

    @property
    def most_shards(self) -> int:
        """Each has a query head of every layer, and what it holds whole of linear attention."""
        most = self.num_heads if self.global_heads is None else min(self.num_heads, self.global_heads.num)
        return most if self.delta_net is None else min(most, self.delta_net.whole[0])

    @property
    def layer_norms(self) -> int:
        """Of the hidden state, in each layer."""
        return self.norms.num + bool(self.per_layer) + (3 if self.experts and self.experts.apart else 0)

    @property
    def parallel(self) -> bool:
        """Attention and MLP of a layer read the same, and are summed at once."""
        return self.norms.attention is not None and self.norms.mlp is None

    @property
    def mlp_names(self) -> MlpNames:
        return mlp_names(self.model_type, mixed=self.experts is not None)

    @property
    def stateful(self) -> frozenset[int]:
        """Layers that keep a state of each text, in place of keys and values of each token."""
        own = self.delta_net or self.short_conv
        return frozenset() if own is None else own.layers

    @property
    def mixing(self) -> tuple[int, ...]:
        """Layers with attention, linear or not, or a convolution."""
        return tuple(self._of_kinds(LINEAR, FULL))

    @property
    def feeding(self) -> tuple[int, ...]:
        """Layers with an MLP, or a mixture in its place."""
        return tuple(self._of_kinds(MLP, MIXTURE))

    @property
    def mixtures(self) -> tuple[int, ...]:
        """Those with experts."""
        some = range(0) if self.experts is None else self.experts.layers(self.num_layers)
        return tuple(layer for layer in self._of_kinds(MIXTURE) if layer in some)

    def _of_kinds(self, *kinds: str) -> Iterable[int]:
        every = range(self.num_layers)
        return (layer for layer in every if self.blocks[layer] in kinds) if self.blocks else every

    @property
    def num_keeping(self) -> int:
        """Layers before those that keep nothing of a token."""
        return self.num_layers if self.sharing is None else self.sharing.first

    @property
    def keepers(self) -> dict[int, int]:
        """Of each layer that attends to what another keeps, or has chosen, that one."""
        if self.sharing is not None:
            return dict(enumerate(self.sharing.kept_by, self.sharing.first))
        if self.indexer is None:
            return {}
        chosen_by = {layer: self.indexer.chooser(layer) for layer in range(self.num_layers)}
        return {layer: chooser for layer, chooser in chosen_by.items() if layer != chooser}

    @property
    def summed(self) -> int:
        """Numbers of a row in an all-reduce, on average: experts may have a sum of their own beside the MLP's."""
        return self.hidden + (self.hidden // 2 if self.experts and self.experts.apart else 0)


def _values_of(read: Reads, usual: Defaults, head_dim: int) -> int:
    """See ModelShape."""
    if usual.values is None:
        return 0
    key, count = usual.values
    if (size := read.size(key, count)) > head_dim:
        raise read.refusal(key, f"at most head_dim ({head_dim})")
    return size


def _qkv_bias(read: Reads, usual: Defaults) -> bool:
    if usual.bias_key != BIAS_KEY:
        read.refuse(BIAS_KEY)
    if usual.bias_key is None:
        return False
    return read.flag(usual.bias_key, usual.biased is not False) or usual.biased == "always"


def _mlp_bias(read: Reads, usual: Defaults, *, biased: bool) -> bool:
    if usual.mlp_biased in (True, "usually"):
        return read.flag("mlp_bias", usual.mlp_biased == "usually")
    read.refuse("mlp_bias")
    return biased and usual.mlp_biased == "likewise"


@cache
def _plain_modules(folder: Path, written: tuple[int, ...]) -> frozenset[str]:
    """A start asks for a shape some ten times, and headers of a hundred files take a second."""
    return plain_modules({name: tensor.dtype for name, tensor in checkpoint.tensors(folder).items()})


def vocab_of(config: dict[str, object], where: str) -> int | None:
    """How many ids the model of a config.json has; None where that does not say. For who needs no other size."""
    text = text_config(config)
    model_type = text.get("model_type")
    usual = MODEL_TYPES[model_type].vocab if isinstance(model_type, str) and model_type in MODEL_TYPES else None
    return Reads(text, where).size_if_given("vocab_size") or usual


def check_dtype(model_type: str, dtype: str) -> None:
    """UserError where the hidden states of a type of model are too large for a dtype."""
    if dtype == "float16" and not MODEL_TYPES[model_type].float16:
        raise UserError(
            f"dtype: float16: hidden states of {model_type} grow beyond its 65,504; should be bfloat16 or float32"
        )


def check_card(shape: ModelShape) -> None:
    """UserError where there are no kernels for a card of what a model does."""
    if shape.indexer is not None:
        raise UserError(
            f"rows of {shape.model_type} attend to what an index chooses, of which there are no kernels for cards yet; "
            "should run with device: cpu"
        )


def shape_of(model: str) -> ModelShape:
    """The shape of a model in a topology; touches the network only when the model is neither here nor well known."""
    folder = checkpoint.local(model)
    if folder is None and model in known_models():
        return ModelShape.from_config(known_models()[model], f"tpspec/published/models.yaml: {model}")
    return ModelShape.of(folder or checkpoint.find(model))


@cache
def known_models() -> dict[str, dict[str, object]]:
    """Config keys of well-known models, by name."""
    text = files("tpspec.published").joinpath("models.yaml").read_text(encoding="utf-8")
    models: dict[str, dict[str, object]] = yaml.safe_load(text)
    return models
