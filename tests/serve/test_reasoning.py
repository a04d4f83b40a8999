"""What a model thought, said and called: however its tokens arrive, the same parts of the same answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer

from tests.serve import test_response_items as response_items
from tests.serve.conftest import HARMONY_TEMPLATE, TEMPLATE as PLAIN_TEMPLATE, THINK_TEMPLATE, reasoning_folder
from tests.serve.test_response_items import merged
from tests.serve.written_calls import FORMS, add_marks, written
from tpspec.grammar import Vocabulary
from tpspec.request import Delta, Sampling
from tpspec.serve.answers import Ask, Piece, Reader
from tpspec.serve.arguments import Arguments
from tpspec.serve.asking import chat_asks
from tpspec.serve.call_formats import FORMATS
from tpspec.serve.chats import ChatBody
from tpspec.serve.errors import ApiError
from tpspec.serve.reasoning import ANSWER_TAGS, CHANNEL_TAGS, HARMONY, TAGS, splitter_of
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.tools import Calling
from tpspec.text import Text

(CALLS,) = (form for form in FORMATS if form.is_addressed)
FUNCTIONS = {"look": Arguments({}), "wait": Arguments({})}
BEGIN = "<|start|>assistant"
ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{channel}<|message|>" for channel in ("analysis", "final", "commentary"))
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "日本"}'
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WRITTEN = [*HARMONY, *TAGS, BEGIN, ANALYSIS, FINAL, LOOK, "<|end|>", "{}", " to=", "日", "\n", "a"]
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
BLANKS = st.text(" \n", max_size=3)
Parts = tuple[str, str, list[tuple[str, Any]]]


@pytest.fixture(scope="module")
def tagged(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.load(reasoning_folder(model_folder, tmp_path_factory.mktemp("tagged"), THINK_TEMPLATE))


@pytest.fixture(scope="module")
def harmony(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.load(reasoning_folder(model_folder, tmp_path_factory.mktemp("harmony"), HARMONY_TEMPLATE))


def pieces(text: Text, answer: str, prompt: str = "a", sizes: list[int] | None = None, **fields: Any) -> list[Piece]:
    """Of an answer that comes `sizes` tokens at a time, over and over; all at once without."""
    ask = Ask(text.encode_rendered(prompt), 999, Sampling(), text.eos_ids, is_chat=True, **fields)
    ids, reader, found = list(text.encode_rendered(answer)), Reader(ask, text, 0), list[Piece]()
    ids = ids[: next((i for i, token in enumerate(ids) if token in text.eos_ids), len(ids)) + 1]
    while ids and not (found and found[-1].finish):
        size = sizes[len(found) % len(sizes)] if sizes else len(ids)
        now, ids = ids[:size], ids[size:]
        is_end = now[-1] in text.eos_ids
        found.append(reader.read(Delta(1, tuple(now), "stop" if is_end else None if ids else "length")))
    return found


def parts(piece: Piece) -> Parts:
    return piece.thought, piece.text, [(call.name, json.loads(call.arguments)) for call in piece.calls]


def read(text: Text, answer: str, prompt: str = "a", **fields: Any) -> Parts:
    return parts(merged(pieces(text, answer, prompt, **fields)))


@pytest.mark.parametrize(
    ("prompt", "answer", "thought", "said"),
    [
        ("a", "<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("a", " \n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("a<think>\n", "Hm. \n\n So.\n</think>\nYes.", "Hm. \n\n So.", "Yes."),
        ("a<think>\n", "<think>Hm.</think>Yes.", "Hm.", "Yes."),  # opened again
        ("a<think>", "Hm", "Hm", ""),  # cut off
        ("a", "<think>\nHm\n", "Hm", ""),
        ("a<think>\n\n</think>\n\n", "Yes.", "", "Yes."),  # as templates have it where thoughts are switched off
        ("a", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("a", "\n Yes. <think>No</think>", "", "\n Yes. <think>No</think>"),  # not at the beginning
        ("a", "Yes.</think>\n", "", "Yes.</think>\n"),
        ("a", " \n", "", " \n"),
        ("a", "<think>Hm.</think> \n", "Hm.", ""),
        ("a", "<think>a</think><think>b</think>", "a", "<think>b</think>"),
    ],
)
def test_what_stands_between_tags_at_the_beginning_was_thought(
    tagged: Text, prompt: str, answer: str, thought: str, said: str
) -> None:
    assert read(tagged, answer, prompt) == read(tagged, answer, prompt, sizes=[1]) == (thought, said, [])


@pytest.mark.parametrize(
    ("prompt", "answer", "thought", "said"),
    [
        ("a", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        (
            "a<|channel>thought\n<channel|>",
            "Yes.",
            "",
            "Yes.",
        ),  # where its template switches thoughts off
        ("a", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("a<|channel>thought\n", "Hm.<channel|>Yes.", "Hm.", "Yes."),
        ("a<|channel>", "thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
        ("a", "<|channel>Hm.<channel|>Yes.", "Hm.", "Yes."),  # without a label
        ("a", "<|channel>thought\nthought\nHm.<channel|>Yes.", "thought\nHm.", "Yes."),
        ("a", "thought\nYes.", "", "thought\nYes."),
        ("a thought\n", "Yes.", "", "Yes."),
        ("a", "<|channel>thou", "", ""),  # cut off
    ],
)
def test_a_thought_may_begin_with_a_label(
    prompt: str, answer: str, thought: str, said: str, model_folder: Path, tmp_path: Path
) -> None:
    """Gemma 4's do. Stands against readers who are shown it."""
    text = Text.load(reasoning_folder(model_folder, tmp_path, THINK_TEMPLATE, CHANNEL_TAGS))
    assert read(text, answer, prompt) == read(text, answer, prompt, sizes=[1]) == (thought, said, [])


def test_marks_around_what_is_said_are_shown_to_nobody(model_folder: Path, tmp_path: Path) -> None:
    """Command A's, where its vocabulary has them for words like others."""
    tags = "<|START_THINKING|>", "<|END_THINKING|>"
    text = Text.load(reasoning_folder(model_folder, tmp_path, THINK_TEMPLATE, [*tags, *ANSWER_TAGS]))
    answer = f"{tags[0]}Hm.{tags[1]}{ANSWER_TAGS[0]}Yes.{ANSWER_TAGS[1]}"
    assert read(text, answer) == read(text, answer, sizes=[1]) == ("Hm.", "Yes.", [])


@QUICK
@given(thought=WORDS, said=WORDS, blanks=st.tuples(BLANKS, BLANKS, BLANKS), is_open=st.booleans())
def test_thoughts_and_what_is_said_come_back_as_they_were(
    tagged: Text, thought: str, said: str, blanks: tuple[str, str, str], is_open: bool
) -> None:
    begin, end, between = blanks
    prompt, opened = ("a<think>\n", "") if is_open else ("a", "<think>")
    answer = f"{opened}{begin}{thought}{end}</think>{between}{said}"
    assert read(tagged, answer, prompt, sizes=[1]) == (thought.strip(), said.lstrip(), [])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{ANALYSIS}Hm.<|end|>{BEGIN}{FINAL}Hello<|return|>", ("Hm.", "Hello", [])),
        (f"{FINAL}Hello<|return|>", ("", "Hello", [])),
        (f"{ANALYSIS}Hm", ("Hm", "", [])),  # cut off
        (f"{ANALYSIS}Hm.<|end|>{BEGIN}<|channel|>fi", ("Hm.", "", [])),
        (f"{LOOK}<|call|>", ("", "", [("look", {"at": "日本"})])),
        (f"{ANALYSIS}Hm.<|end|>{BEGIN}{LOOK}<|call|>", ("Hm.", "", [("look", {"at": "日本"})])),
        (f"{COMMENTARY}I look.<|end|>{BEGIN}{LOOK}<|call|>", ("", "I look.", [("look", {"at": "日本"})])),
        (f"{COMMENTARY}First.<|end|>{BEGIN}{FINAL}Then.<|return|>", ("", "First.\nThen.", [])),
        (f"{ANALYSIS}One.<|end|>{BEGIN}{ANALYSIS} Two.<|end|>{BEGIN}{FINAL}So.", ("One.\n Two.", "So.", [])),
        (" to=functions.wait<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("wait", {})])),
        (f"{ANALYSIS}Hm.<|end|>{BEGIN} to=wait{COMMENTARY} <|call|>", ("Hm.", "", [("wait", {})])),  # no arguments
        ("<|channel|>analysis to=functions.look code<|message|>{}<|call|>", ("", "", [("look", {})])),
        ("<|channel|>commentary to=functions.rm json<|message|>{}<|call|>", ("", "{}", [])),  # none of the request's
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", ("1+1", "", [])),  # the model's own
        (LOOK + "<|end|>" + BEGIN + FINAL + "Done.", ("", "Done.", [("look", {"at": "日本"})])),
        (LOOK[:-3], ("", '{"at": "日', [])),  # a call that was cut short is text, as elsewhere
        (LOOK.replace('"日本"', "NaN"), ("", '{"at": NaN}', [])),
        ("Hello", ("", "Hello", [])),  # a model that knows no headers
        (f"Hello<|end|>{BEGIN}{ANALYSIS}Hm.<|end|>So.", ("Hm.", "Hello\nSo.", [])),
        ("", ("", "", [])),
    ],
)
def test_messages_of_harmony_come_apart_by_channel_and_by_whom_they_are_for(
    harmony: Text, answer: str, expected: Parts
) -> None:
    calling = Calling(CALLS, FUNCTIONS)
    for sizes in (None, [1], [2, 3]):
        assert read(harmony, answer, BEGIN, sizes=sizes, calling=calling) == expected


def test_a_message_to_nobody_who_is_known_is_not_held_back(harmony: Text) -> None:
    """What a model wrote to a function that the request did not have came all at once, with its end."""
    answer = "<|channel|>commentary to=functions.rm json<|message|>a long text"
    came = pieces(harmony, answer, sizes=[1], calling=Calling(CALLS, FUNCTIONS))
    assert "".join(piece.text for piece in came[:-2]) != ""
    assert "".join(piece.text for piece in came) == "a long text"


def test_a_call_that_nobody_asked_for_is_text(harmony: Text) -> None:
    assert read(harmony, f"{LOOK}<|call|>", BEGIN) == ("", '{"at": "日本"}', [])


def test_where_a_prompt_leaves_off_an_answer_begins(harmony: Text) -> None:
    """Bound answers begin in the final channel, which then stands in the prompt; other prompts know no headers."""
    for prompt in (BEGIN + FINAL, "<|im_start|>assistant\n", f"{BEGIN}{FINAL}Hi<|end|>{BEGIN}{FINAL}"):
        assert read(harmony, "Hello", prompt) == ("", "Hello", [])
    assert read(harmony, f"{BEGIN}{FINAL}Hello", f"{BEGIN}{FINAL}Hi<|end|>") == ("", "Hello", [])


def test_only_one_call_where_they_may_not_be_parallel(harmony: Text) -> None:
    calling = Calling(CALLS, FUNCTIONS, parallel=False)
    answer = f"{LOOK}<|end|>{BEGIN}{LOOK}<|end|>{BEGIN}{FINAL}Done."
    for sizes in (None, [1]):
        whole = merged(pieces(harmony, answer, BEGIN, sizes, calling=calling))
        assert (parts(whole), whole.finish) == (("", "", [("look", {"at": "日本"})]), "stop")


@QUICK
@given(
    written=st.lists(st.sampled_from(WRITTEN), max_size=9),
    sizes=st.lists(st.integers(1, 6), min_size=1),
    stops=st.lists(st.sampled_from(["a", "\n", "日", "}<"]), max_size=2),
    data=st.data(),
)
def test_how_an_answer_arrives_changes_none_of_its_parts(
    tagged: Text, harmony: Text, written: list[str], sizes: list[int], stops: list[str], data: st.DataObject
) -> None:
    """Marks in any order, characters that fall apart, and readers who lag."""
    text, prompt = data.draw(st.sampled_from([(tagged, "a"), (tagged, "a<think>"), (harmony, BEGIN)]))
    fields: dict[str, Any] = {"stops": tuple(stops)}
    if text is harmony:
        fields["calling"] = Calling(CALLS, FUNCTIONS, data.draw(st.booleans()))
    answer = "".join(written)
    expected = merged(pieces(text, answer, prompt, [1], **fields))
    found = pieces(text, answer, prompt, sizes, **fields)
    half = data.draw(st.integers(0, max(0, len(found) - 1)))
    for whole in (merged(found), merged([merged(found[:half]), merged(found[half:])])):
        assert parts(whole) == parts(expected)
        assert (whole.finish, whole.num_thought) == (expected.finish, expected.num_thought)


@QUICK
@given(
    written=st.lists(st.sampled_from(WRITTEN), max_size=9),
    sizes=st.lists(st.integers(1, 6), min_size=1),
    stops=st.lists(st.sampled_from(["a\na", "日\n", "\n\n"]), max_size=2),
)
def test_a_response_has_the_same_items_however_it_is_cut(
    harmony: Text, written: list[str], sizes: list[int], stops: list[str]
) -> None:
    """Thoughts may come after what is said, and then stand after it, be it held back for what may be a stop string."""
    fields: dict[str, Any] = {"calling": Calling(CALLS, FUNCTIONS), "stops": tuple(stops)}
    answer = "".join(written)
    found = pieces(harmony, answer, BEGIN, sizes, **fields) or [Piece(0, finish="stop")]
    once = pieces(harmony, answer, BEGIN, **fields) or found
    assert response_items.whole(once) == response_items.whole(found) == response_items.streamed(found)


@pytest.mark.parametrize("stop", ["Yes.\n\n", "Yes.\nNo!"])
def test_a_thought_stands_behind_what_may_yet_be_a_stop_string(harmony: Text, stop: str) -> None:
    """A stream had it first, and the message whole behind it."""
    answer = f"{FINAL}Yes.<|end|>{BEGIN}{ANALYSIS}Hm.<|end|>{BEGIN}{FINAL}No."
    items = [("message", "Yes."), ("reasoning", "Hm."), ("message", "\nNo.")]
    assert response_items.streamed(pieces(harmony, answer, BEGIN, [1], stops=(stop,))) == items


def test_thoughts_are_items_before_what_came_of_them(harmony: Text) -> None:
    answer = f"{COMMENTARY}I look.<|end|>{BEGIN}{ANALYSIS}Hm.<|end|>{BEGIN}{LOOK}<|call|>"
    found = pieces(harmony, f"{ANALYSIS}So.<|end|>{BEGIN}{answer}", BEGIN, [1], calling=Calling(CALLS, FUNCTIONS))
    items = [("reasoning", "So."), ("message", "I look."), ("reasoning", "Hm."), ("look", {"at": "日本"})]
    assert response_items.streamed(found) == items


def test_stop_strings_are_looked_for_in_what_is_said(tagged: Text, harmony: Text) -> None:
    """A model thinks of much that it would not say; and the lines around its thoughts are no part of the answer."""
    answer = "<think>\nNo, but.\n</think>\n\nYes, but no."
    assert read(tagged, answer, stops=(" but", "\n")) == ("No, but.", "Yes,", [])
    answer = f"{ANALYSIS}No, but.<|end|>{BEGIN}{FINAL}Yes, but no."
    assert read(harmony, answer, BEGIN, stops=(" but",)) == ("No, but.", "Yes,", [])


def test_tokens_of_thoughts_are_counted_without_their_marks(tagged: Text, harmony: Text) -> None:
    num_tokens = len(tagged.encode_rendered("Hm. Hm."))
    assert merged(pieces(tagged, "<think>Hm. Hm.</think>Yes.")).num_thought == num_tokens
    answer = f"{ANALYSIS}Hm. Hm.<|end|>{BEGIN}{FINAL}Yes."
    assert merged(pieces(harmony, answer, BEGIN, [2])).num_thought == num_tokens


def test_a_vocabulary_without_marks_has_nothing_to_take_apart(model_folder: Path) -> None:
    assert splitter_of(Text.load(model_folder), (5,)) is None
    assert read(Text.load(model_folder), "<think>Hm.</think>Yes.") == ("", "<think>Hm.</think>Yes.", [])


def test_every_end_of_a_message_that_the_folder_names_ends_an_answer(harmony: Text) -> None:
    assert {harmony.added[mark] for mark in ("<|return|>", "<|call|>")} <= harmony.eos_ids
    assert harmony.added["<|end|>"] not in harmony.eos_ids


SCHEMA = {"type": "object", "properties": {"at": {"enum": ["日本"]}}, "required": ["at"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}]
HELLO = {"messages": [{"role": "user", "content": "a"}]}
BOUND: dict[str, Any] = {"response_format": {"type": "json_object"}}


def asked(text: Text, **fields: Any) -> Ask:
    (ask,) = asyncio.run(chat_asks(ChatBody.model_validate(HELLO | fields), text, 4096))
    return ask


def prompt_of(text: Text, ask: Ask) -> str:
    return text.decode(ask.prompt, skip_special=False)


@pytest.mark.parametrize(
    ("options", "end"),
    [({}, "<|im_start|>assistant\n"), ({"thinks": True}, "<|im_start|>assistant\n<think>\n</think>\n\n")],
)
def test_a_bound_answer_comes_after_thoughts_that_the_template_began(
    tagged: Text, options: dict[str, Any], end: str
) -> None:
    """A grammar holds from the first token; the answer would else be taken for a thought."""
    ask = asked(tagged, chat_template_kwargs=options, **BOUND)
    assert prompt_of(tagged, ask).endswith(end)
    assert parts(Reader(ask, tagged, 0).read(Delta(1, tagged.encode_rendered("{}"), "stop"))) == ("", "{}", [])


def test_a_bound_answer_of_harmony_is_final(harmony: Text) -> None:
    ask = asked(harmony, **BOUND)
    assert prompt_of(harmony, ask).endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert parts(Reader(ask, harmony, 0).read(Delta(1, harmony.encode_rendered("{}"), "stop"))) == ("", "{}", [])
    assert prompt_of(harmony, asked(harmony)).endswith("<|end|><|start|>assistant")


@pytest.mark.parametrize("name", ["tagged", "harmony"])
def test_drafts_behind_the_last_call_that_is_wanted_count_for_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    """A round with drafts may go on behind it, and end there for another reason. Stands against an answer whose tokens,
    and why it ended, depend on who drafts."""
    text: Text = request.getfixturevalue(name)
    form, look = (CALLS, LOOK) if name == "harmony" else (FORMS["hermes"], written(FORMS["hermes"], ("look", {})))
    calling = Calling(form, FUNCTIONS, parallel=False)
    for behind in ("<|end|> and so on", f"<|end|>{BEGIN}{look}<|im_end|>"):
        found = [merged(pieces(text, look + behind, sizes=sizes, calling=calling)) for sizes in ([1], [7], None)]
        ((tokens, *told),) = {
            (tuple(one.tokens), one.num_tokens, one.finish, one.text, len(one.calls)) for one in found
        }
        assert (look + "<|end|>").startswith(text.decode(tokens, skip_special=False))
        assert told == [len(tokens), "stop", "", 1]


def accepts(folder: Path, text: Text, ask: Ask, answer: str) -> bool:
    matcher, ids = Vocabulary(folder / "tokenizer.json").matcher(ask.grammar), text.encode_rendered(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_strict_functions_leave_room_for_thoughts(model_folder: Path, tmp_path: Path) -> None:
    """Tags are tokens, which a grammar of any text does not let through."""
    folder = reasoning_folder(model_folder, tmp_path, THINK_TEMPLATE)
    text = Text.load(folder)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "日本"}}\n</tool_call>'
    for options, thought in (({}, "<think>\nHm.\n</think>\n\n"), ({"thinks": True}, "Hm.\n</think>\n")):
        ask = asked(text, tools=TOOLS, chat_template_kwargs=options)
        for said in ("Yes.", f"I look.\n{call}"):
            assert accepts(folder, text, ask, thought + said)
        assert not accepts(folder, text, ask, thought + call.replace("日本", "Rome"))
    forced = asked(text, tools=TOOLS, tool_choice="required", chat_template_kwargs={"thinks": True})
    assert prompt_of(text, forced).endswith("</think>\n\n")
    assert accepts(folder, text, forced, call)


SIGNS = {
    "qwen3-coder": "<tool_call><function=look><parameter=at>",
    "minimax-m2": "<minimax:tool_call>",
    "seed": "<seed:tool_call>",
    "glm-4.5": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>",
    "glm-4.7": "<tool_call>look<arg_key>at</arg_key><arg_value>",
    "mistral": "[TOOL_CALLS]look[ARGS]{}",
    "mistral-list": "[TOOL_CALLS] [{}]",
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_model_thinks_and_calls_in_the_marks_of_its_own_vocabulary(
    model_folder: Path, tmp_path: Path, name: str
) -> None:
    """Mistral's are special tokens, which text does not show; brackets and colons are no names in a grammar."""
    form, call = FORMS[name], ("look", {"at": "日本"})
    tags = {"seed": ("<seed:think>", "</seed:think>"), "mistral": ("[THINK]", "[/THINK]")}.get(name, TAGS)
    folder = reasoning_folder(model_folder, tmp_path, f"{{# tools: {SIGNS[name]} #}}{PLAIN_TEMPLATE}", [*tags])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add_marks(tokenizer, [form], special=form.short_ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = Text.load(folder)
    answer = f"{tags[0]}Hm.{tags[1]}\nI look.\n{written(form, call)}"
    for tools in (TOOLS, [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]):
        ask = asked(text, tools=tools)
        for size in (1, 99):
            found = pieces(text, answer, sizes=[size], calling=ask.calling, skip_special=ask.skip_special)
            assert parts(merged(found)) == ("Hm.", "I look.", [call])
    strict, forced = asked(text, tools=TOOLS), asked(text, tools=TOOLS, tool_choice="required")
    assert accepts(folder, text, strict, answer)
    assert accepts(folder, text, forced, written(form, call))
    assert not accepts(folder, text, strict, answer.replace("日本", "Rome"))


def test_calls_of_harmony_are_bound_where_they_have_to_be(model_folder: Path, tmp_path: Path) -> None:
    folder = reasoning_folder(model_folder, tmp_path, HARMONY_TEMPLATE)
    text = Text.load(folder)
    strict, forced = (asked(text, tools=TOOLS, tool_choice=choice) for choice in ("auto", "required"))
    either = asked(text, tools=TOOLS, **BOUND)
    thought = f"{ANALYSIS}Hm.<|end|>{BEGIN}"
    said, elsewhere = f"{FINAL}Yes.", LOOK.replace("日本", "Rome")
    accepted = {
        "strict": (strict, (LOOK, thought + LOOK, said, thought + said, f"{COMMENTARY}So.<|end|>{BEGIN}{LOOK}")),
        "forced": (forced, (LOOK,)),
        "either": (either, (LOOK, f'{FINAL}{{"a": 1}}')),
    }
    for name, (ask, answers) in accepted.items():
        assert prompt_of(text, ask).endswith("<|start|>assistant"), name
        for answer in answers:
            assert accepts(folder, text, ask, answer), (name, answer)
            assert parts(Reader(ask, text, 0).read(Delta(1, text.encode_rendered(answer), "length")))[2] == (
                [("look", {"at": "日本"})] if answer.endswith(LOOK) else []
            )
        assert not accepts(folder, text, ask, elsewhere), name
    assert not accepts(folder, text, forced, said)
    assert not accepts(folder, text, either, said)


@pytest.mark.parametrize("effort", ["low", "high"])
def test_effort_is_for_the_template(harmony: Text, effort: str) -> None:
    assert f"Reasoning: {effort}<|end|>" in prompt_of(harmony, asked(harmony, reasoning_effort=effort))
    body = ResponsesBody.model_validate({"input": "a", "reasoning": {"effort": effort}})
    (ask,) = asyncio.run(chat_asks(body, harmony, 4096))
    assert f"Reasoning: {effort}<|end|>" in prompt_of(harmony, ask)


def test_effort_that_the_template_would_not_read_is_refused(tagged: Text) -> None:
    with pytest.raises(ApiError, match=r"reasoning_effort: .* leave it out") as refused:
        asked(tagged, reasoning_effort="xhigh")
    with pytest.raises(ApiError, match="leave it out"):  # it would think all the same
        asked(tagged, reasoning_effort="none")
    assert (refused.value.param, refused.value.code) == ("reasoning_effort", "unsupported_parameter")


def test_no_effort_is_no_thoughts(model_folder: Path, tmp_path: Path) -> None:
    """Where a template knows but whether there shall be any, as Qwen3's does. Stands against a model that thinks all
    the same."""
    none = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    text = Text.load(reasoning_folder(model_folder, tmp_path, THINK_TEMPLATE + none))
    assert prompt_of(text, asked(text, reasoning_effort="none")).endswith("<think>\n\n</think>\n\n")
    wanted = {"chat_template_kwargs": {"enable_thinking": True}}
    assert "<think>" not in prompt_of(text, asked(text, reasoning_effort="none", **wanted))


def test_thoughts_go_back_to_the_template(tagged: Text, harmony: Text) -> None:
    """Under both names that templates have for them; that of harmony refuses them beside text and a call."""
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    messages = [*HELLO["messages"], thought, *HELLO["messages"]]
    assert "<think>\nHm.\n</think>\n\nYes." in prompt_of(tagged, asked(tagged, messages=messages))
    assert f"{BEGIN}{ANALYSIS}Hm.<|end|>{BEGIN}{FINAL}Yes.<|end|>" in prompt_of(
        harmony, asked(harmony, messages=messages)
    )
    for content in (None, "I look."):
        calls = thought | {"content": content, "tool_calls": [call]}
        prompt = prompt_of(harmony, asked(harmony, messages=[*HELLO["messages"], calls], tools=TOOLS))
        assert (content or "Hm.") in prompt
