"""Log-probabilities in OpenAI's two shapes: lists side by side in completions, a list of tokens in chats.

Tokens are the words of the vocabulary, not pieces of the text: a character may take several. Shapes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.request import Logprob
    from tpspec.serve.answers import Rated
    from tpspec.serve.effort import Json
    from tpspec.text import Text

LOWEST = -9999.0  # JSON has no infinity; OpenAI writes this


def for_completion(rated: Sequence[Rated], text: Text) -> Json:
    """The first token of a prompt follows nothing, and has null."""
    return {
        "tokens": [word(text.spell(one.token)) for one in rated],
        "token_logprobs": [None if one.logprob is None else _finite(one.logprob.own) for one in rated],
        "top_logprobs": [None if one.logprob is None else _top(one.token, one.logprob, text) for one in rated],
        "text_offset": [one.offset for one in rated],
    }


def for_chat(rated: Sequence[Rated], text: Text) -> Json:
    known = [(one.token, one.logprob) for one in rated if one.logprob is not None]
    return {
        "content": [
            _entry(token, of.own, text) | {"top_logprobs": [_entry(*pair, text) for pair in of.top]}
            for token, of in known
        ],
        "refusal": None,
    }


def word(spelled: bytes) -> str:
    """Bytes that are no character by themselves are spelled out, as OpenAI does: other ways lose which they are."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _top(token: int, logprob: Logprob, text: Text) -> dict[str, float]:
    """The likeliest words and the token's own; of ids that spell the same word, the likeliest."""
    top: dict[str, float] = {}
    for other, value in (*logprob.top, (token, logprob.own)):
        top.setdefault(word(text.spell(other)), _finite(value))
    return top


def _entry(token: int, value: float, text: Text) -> Json:
    spelled = text.spell(token)
    return {"token": word(spelled), "logprob": _finite(value), "bytes": list(spelled)}


def _finite(value: float) -> float:
    return max(value, LOWEST)
