"""Text in and out: a model folder's tokenizer and chat template, and tokens to text as they come.

Must not know requests, HTTP or the engine. Reads only files of the folder; never runs code from it. transformers is
imported when a tokenizer is loaded, not before: the import takes seconds.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError
from tpspec.published.shape import vocab_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONTEXT = 16  # prompt tokens a detokenizer looks back on, for leading spaces
PARTIAL = "\ufffd"  # what a decoder writes for the bytes of an unfinished character
UNFINISHED = 3  # bytes of such a character at most, and so what a decoder writes for them
MOST_WAITING = 8  # tokens: of more, what stands before the last UNFINISHED will never be a character


class NoChat(UserError):
    """The model has no chat template, or its template refuses these messages."""


class NoOption(UserError):
    """What should be an option of a chat template's own is none."""


class Text:
    """The tokenizer of a model folder, and what the folder says about ids: which end a text, how many there are.

    added: the words that were added to the vocabulary as one token each. hidden: ids of those that text does not show.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        self.hidden = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._spelled: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Raises UserError when the folder has no readable tokenizer."""
        tokenizer = _tokenizer(folder)
        config = _read_json(folder / "config.json")
        vocab_size = vocab_of(config, str(folder / "config.json")) or len(tokenizer)
        if (num_ids := tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)) > vocab_size:
            raise UserError(
                f"{folder / 'tokenizer.json'} has {num_ids} tokens, the model's config.json {vocab_size}; "
                "they should be of one model"
            )
        eos = [config, config.get("text_config"), _read_json(folder / "generation_config.json")]
        ids = {i for source in eos if isinstance(source, dict) for i in _ids(source.get("eos_token_id"))}
        ids |= {*_ids(tokenizer.eos_token_id)}
        return cls(tokenizer, frozenset(i for i in ids if 0 <= i < vocab_size), vocab_size)

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt as ids, with the beginning-of-text token where the model wants one."""
        return tuple(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: list[dict[str, str]], *, answer: bool = True) -> tuple[int, ...]:
        """Messages as ids, through the chat template, which writes the special tokens itself. Raises NoChat."""
        return self.encode_rendered(self.render_chat(messages, answer=answer))

    def encode_rendered(self, rendered: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids)

    def has_token(self, word: str) -> bool:
        """Whether a word was added to the vocabulary as one token."""
        return word in self.added

    def hides(self, word: str) -> bool:
        """Whether a word is a special token, which text without special tokens does not show."""
        return self.added.get(word) in self.hidden

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def chat_template(self, *, tools: bool) -> str:
        """The template itself, as it is for chats with tools or without; empty where there is none."""
        try:
            return str(self.tokenizer.get_chat_template(tools=[] if tools else None))
        except ValueError:
            return ""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        answer: bool,
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, bool | int | str] | None = None,
    ) -> str:
        """options: variables of the template's own, never those that transformers gives it or takes itself. Raises
        NoChat, and NoOption."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise NoChat("this model has no chat template")
        ours = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        for name in options or ():
            if name in ours or name in self.tokenizer.special_tokens_map:
                raise NoOption(f"{name} is no option of a chat template")
        rest = {"tokenize": False, "add_generation_prompt": answer, **(options or {})}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools or None, **rest))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise NoChat(f"the model's chat template refuses these messages: {str(error)[:200]}") from error

    def spell(self, token: int) -> bytes:
        """The bytes of one token, as they would stand inside a text; special tokens by name."""
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def _spell(self, token: int) -> bytes:
        once = self.decode((token,), skip_special=False)
        word = self.decode((token, token), skip_special=False)[len(once) :]  # decoders strip a text's first space
        raw = str(self.tokenizer.convert_ids_to_tokens(token)) if PARTIAL in word else ""
        return _raw_bytes(raw) or word.encode()

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special))


class Detokenizer:
    """Tokens to text, one at a time; the pieces and the flush together are the text of all tokens decoded at once.

    Bytes of an unfinished character wait for the rest of it. The window that is decoded starts at a character's
    boundary, two pieces back, because a decoder may treat the first token of a text in its own way (leading space).
    tokenizers' DecodeStream does the same but loses what waits at the end, and raises where we only wait.
    """

    def __init__(self, text: Text, prompt: Sequence[int], skip_special: bool) -> None:
        self._text, self._skip = text, skip_special
        # A prompt that ends inside a character is no context: its own last bytes would show up in the answer. Where its
        # last tokens begin inside one, decoders of bytes may give up all of them.
        tails = (list(prompt[cut - CONTEXT :]) for cut in range(UNFINISHED + 1))
        self._ids = next((tail for tail in tails if not self._waits(tail, self._decode(tail))), [])
        self._done, self._known = len(self._ids), self._decode(self._ids)

    def step(self, token: int) -> str:
        if self._skip and token in self._text.hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if self._waits(self._ids[self._done :], text):
            return self._rid(text) if len(self._ids) - self._done > MOST_WAITING else ""
        if len(text) <= len(self._known):
            return ""
        piece = text[len(self._known) :]
        self._ids = self._ids[self._done :]
        self._done, self._known = len(self._ids), self._decode(self._ids)
        return piece

    def _rid(self, text: str) -> str:
        """Of bytes that are no characters, which may go on for ever, all but the last that may still become one."""
        piece = text[len(self._known) : -UNFINISHED]
        self._ids = self._ids[-MOST_WAITING:]
        self._done, self._known = 0, self._decode(self._ids)[:-UNFINISHED]
        return piece

    def flush(self) -> str:
        """What still waits: the replacement character of bytes that never became a whole one."""
        piece = self._decode(self._ids)[len(self._known) :]
        self._done, self._known = len(self._ids), self._known + piece
        return piece

    def _waits(self, ids: Sequence[int], text: str) -> bool:
        """Whether bytes at the end of the text of these may yet become a character. A model may also say what a decoder
        writes for them: that is one."""
        if not text.endswith(PARTIAL):
            return False
        try:
            b"".join(map(self._text.spell, ids)).decode()
        except UnicodeDecodeError:
            return True
        return False

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, self._skip)


def _raw_bytes(raw: str) -> bytes:
    """What an entry of a vocabulary of bytes stands for, in either of the two ways to write one; empty for others."""
    if re.fullmatch("<0x[0-9A-F]{2}>", raw):
        return bytes([int(raw[3:5], 16)])
    return bytes(BYTES[char] for char in raw) if all(char in BYTES for char in raw) else b""


def _byte_level() -> dict[str, int]:
    """Characters that stand for bytes in a byte-level BPE (GPT-2): themselves where printable, else from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_level()


def _tokenizer(folder: Path) -> Any:
    """By tokenizer.json where there is one: it needs no torch, which costs this process seconds and 200 MB."""
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        tokenizer = Loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.backend_tokenizer  # noqa: B018  the Rust one: the incremental decoder needs it
    except Exception as error:  # the library raises plain Exception, too
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot read the tokenizer in {folder}: {type(error).__name__}: {reason}") from error
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def _ids(value: object) -> list[int]:
    """An id, a list of ids or nothing, as configs write them."""
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
