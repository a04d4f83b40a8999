"""Grammars: texts that say what an answer may be, in llguidance's own forms, and what it takes to follow one.

A noun that travels: every process that meets such a text compiles it for itself, with the same limits. Must not know
requests, tensors or HTTP. llguidance (github.com/guidance-ai/llguidance) is imported when the first grammar is met.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON, as in llama.cpp's grammars: some models would otherwise go on with blanks for ever.
WHITESPACE = r"(?: |\n{1,2}[ \t]{0,20})"
SHORT_ESCAPES = '"\\bfnrt'  # all but those of four digits
ANNOTATIONS = frozenset((  # of a schema: they say nothing of what it accepts
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
    "$comment",
))  # fmt: skip
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
OF_VALUES = ("enum", "const")
MAX_FAULT_CHARS = 300
NOTHING_ALLOWED = "the grammar of this request allows no token where its text has come to, or is too much to follow"
MOST_STATES = 50_000  # of a lexer, 1 to 2 kB each
MOST_ITEMS = 8_000  # of what may come next: an object with a thousand properties has three of each
MOST_KEPT = 8  # compiled grammars: the choices of one request share theirs


def json_schema(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """JSON that a schema accepts. Its `x-guidance`, if it has one, is llguidance's own way to set options.

    is_lenient: what of it llguidance cannot bind binds nothing; the compiler refuses it otherwise. Unless its
    `x-guidance` says otherwise, no key is spelled with escapes by which llguidance would take one that has a schema for
    one that has none.
    """
    options = schema.get("x-guidance", {"whitespace_pattern": WHITESPACE})
    if isinstance(options, dict):
        exact = {"json_allowed_escapes": SHORT_ESCAPES} if _is_open(schema) else {}
        options = exact | options | ({"lenient": True} if is_lenient else {})
    return json.dumps({"grammars": [{"json_schema": {**without_annotations(schema), "x-guidance": options}}]})


def _is_open(schema: Any) -> bool:
    """Whether an object in it may have properties beside those that it names."""
    if not isinstance(schema, dict):
        return isinstance(schema, list) and any(map(_is_open, schema))
    others = schema.get("additionalProperties", True) if {"properties", "patternProperties"} & set(schema) else False
    return others is not False or any(map(_is_open, schema.values()))


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What binds, without what is for people: most of a schema that was made of a program."""
    bare: dict[str, Any] = rewritten(schema, _without_annotations)
    return bare


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What clients call `x-...` stays where schemas may stand in it, to which others may refer."""
    return {
        key: inner
        for key, inner in schema.items()
        if key not in ANNOTATIONS and (not key.startswith("x-") or isinstance(inner, dict))
    }


def rewritten(value: Any, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """A schema, or a list of them, with every schema in it changed, from the outside in; values that they list stay."""

    def inside(key: str, inner: Any) -> Any:
        if key in OF_NAMES and isinstance(inner, dict):
            return {name: rewritten(one, change) for name, one in inner.items()}
        return inner if key in OF_VALUES else rewritten(inner, change)

    if isinstance(value, list):
        return [rewritten(one, change) for one in value]
    return {key: inside(key, inner) for key, inner in change(value).items()} if isinstance(value, dict) else value


def regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole; in the syntax of Rust's regex crate."""
    plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "start: /" + re.sub(r"\\.|/|\n", lambda found: plain.get(found[0], found[0]), pattern, flags=re.DOTALL) + "/"


def choice(choices: Sequence[str]) -> str:
    """One of these."""
    return "start: " + " | ".join(map(json.dumps, choices))


def as_lark(grammar: str) -> str:
    """Lark as it is, GBNF turned into it. Raises UserError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # it raises what it likes, plain Exception and IndexError too
        raise UserError(f"the grammar is neither Lark nor GBNF: {str(error)[:MAX_FAULT_CHARS]}") from error


class Vocabulary:
    """The tokens of a model as grammars read them. path: of its tokenizer.json, read when the first grammar is met."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._matchers: dict[str, LLMatcher] = {}  # before the first token, the latest last

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(str(self._path))
        except (ValueError, OSError) as error:
            reason = str(error)[:MAX_FAULT_CHARS]
            raise UserError(f"{self._path}: no tokenizer that grammars can be read with ({reason})") from error

    def matcher(self, grammar: str) -> LLMatcher:
        """Of a text that has not begun. Raises UserError, in the compiler's words, for a bad grammar.

        Copies share a lexer and its states, and all of them are of no more use once one has reached MOST_STATES: then
        it is compiled anew.
        """
        kept = self._matchers.pop(grammar, None)
        matcher = None if kept is None else kept.deep_copy()
        if matcher is None or not _is_sound(matcher):
            kept = self._compiled(grammar)
            matcher = kept.deep_copy()
        assert kept is not None
        self._matchers[grammar] = kept
        if len(self._matchers) > MOST_KEPT:
            del self._matchers[next(iter(self._matchers))]
        return matcher

    def _compiled(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MOST_ITEMS, max_lexer_states=MOST_STATES, verbose_errors=False)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        if not _is_sound(matcher):
            raise UserError(f"the grammar cannot be used: {_fault(matcher)}")
        return matcher


def _is_sound(matcher: LLMatcher) -> bool:
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    return not matcher.is_error()


def _fault(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_FAULT_CHARS]
