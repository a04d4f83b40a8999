"""Text in and out: a model folder's tokenizer and chat template, tokens to text as they come, stop strings.

Must not know requests, HTTP or the engine. Reads only files of the folder; never runs code from it. transformers is
imported when a tokenizer is loaded, not before: the import takes seconds, and the port should answer meanwhile.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError
from tpspec.serve.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CONTEXT = 16  # prompt tokens a detokenizer looks back on, for leading spaces
PARTIAL = "\ufffd"  # what a decoder writes for the bytes of an unfinished character


class Text:
    """The tokenizer of a model folder, and what the folder says about ids: which end a text, how many there are."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, eos_ids, vocab_size
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Raises UserError when the folder has no readable tokenizer."""
        tokenizer = _tokenizer(folder)
        config = _read_json(folder / "config.json")
        vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or len(tokenizer)
        eos = [config, config.get("text_config", {}), _read_json(folder / "generation_config.json")]
        ids = {i for source in eos for i in _ids(source.get("eos_token_id"))}
        return cls(tokenizer, frozenset(ids | set(_ids(tokenizer.eos_token_id))), vocab_size)

    def encode(self, text: str, limit: int) -> tuple[int, ...]:
        """A prompt as ids, with the beginning-of-text token where the model wants one."""
        return self._encode(text, limit, special=True)

    def encode_chat(self, messages: list[dict[str, str]], answer: bool, limit: int) -> tuple[int, ...]:
        """Messages as ids, through the chat template, which writes the special tokens itself."""
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            message = f"the model's chat template refuses these messages: {str(error)[:200]}"
            raise bad_request(message, "messages", "chat_template_error") from error
        return self._encode(text, limit, special=False)

    def _encode(self, text: str, limit: int, special: bool) -> tuple[int, ...]:
        """limit: the longest prompt that can be served. A text that cannot fit is refused before it costs seconds."""
        if len(text) > limit * self.longest:
            raise too_long(f"at least {len(text) // self.longest}", limit)
        return tuple(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids)

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
        tail = list(prompt[-CONTEXT:])
        # A prompt that ends inside a character is no context: its own last bytes would show up in the answer.
        self._ids = [] if self._decode(tail).endswith(PARTIAL) else tail
        self._done, self._known = len(self._ids), self._decode(self._ids)

    def step(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._known) or text.endswith(PARTIAL):
            return ""
        piece = text[len(self._known) :]
        self._ids = self._ids[self._done :]
        self._done, self._known = len(self._ids), self._decode(self._ids)
        return piece

    def flush(self) -> str:
        """What still waits: the replacement character of bytes that never became a whole one."""
        piece = self._decode(self._ids)[len(self._known) :]
        self._done, self._known = len(self._ids), self._known + piece
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, self._skip)


class StopFinder:
    """Lets text through up to the stop string that is completed first; holds back what may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1
        self._held = ""
        self.hit = False

    def feed(self, piece: str) -> str:
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - self._num_held())

    def flush(self) -> str:
        return "" if self.hit else self._release(len(self._held))

    def _release(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        sizes = range(min(len(self._held), self._reach), 0, -1)
        return next((size for size in sizes if any(s.startswith(self._held[-size:]) for s in self._stops)), 0)


class TextStream:
    """What a client sees of a sequence of tokens: text without stop strings, and how many tokens it took."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._finder = detokenizer, StopFinder(stops)

    @property
    def stopped(self) -> bool:
        return self._finder.hit

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text these tokens let out, and how many of them were used: those after a stop string are not."""
        text = ""
        for used, token in enumerate(tokens, start=1):
            text += self._finder.feed(self._detokenizer.step(token))
            if self.stopped:
                return text, used
        return text, len(tokens)

    def flush(self) -> str:
        if self.stopped:
            return ""
        return self._finder.feed(self._detokenizer.flush()) + self._finder.flush()


def too_long(size: object, limit: int) -> ApiError:
    """limit: the longest prompt that leaves room for one token."""
    message = f"the prompt has {size} tokens; this server's cache holds {limit + 1}, prompt and output together"
    return bad_request(message, "prompt", "context_length_exceeded")


def _tokenizer(folder: Path) -> Any:
    """By tokenizer.json where there is one: it needs no torch, which costs this process seconds and 200 MB."""
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        tokenizer = Loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.backend_tokenizer  # noqa: B018  the Rust one: the incremental decoder needs it
    except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
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
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
