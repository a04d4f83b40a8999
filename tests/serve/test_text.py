"""Tokens to text as they come: pieces together are the whole, and stop strings cut where they should."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from tpspec.errors import UserError
from tpspec.request import Delta, Logprob, Sampling
from tpspec.serve.answers import Ask, Reader
from tpspec.serve.asking import completion_asks
from tpspec.serve.protocol import CompletionBody
from tpspec.serve.text import StopFinder, TextStream
from tpspec.text import MOST_WAITING, UNFINISHED, Detokenizer, Text

IDS = st.lists(st.integers(0, 319), max_size=40)
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def text(model_folder: Path) -> Text:
    return Text.load(model_folder)


@QUICK
@given(ids=IDS, prompt=IDS)
def test_pieces_and_flush_are_the_text_decoded_at_once(text: Text, ids: list[int], prompt: list[int]) -> None:
    """Bytes of an unfinished character were lost at the end; random ids of a byte vocabulary are mostly such bytes."""
    alone = Detokenizer(text, (), skip_special=True)
    assert "".join(map(alone.step, ids)) + alone.flush() == text.decode(ids, skip_special=True)
    after = Detokenizer(text, prompt, skip_special=True)
    pieces = "".join(map(after.step, ids)) + after.flush()
    if not text.decode(prompt, skip_special=True).endswith("\ufffd"):
        assert text.decode([*prompt, *ids], skip_special=True) == text.decode(prompt, skip_special=True) + pieces


@pytest.mark.parametrize("kind", ["bytes of no character", "hidden"])
def test_tokens_without_text_do_not_pile_up(kind: str, text: Text) -> None:
    """Stands against work that grows with the square of a text in which the model repeats a byte, or the end of text
    that ignore_eos lets it go on from: all other streams wait for it."""
    token = text.encode("😀")[0] if kind != "hidden" else min(text.hidden)
    detokenizer = Detokenizer(text, text.encode("a"), skip_special=True)
    pieces = [detokenizer.step(token) for _ in range(100)]
    assert len(detokenizer._ids) <= MOST_WAITING + 1
    assert len("".join(pieces)) == (100 - UNFINISHED if kind != "hidden" else 0)
    assert "".join(pieces) + detokenizer.flush() == text.decode([token] * 100, skip_special=True)


def test_a_character_of_three_tokens_comes_out_whole(text: Text) -> None:
    ids = text.encode("日")
    assert len(ids) == 3
    detokenizer = Detokenizer(text, (), skip_special=True)
    assert [detokenizer.step(token) for token in ids] == ["", "", "日"]


@pytest.fixture(scope="module")
def llama() -> Text:
    """As Llama 2 has them: decoders strip a text's first space, and take a row of bytes for characters or for none."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "\u2581the"]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], byte_fallback=True))
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*parts])
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset(), len(words))


@pytest.mark.parametrize(
    "prompt", ["日本日本日本", "日本日本日本日", "a日本日本日本", "😀😀😀😀😀", "é" * 20, "a\ufffd"]
)
def test_the_first_space_behind_a_prompt_of_bytes_is_kept(llama: Text, prompt: str) -> None:
    """A prompt whose last tokens begin inside a character was no context, and the space was lost."""
    detokenizer = Detokenizer(llama, llama.encode(prompt), skip_special=True)
    assert detokenizer.step(llama.vocab_size - 1) == " the"


@QUICK
@given(said=st.text("a日😀\ufffd", max_size=20))
def test_what_stands_for_characters_that_are_none_is_said_as_any_other(llama: Text, text: Text, said: str) -> None:
    """Bytes behind it were given up with it, where a decoder takes them as a whole."""
    for one in (llama, text):
        detokenizer = Detokenizer(one, one.encode("a"), skip_special=True)
        pieces = [*map(detokenizer.step, one.encode(said))]
        assert ("".join(pieces), detokenizer.flush()) == (said, "")


@QUICK
@given(
    whole=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_strings_cut_the_same_text_however_it_is_cut_into_pieces(
    whole: str, stops: list[str], data: st.DataObject
) -> None:
    """Expected: the text before the stop string that is completed first, the longest of those completed together."""
    ends = [(end, at) for end in range(len(whole) + 1) for s in stops if (at := _start(whole[:end], s)) is not None]
    expected = whole[: min(ends)[1]] if ends else whole
    finder, out, rest = StopFinder(stops), "", whole
    while rest and not finder.hit:
        size = data.draw(st.integers(1, 4))
        out += finder.feed(rest[:size])
        assert expected.startswith(out), "text was let out that a stop string takes back"
        rest = rest[size:]
    assert out + finder.flush() == expected
    assert finder.hit == bool(ends)


def _start(text: str, stop: str) -> int | None:
    return len(text) - len(stop) if text.endswith(stop) else None


def test_tokens_after_a_stop_string_are_not_counted(text: Text) -> None:
    ids = text.encode("a b, c d e")
    stream = TextStream(Detokenizer(text, (), skip_special=True), [","])
    seen, offsets = stream.feed(ids)
    used = len(offsets)
    assert (seen, stream.stopped) == ("a b", True)
    assert text.decode(ids[:used], skip_special=True) == "a b,"


def test_the_token_that_ends_a_text_stands_behind_bytes_of_no_character(text: Text) -> None:
    """Its offset was that of the bytes before it, which are shown once the text has ended."""
    reader = Reader(Ask((5,), 9, Sampling(), frozenset({2}), logprobs=0), text, 0)
    begun = text.encode("日")[0]
    piece = reader.read(Delta(1, (begun, 2), "stop", logprobs=(Logprob(-1.0), Logprob(-1.0))))
    assert (piece.text, [one.offset for one in piece.rated]) == ("\ufffd", [0, 1])


def test_a_prompt_begins_as_it_was_written_where_that_is_asked_for(model_folder: Path, tmp_path: Path) -> None:
    """Stands against a beginning of text told twice to who writes it himself: add_special_tokens was not heard."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $0", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    text, asked = Text.load(folder), {"prompt": "<|im_start|>a"}

    def prompt(**fields: bool) -> tuple[int, ...]:
        (ask,) = asyncio.run(completion_asks(CompletionBody.model_validate(asked | fields), text, 99))
        return ask.prompt

    assert prompt(add_special_tokens=False) == text.encode("a")
    assert prompt() == (1, *text.encode("a"))


def test_what_is_left_of_free_tokens_is_no_stop_string(text: Text) -> None:
    """A text of no more than min_tokens was ended by what stands for its last bytes."""
    ids = text.encode("日")[:2]
    stream = TextStream(Detokenizer(text, (), skip_special=True), ["\ufffd"], num_free=len(ids))
    assert stream.feed(ids) == ("", [0, 0])
    assert (stream.flush(), stream.stopped) == ("\ufffd", False)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("written", ["<|im_start|>the 日<|im_end|> bus", "the bus"])
def test_offsets_lead_to_tokens_of_a_prompt_with_special_ones(text: Text, written: str, skips: bool) -> None:
    """Against a prompt that spells them, as hand-made chats do: its echo shows them, and offsets passed them over."""
    ids = text.encode(written)
    broken = (*text.encode("日")[:2], *ids)
    for prompt, echo in ((ids, written), (ids, text.decode(ids, skips)), (broken, text.decode(broken, skips))):
        ask = Ask(prompt, 1, Sampling(), text.eos_ids, skip_special=skips, echo=echo, logprobs=0)
        (*rated,) = Reader(ask, text, 0).read(Delta(1, (), prompt_logprobs=(Logprob(0.0),) * (len(prompt) - 1))).rated
        assert [one.token for one in rated] == [*prompt]
        whole = [one for one in rated if one.token not in text.hidden or text.spell(one.token).decode() in echo]
        words = [(one.offset, text.spell(one.token).decode(errors="replace")) for one in whole]
        assert all(echo[at:].lstrip("\ufffd").startswith(word) for at, word in words if "\ufffd" not in word)


def test_every_end_of_text_the_folder_names_is_one(text: Text) -> None:
    """generation_config.json lists ids that config.json does not; models run on when one is missed."""
    assert text.eos_ids == {0, 2}


def test_a_folder_without_a_tokenizer_is_one_readable_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the tokenizer in .*test_a_folder"):
        Text.load(tmp_path)


def edited(model_folder: Path, to: Path, file: str, **keys: object) -> Path:
    """A copy of the folder with other keys in one of its files."""
    folder = shutil.copytree(model_folder, to)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | keys))
    return folder


def test_a_tokenizer_of_a_kind_that_is_not_known_is_refused_in_words(model_folder: Path, tmp_path: Path) -> None:
    """Stands against a traceback: of a newer file the library raises Exception itself, no kind of it."""
    folder = edited(model_folder, tmp_path / "model", "tokenizer.json", pre_tokenizer={"type": "OfNextYear"})
    with pytest.raises(UserError, match="cannot read the tokenizer in"):
        Text.load(folder)


@pytest.mark.parametrize(
    "config", [{"text_config": None}, {"text_config": "none"}, {"eos_token_id": [2, -1, 320, True]}]
)
def test_only_ids_of_the_vocabulary_end_a_text(model_folder: Path, tmp_path: Path, config: dict[str, object]) -> None:
    """Stands against a traceback at a section that is none, and ids withheld until min_tokens that have no logit."""
    assert Text.load(edited(model_folder, tmp_path / "model", "config.json", **config)).eos_ids == {0, 2}
