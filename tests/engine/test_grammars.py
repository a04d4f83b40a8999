"""Constrained output in whole worlds: it parses and validates, it ends, and nobody who drafts changes a token of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.checkpoints import tiny, tiny_draft
from tests.draft.liar import Liar
from tests.engine.test_rounds import Bushy, prompts
from tests.worlds import Told, serve, topology
from tpspec import grammar
from tpspec.comm.messages import Submit
from tpspec.grammar import Vocabulary
from tpspec.request import Request, Sampling
from tpspec.tokens import NO_DRAFT, TokenTree
from tpspec.verify.allowed import Constraint

END = 2
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "ok": {"type": "boolean"},
        "s": {"type": "string", "maxLength": 6},
    },
    "required": ["n", "ok", "s"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    RECORD,
    {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["the cat", "the hat", 7, None]}},
    {"anyOf": [{"type": "string", "pattern": "^[a-f]{2,5}$"}, {"type": "array", "items": RECORD, "maxItems": 1}]},
]
SAMPLINGS = {
    "greedy": Sampling(),
    "warm": Sampling(temperature=0.8, seed=7),
    "hot": Sampling(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target)


@pytest.fixture(scope="module")
def decode(target: Path) -> Callable[[list[int]], str]:
    return Tokenizer.from_file(str(target / "tokenizer.json")).decode


def bound(sampling: Sampling, num_drafts: int | None = None) -> list[Request]:
    """One text for each schema, and one that is free."""
    grammars = [*map(grammar.json_schema, SCHEMAS), ""]
    return [
        Request(i, prompts()[i], 40 if not text else 200, sampling, frozenset({END}), num_drafts, grammar=text)
        for i, text in enumerate(grammars)
    ]


def check_valid(told: Told, decode: Callable[[list[int]], str]) -> None:
    for i, schema in enumerate(SCHEMAS):
        assert told.finish[i] == "stop"
        jsonschema.validate(json.loads(decode(told.tokens[i])), schema)


def drafting(source: str, draft: Path, told: Told) -> dict[str, Any]:
    """Arguments of `serve` and `topology`: who drafts. told: the right texts, for a drafter that knows them."""
    if source in ("liar", "bushy"):
        return {"drafter": (lambda: Liar(263)) if source == "liar" else lambda: Bushy(told.tokens)}
    tree = {"tree": "dynamic"} if source == "model" else {}
    return {"draft": {"source": source, "tokens": 5, "model": str(draft) if source == "model" else None, **tree}}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_texts_validate_and_are_those_of_plain_decoding(
    target: Path, draft: Path, decode: Callable[[list[int]], str], sampling: Sampling
) -> None:
    """Stands against a mask of another row, a matcher that a rejected draft has moved, and a shard's wrong slice."""
    plain = serve(topology(target), bound(sampling, num_drafts=0))
    check_valid(plain, decode)
    for source, num_ranks in [("ngram", 1), ("model", 2), ("liar", 2), ("bushy", 3)]:
        made = drafting(source, draft, plain)
        told = serve(topology(target, num_ranks, draft=made.pop("draft", {})), bound(sampling), **made)
        assert told.texts() == plain.texts(), source


@pytest.mark.parametrize("source", ["ngram", "model", "liar"])
def test_texts_of_rejection_validate_too(
    target: Path, draft: Path, decode: Callable[[list[int]], str], source: str
) -> None:
    made = drafting(source, draft, Told())
    topo = topology(target, 2, accept="rejection", draft=made.pop("draft", {}))
    check_valid(serve(topo, bound(SAMPLINGS["hot"]), **made), decode)


def test_a_bound_text_beside_others_is_the_text_of_its_own(target: Path) -> None:
    together = serve(topology(target, draft={"source": "ngram"}), bound(SAMPLINGS["warm"]))
    alone = serve(topology(target, draft={"source": "ngram"}), bound(SAMPLINGS["warm"])[:1])
    assert alone.tokens[0] == together.tokens[0]


def test_a_small_cache_interrupts_texts_and_their_grammars_go_on(target: Path) -> None:
    record, warm = grammar.json_schema(RECORD), SAMPLINGS["warm"]
    many = [Request(i, prompts()[i % 3][:40], 100, warm, frozenset({END}), grammar=record) for i in range(6)]
    made = topology(target, 2, cache={"tokens": 160, "page": 16}, draft={"source": "ngram", "tokens": 5})
    told = serve(made, many)
    assert told.texts() == serve(topology(target), many).texts()
    assert told.stats[-1].preemptions > 0


def test_texts_that_began_in_another_world_go_on_under_their_grammars(target: Path) -> None:
    requests = bound(SAMPLINGS["warm"])
    whole = serve(topology(target), requests)
    begun = [msgspec.structs.replace(request, begun=tuple(whole.tokens[request.id][:7])) for request in requests]
    again = serve(topology(target), begun)
    assert [[*request.begun, *again.tokens[request.id]] for request in begun] == whole.texts()
    assert again.finish == whole.finish


def one(text: str, **fields: Any) -> Request:
    return Request(
        **{"id": 0, "prompt": prompts()[0], "max_tokens": 30, "stop_ids": frozenset({END}), "grammar": text} | fields
    )


def test_a_text_that_is_cut_short_says_so(target: Path) -> None:
    told = serve(topology(target), [one(grammar.json_schema(RECORD), max_tokens=5)])
    assert told.finish[0] == "length"


@pytest.mark.parametrize("stop_ids", [frozenset({END}), frozenset()])
def test_a_complete_text_ends_without_a_stop_token(
    target: Path, decode: Callable[[list[int]], str], stop_ids: frozenset[int]
) -> None:
    """Where no stop token may come, as with ignore_eos, and where output is shorter than min_tokens."""
    short = Sampling(min_tokens=20, withheld=stop_ids)
    told = serve(
        topology(target, draft={"source": "ngram"}), [one("start: /ca[td]/", sampling=short, stop_ids=stop_ids)]
    )
    assert (decode(told.tokens[0]) in ("cat", "cad"), told.finish[0]) == (True, "stop")


def test_a_minimum_is_kept_while_the_grammar_lets_the_text_go_on(target: Path) -> None:
    told = serve(topology(target), [one("start: /x*/", sampling=Sampling(min_tokens=9, withheld=frozenset({END})))])
    assert len(told.tokens[0]) >= 9


def test_ids_that_no_token_has_are_never_drawn(target: Path, tmp_path: Path) -> None:
    """Heads are wider than their tokenizers; the rows between are real numbers, and here the largest of all."""
    padded = tiny("smollm2", tmp_path, vocab_size=320)
    shutil.copy(target / "tokenizer.json", padded)
    likely = Sampling(logit_bias=dict.fromkeys(range(263, 320), 100.0))
    told = serve(topology(padded, 2), [one("start: /[a-z]{9}/", sampling=likely)])
    assert told.finish[0] == "stop"
    assert max(told.tokens[0]) < 263


def test_forced_tokens_are_drafted_by_the_grammar_itself(target: Path) -> None:
    """Nobody else drafts here, and a request can do without."""
    told = serve(topology(target), [one('start: "a text that is always the same"')])
    rounds = [delta for delta in told.deltas if delta.tokens]
    assert len(rounds) < len(told.tokens[0]) / 2
    assert (
        serve(topology(target), [one('start: "a text that is always the same"', num_drafts=0)]).texts() == told.texts()
    )


def test_a_property_of_a_bound_answer_has_no_other_name(target: Path) -> None:
    """Spelled with an escape it passed for one of which the schema says nothing: the answer did not validate."""
    vocabulary = Vocabulary(target / "tokenizer.json")

    def accepts(schema: dict[str, Any], text: str) -> bool:
        matcher = vocabulary.matcher(grammar.json_schema(schema))
        ids = vocabulary.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for others in ({}, {"required": ["a"]}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {}}):
        schema = {"properties": {"a": {"type": "integer"}}} | others
        assert accepts(schema, '{"a":1,"b":"x\\n"}')
        assert not accepts(schema, '{"a":1,"\\u0061":"x"}')
        assert accepts(schema | {"x-guidance": {"json_allowed_escapes": "nu"}}, '{"a":1,"\\u0061":"x"}')
    assert accepts({"properties": {"a": {"type": "string"}}, "additionalProperties": False}, '{"a":"\\u001b"}')


def test_a_bad_grammar_ends_its_request_alone(target: Path) -> None:
    good = msgspec.structs.replace(bound(SAMPLINGS["greedy"])[3], id=5)
    told = serve(topology(target, 2), [one("start: nowhere"), one("start: /a/ & /b/", id=1), good])
    assert told.finish == {0: "error", 1: "error", 5: "length"}
    assert "nowhere" in (told.deltas[0].error or "")


def test_a_draft_that_is_too_much_for_the_matcher_costs_its_text_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a matcher that stays at a limit which only a draft has reached, and a node without a mask."""
    monkeypatch.setattr(grammar, "MOST_ITEMS", 2_000)
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}}
    vocabulary = Vocabulary(target / "tokenizer.json")
    begin = partial(vocabulary.matcher, grammar.json_schema({"anyOf": [{"const": 7}, many]}))
    seven, brace = vocabulary.tokenizer.tokenize_str("7{")
    text = Constraint(begin, [END], frozenset({END}), 263, 263)
    before = text.allowed([], NO_DRAFT)
    assert text.allowed([], TokenTree((brace,), (-1,)))[1] is None
    assert np.array_equal(text.allowed([], NO_DRAFT), before)
    assert text.fitting([], TokenTree((brace, seven), (-1, -1))).tokens == ()
    assert text.keep([], (seven,)) == ((seven,), "stop")


@pytest.mark.parametrize("is_special", [False, True])
def test_a_draft_with_a_token_that_the_grammar_has_by_its_id_leaves_the_text_where_it_was(
    target: Path, tmp_path: Path, *, is_special: bool
) -> None:
    """Stands against llguidance's rollback, which goes by the letters of such a token (guidance-ai/llguidance#364): a
    call of a tool behind a draft of its mark ended with "allows no token", and without drafts it did not."""
    text = Tokenizer.from_file(str(target / "tokenizer.json"))
    text.add_tokens([AddedToken("[ARGUMENTS]", special=is_special)])
    text.save(str(tmp_path / "tokenizer.json"))
    mark, vocab = text.token_to_id("[ARGUMENTS]"), text.get_vocab_size()
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    before, brace, letter = text.encode("a call of abc").ids, text.token_to_id("{"), text.token_to_id("c")
    trees = TokenTree.chain([mark, brace]), TokenTree((letter, mark, mark, brace), (-1, -1, 1, 1))
    for behind in (f'(<[{mark}]> "{{")+', f'<[{mark}]> <[{mark}]> "{{"'):
        begin = partial(vocabulary.matcher, f'start: "a call of " /[a-z]{{3}}/ {behind}')
        constraint = Constraint(begin, [END], frozenset({END}), vocab, vocab)
        assert constraint.keep([], before) == (tuple(before), None)
        plain = constraint.allowed(before, NO_DRAFT)[0]
        for tree in trees:
            constraint.fitting(before, tree)
            assert np.array_equal(constraint.allowed(before, tree)[0], plain)
        assert constraint.keep(before, [mark]) == ((mark,), None)


def test_a_text_that_cannot_go_on_ends_with_an_error(target: Path) -> None:
    """No token of this vocabulary has what the grammar asks for; stands against a hang, and a token out of thin air."""
    request = one("start: /ab/", begun=tuple(prompts()[0][:2]))  # as if another world had lost its way
    told = serve(topology(target, 2, draft={"source": "ngram"}), [request])
    assert (told.tokens[0], told.finish[0]) == ([], "error")
    assert "allows no token" in (told.deltas[-1].error or "")


def test_a_text_that_uses_up_the_lexer_leaves_others_of_its_grammar_theirs(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a matcher share a lexer. Stands against a schema that works for days, and then for nobody."""
    monkeypatch.setattr(grammar, "MOST_STATES", 60)
    text = Tokenizer.from_file(str(target / "tokenizer.json"))
    c = text.token_to_id("c")
    bound = grammar.regex("c|(a|b)*a(a|b){9}c{3}")
    small = [one(bound, id=i, sampling=Sampling(logit_bias={c: 100.0})) for i in (0, 2, 3)]
    warm = Sampling(temperature=1.0, seed=4, logit_bias={c: -100.0})
    many = one(bound, id=1, max_tokens=200, sampling=warm)
    asks = {1: [Submit(small[0])], 4: [Submit(many)], 8: [Submit(small[1])], 240: [Submit(small[2])]}
    told = serve(topology(target, 2), messages=asks)
    assert told.finish == {0: "stop", 1: "error", 2: "stop", 3: "stop"}
    assert len(told.tokens[1]) > 10


def test_ids_that_no_tokenizer_knows_leave_a_bound_text_alone(target: Path, tmp_path: Path) -> None:
    """A model may have more ids than its tokenizer. Stands against a draft of one, behind which nothing is bound."""
    wide = tiny("smollm2", tmp_path / "wide", vocab_size=270)
    shutil.copy(target / "tokenizer.json", wide)
    text = Tokenizer.from_file(str(target / "tokenizer.json"))
    letters, beyond = [text.token_to_id(letter) for letter in "abc"], text.get_vocab_size()
    pairs = [token for u in letters for v in letters for token in (u, v, *letters)]
    after = [token for u in letters for token in (u, beyond, *letters[:1] * 3)]
    bound = grammar.regex("[abc]{40}")
    asks = [
        one(bound, id=i, prompt=(*pairs, *after), max_tokens=60, sampling=Sampling(temperature=1.0, seed=i))
        for i in range(8)
    ]
    told = serve(topology(wide, draft={"source": "lookahead", "tokens": 40}), asks)
    assert told.texts() == serve(topology(wide), asks).texts()
    assert set(told.finish.values()) == {"stop"}
