"""Calls as chat templates write them, and what the grammar of calls lets through of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tpspec.grammar import Vocabulary
from tpspec.serve.arguments import Arguments
from tpspec.serve.call_formats import FORMATS, Format
from tpspec.serve.tool_grammar import tool_grammar
from tpspec.serve.tools import Calling, CallReader, Toolbox

FORMS = {form.name: form for form in FORMATS if not form.is_addressed}
HERMES, LLAMA, CODER, GLM = (FORMS[name] for name in ("hermes", "llama", "qwen3-coder", "glm-4.7"))
PLACE = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"enum": ["here", "日本"]}}}
WORDS = {
    "word": {"type": "string", "description": "as it is said"},
    "far": {"type": "boolean"},
    "to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "at": {"type": "array", "items": {"type": "integer"}},
}
SMALL: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 20}
PAIR: dict[str, Any] = {"type": "object", "properties": {"b": SMALL}, "required": ["b"], "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": PLACE | {"required": ["at"], "additionalProperties": False},
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
    "tell": {"type": "object", "properties": WORDS, "required": ["word", "far"], "additionalProperties": False},
}
FUNCTIONS = {name: Arguments(schema) for name, schema in SCHEMAS.items()}
Call = tuple[str, dict[str, Any]]
LOOK, WAIT, ELSEWHERE = ("look", {"at": "日本"}), ("wait", {}), ("look", {"at": "Rome"})
TELL: Call = ("tell", {"word": 'a\n< "b" 3', "far": True, "to": None, "at": [1, 2]})
LOOSE: Call = ("wait", {"for": "ever"})


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_words(value: Any) -> str:
    return value if isinstance(value, str) else text_of(value)


def unquoted(value: Any, quote: str) -> str:
    """As Gemma's templates write a value."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(unquoted(one, quote) for one in value)}]"
    if not isinstance(value, dict):
        return text_of(value)
    return f"{{{','.join(f'{key}:{unquoted(value[key], quote)}' for key in sorted(value, key=str.lower))}}}"


def written(form: Format, *calls: Call) -> str:
    """As its chat template writes calls of earlier turns."""
    match form.name:
        case "hermes" | "llama":
            keys = {"hermes": "arguments", "llama": "parameters"}
            texts = [text_of({"name": name, keys[form.name]: arguments}) for name, arguments in calls]
            if form is LLAMA:
                return "; ".join(texts)
        case "mistral-list":
            return "[TOOL_CALLS] " + text_of([{"name": name, "arguments": arguments} for name, arguments in calls])
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text_of(arguments)}" for name, arguments in calls)
        case "qwen3-coder" | "seed":
            pad = "\n" if form.name == "qwen3-coder" else ""
            texts = [
                f"<function={name}>\n"
                + "".join(f"<parameter={k}>{pad}{in_words(v)}{pad}</parameter>\n" for k, v in arguments.items())
                + "</function>"
                for name, arguments in calls
            ]
        case "minimax-m2":
            texts = [
                f'<invoke name="{name}">\n'
                + "".join(f'<parameter name="{k}">{in_words(v)}</parameter>\n' for k, v in arguments.items())
                + "</invoke>"
                for name, arguments in calls
            ]
            return "\n".join([form.opening, *texts, form.closing])
        case "gemma-4" | "functiongemma":
            return "".join(
                f"{form.opening}call:{name}{unquoted(arguments, form.form.marks[0])}{form.closing}"
                for name, arguments in calls
            )
        case _:
            gap = "\n" if form.name == "glm-4.5" else ""
            pair = f"<arg_key>{{}}</arg_key>{gap}<arg_value>{{}}</arg_value>{gap}"
            texts = [
                name + gap + "".join(pair.format(k, in_words(v)) for k, v in arguments.items())
                for name, arguments in calls
            ]
            return gap.join(f"{form.opening}{text}{form.closing}" for text in texts)
    return "\n".join(f"{form.opening}\n{text}\n{form.closing}" for text in texts)


def add_marks(tokenizer: Tokenizer, forms: Iterable[Format], *, special: bool) -> None:
    letters = ("<function=", "</function>", "<parameter=", "</parameter>", ">")  # in every vocabulary
    marks = {mark: None for form in forms for mark in form.marks if mark not in letters}
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])


@cache
def loaded(path: Path) -> tuple[Tokenizer, Vocabulary]:
    return Tokenizer.from_file(str(path)), Vocabulary(path)


def accepts(path: Path, grammar: str, text: str) -> bool:
    tokenizer, vocabulary = loaded(path)
    matcher = vocabulary.matcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def made(path: Path, form: Format, *, answer: str = "", **fields: Any) -> str:
    given = {"shown": [], "schemas": SCHEMAS, "strict": frozenset(), "must": not answer, "parallel": True} | fields
    added = {token.content: id for id, token in loaded(path)[0].get_added_tokens_decoder().items()}
    return tool_grammar(Toolbox(**given), form, added, ("answer", answer))


def read(form: Format, text: str, *, lenient: bool = True) -> tuple[str, list[Call]]:
    reader = CallReader(Calling(form, FUNCTIONS, lenient=lenient))
    said, found = reader.feed(text)
    return said + reader.flush(), [(call.name, json.loads(call.arguments)) for call in found]


EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
