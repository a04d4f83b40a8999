"""`python -m tpspec.measure quality MODEL`: what 8 and 4 bits cost: perplexity of texts, agreement on greedy answers,
and how many of a draft model's tokens are accepted.

A front door of its own, in one process, with one model in memory at a time. Must not know how weights are quantized.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpspec.command import Parser
from tpspec.errors import UserError
from tpspec.measure.savings import built_in_prompts
from tpspec.model.batch import Carried, Span
from tpspec.model.loader import load_whole
from tpspec.prompts import read_prompts
from tpspec.published.checkpoint import find
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import ModelShape
from tpspec.published.tokenizers import check_same_tokenizer, difference
from tpspec.roles.door import guarded, positive
from tpspec.text import Text
from tpspec.topology.report import table
from tpspec.topology.shards import whole_shard
from tpspec.topology.sizes import weight_bytes

if TYPE_CHECKING:
    from tpspec.model.decoder import Decoder
    from tpspec.topology.config import Quantize

COMMAND = "python -m tpspec.measure quality"
Ids = tuple[int, ...]
KINDS: tuple[Quantize, ...] = ("int8", "int4")
LONGEST = 512  # tokens of a piece of a text, each read from its own beginning
CHUNK = 128  # rows of a forward
HEADS = ("weights", "MiB", "perplexity", "ratio", "same greedy token", "same answers")


@dataclass(frozen=True, slots=True)
class Kind:
    """What is compared: a checkpoint, how its weights are quantized, and whether its cache has 8 bits."""

    model: str
    quantize: Quantize | None = None
    small_cache: bool = False

    def name(self, first: str, dtype: str) -> str:
        weights = self.quantize or (dtype if self.model == first else self.model)
        return f"{weights}, cache int8" if self.small_cache else weights


@dataclass(frozen=True, slots=True)
class Quality:
    """perplexity: over the texts. agreement: the part of the plain model's greedy answers' tokens that this one says
    too, each after the plain model's own text; same_answers: the part of the answers of which that is every token.
    accepted: of this model's own greedy answers, the part of the tokens that a draft model says, each after the text
    before it, by the weights that it has."""

    weights: str
    num_bytes: int
    perplexity: float
    agreement: float
    same_answers: float
    accepted: dict[str, float] = field(default_factory=dict)


def quality(arguments: Sequence[str]) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    text = Text.load(find(options.model))
    given = read_prompts(options.prompts) if options.prompts else built_in_prompts(chat=text.has_chat_template)
    prompts = [prompt.encode(text)[-LONGEST:] for prompt in given]
    texts = [ids for ids in prompts if len(ids) > 1] if options.text is None else _pieces(text, options.text)
    if not texts:
        raise UserError("the prompts are of one token each, and the first is not foretold; name a --text")
    for other in options.also:
        _check_comparable(options.model, other)
    if options.draft is not None:
        check_same_tokenizer(find(options.model), find(options.draft), options.model, options.draft)
    drafts = [] if options.draft is None else _quantized(options.draft, options.quantize)
    found = list(compare(_kinds(options), options.dtype, prompts, texts, options.tokens, drafts))
    lines = [json.dumps([asdict(one) for one in found])] if options.json else _lines(found, options.tokens)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _check_comparable(model: str, other: str) -> None:
    """UserError where the same ids are not the same text to both."""
    first, second = find(model), find(other)
    found = difference(first, second) if (second / "tokenizer.json").is_file() else None
    if found is None and ModelShape.of(first).vocab > ModelShape.of(second).vocab:
        found = f"{ModelShape.of(first).vocab} ids in the one and {ModelShape.of(second).vocab} in the other"
    if found is not None:
        raise UserError(f"--also {other}: should be a checkpoint of the same model as {model}: {found}")


def _kinds(options: argparse.Namespace) -> list[Kind]:
    caches = [Kind(options.model, small_cache=True)] if options.cache else []
    return [*_quantized(options.model, options.quantize), *caches, *(Kind(other) for other in options.also)]


def _quantized(model: str, asked: Sequence[Quantize] | None) -> list[Kind]:
    """The model as it is first. Weights that are codes already, and cannot be rounded again, are not quantized, unless
    that is asked for."""
    stored = ModelShape.of(find(model)).stored
    is_fixed = stored is not None and bool(stored.widths)
    quantize = asked if asked is not None else () if is_fixed else KINDS
    return [Kind(model), *(Kind(model, kind) for kind in quantize)]


def compare(
    kinds: Sequence[Kind],
    dtype: str,
    prompts: Sequence[Ids],
    texts: Sequence[Ids],
    num_tokens: int,
    drafts: Sequence[Kind] = (),
) -> list[Quality]:
    """Each with the first, and with each draft model. num_tokens: of each answer."""
    num_slots = max(len(ids) for ids in (*prompts, *texts)) + num_tokens
    answers, found = list[list[Ids]](), list[Quality]()
    for kind in kinds:
        decoder = _decoder(kind, dtype, num_slots)
        if drafts or not answers:
            answers.append([_answer(decoder, prompt, num_tokens) for prompt in prompts])
        same = _said(decoder, prompts, answers[0])
        found.append(
            Quality(
                weights=kind.name(kinds[0].model, dtype),
                num_bytes=_num_bytes(kind, dtype),
                perplexity=_perplexity(decoder, texts),
                agreement=_part(same),
                same_answers=sum(map(all, same)) / len(same),
            )
        )
        del decoder  # or the next would be there beside it
    accepted: list[dict[str, float]] = [{} for _ in found]
    for draft in drafts:
        decoder = _decoder(draft, dtype, num_slots)
        for of_weights, own in zip(accepted, answers, strict=True):
            of_weights[draft.name(drafts[0].model, dtype)] = _part(_said(decoder, prompts, own))
        del decoder
    return [replace(one, accepted=of_weights) for one, of_weights in zip(found, accepted, strict=True)]


def _decoder(kind: Kind, dtype: str, num_slots: int) -> Decoder:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, numbers = find(kind.model), getattr(torch, dtype)
    return load_whole(
        folder, ModelShape.of(folder), numbers, device, num_slots, kind.quantize, small_cache=kind.small_cache
    )


def _num_bytes(kind: Kind, dtype: str) -> int:
    shape = ModelShape.of(find(kind.model))
    return weight_bytes(shape, whole_shard(shape), dtype, kind.quantize)


def _said(decoder: Decoder, prompts: Sequence[Ids], answers: Sequence[Ids]) -> list[list[bool]]:
    """Of the tokens of each answer, which this model says, too."""
    return [_same(decoder, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _part(same: Sequence[Sequence[bool]]) -> float:
    return sum(map(sum, same)) / sum(map(len, same))


def _answer(decoder: Decoder, prompt: Ids, num_tokens: int) -> Ids:
    """Greedy; it goes on after an end of text."""
    ids = prompt
    for start in (0, *range(len(prompt), len(prompt) + num_tokens - 1)):
        (logits_V,) = decoder.forward([_span(ids, start, 1)])
        ids += (int(logits_V.argmax()),)
    return ids[len(prompt) :]


def _same(decoder: Decoder, prompt: Ids, answer: Ids) -> list[bool]:
    says = [token for logits_TV in _logits(decoder, prompt + answer) for token in logits_TV.argmax(1).tolist()]
    return [token == said for token, said in zip(answer, says[len(prompt) - 1 :], strict=False)]


def _perplexity(decoder: Decoder, texts: Sequence[Ids]) -> float:
    total, num_tokens = 0.0, 0
    for ids in texts:
        start = 1
        for logits_TV in _logits(decoder, ids[:-1]):
            expected = torch.tensor(ids[start : start + len(logits_TV)], device=logits_TV.device)
            total += float(torch.nn.functional.cross_entropy(logits_TV.float(), expected, reduction="sum"))
            start += len(logits_TV)
        num_tokens += len(ids) - 1
    return math.exp(total / num_tokens)


def _logits(decoder: Decoder, ids: Ids) -> Iterator[torch.Tensor]:
    for start in range(0, len(ids), CHUNK):
        rows = ids[start : start + CHUNK]
        yield decoder.forward([_span(ids[: start + len(rows)], start, len(rows))])


def _span(ids: Ids, start: int, num_logits: int) -> Span:
    """Of a text alone, from `start` on."""
    carried = Carried.alone(start, len(ids) - start)
    return Span(0, start, ids[start:], ((0, len(ids)),), num_logits, carried=carried)


def _pieces(text: Text, path: Path) -> list[Ids]:
    """Of two tokens or more: the first of a piece is not foretold."""
    ids = text.encode(_read(path))
    pieces = [ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST)]
    if not (found := [piece for piece in pieces if len(piece) > 1]):
        raise UserError(f"--text {path}: is one token; should be two or more, for the first is not foretold")
    return found


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: cannot be read: {error}") from error
    if not text.strip():
        raise UserError(f"--text {path}: is empty; should hold some text")
    return text


def _lines(found: Sequence[Quality], num_tokens: int) -> list[str]:
    drafts = [f"accepts {name} drafts" for name in found[0].accepted]
    rows = [
        (
            one.weights,
            f"{one.num_bytes / 2**20:.0f}",
            f"{one.perplexity:.3f}",
            f"{one.perplexity / found[0].perplexity:.4f}",
            f"{one.agreement:.1%}",
            f"{one.same_answers:.0%}",
            *(f"{part:.1%}" for part in one.accepted.values()),
        )
        for one in found
    ]
    said = f"answers of {num_tokens} tokens, each compared after the first model's own text"
    return [*table([(*HEADS, *drafts), *rows]), f"{said}; drafts after the model's that accepts" if drafts else said]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=COMMAND, description="What smaller weights cost in quality.")
    parser.add_argument("model", metavar="MODEL", help="a folder, a demo model's name or a hub id")
    parser.add_argument("--quantize", nargs="*", choices=KINDS, metavar="KIND",
                        help="kinds of weights to compare with its own: int8, int4; both")  # fmt: skip
    parser.add_argument("--cache", action="store_true", help="compare with a cache of 8 bits, too")
    parser.add_argument("--also", nargs="+", default=[], metavar="MODEL",
                        help="other checkpoints of the same model, such as quantized ones")  # fmt: skip
    parser.add_argument("--draft", metavar="MODEL", help="a draft model, of whose tokens so many are accepted by each; "
                        "its weights are quantized in the same ways")  # fmt: skip
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" and "kind" to answer')
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text for the perplexity; the prompts' own")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="of each answer; 64")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="bfloat16", help="of the plain model; bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    return parser
