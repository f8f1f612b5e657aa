"""Chat templates, the spans that are trained, and token ids: against transformers, and by hand."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder, marked
from smp.data.tuning.files import Row
from smp.data.tuning.messages import BadSampleError, Conversation
from smp.data.tuning.samples import Report
from smp.data.tuning.shapes import Reading, recognise, recognise_pair
from smp.data.tuning.tokenizer import FolderTokenizer, open_tokenizer
from smp.training.texts.text_model import TokenizerFile
from tests.data.tuning.tokenizer_lab import KINDS
from tests.training.tiny_hf import TEMPLATE, write_pieces, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")

CHAT = Reading(chat=True)
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "it is four"},
    {"role": "user", "content": "and \u00fc\u6f22?"},
    {"role": "assistant", "content": "  seven "},
]
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}{{ '\n' }}"
    "{%- else %}{{ m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
)
"""The same text as ChatML, with generation blocks."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return FolderTokenizer(folder)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    write_pieces(path)
    return path


def said(tokenizer: FolderTokenizer, encoder: Encoder, record: dict) -> list[str]:  # type: ignore[type-arg]
    """Stretches of trained text."""
    [(ids, trained)] = encoder.sample(record)
    out, open_ = [], False
    for number, is_trained in zip(ids.tolist(), trained.tolist(), strict=True):
        if is_trained and not open_:
            out.append([])
        if is_trained:
            out[-1].append(number)  # type: ignore[attr-defined]
        open_ = is_trained
    return [tokenizer.decode(part) for part in out]


@pytest.mark.parametrize("source", [TEMPLATE, MARKED])
def test_what_the_assistant_says_is_trained_with_the_end_of_its_turn(tokenizer: FolderTokenizer, source: str) -> None:
    template = ChatTemplate(source, tokenizer.template_tokens)
    assert template.marks_assistant == (source is MARKED)
    encoder = Encoder(tokenizer, template)
    assert said(tokenizer, encoder, {"messages": MESSAGES}) == ["it is four<|im_end|>", "  seven <|im_end|>"]
    silent = [*MESSAGES[:2], {**MESSAGES[2], "train": False}, *MESSAGES[3:]]
    assert said(tokenizer, encoder, {"messages": silent}) == ["  seven <|im_end|>"]
    assert len(said(tokenizer, Encoder(tokenizer, template, mask_prompt=False), {"messages": MESSAGES})) == 1


@pytest.mark.parametrize("behind", ["\n", "\n\n", " \n", "\t"])
def test_white_space_behind_the_end_is_not_trained_within_a_block(tokenizer: FolderTokenizer, behind: str) -> None:
    """The model has stopped there, whatever the template marks."""
    inside = MARKED.replace("{%- endgeneration %}{{ '\n' }}", "{{ '" + behind + "' }}{%- endgeneration %}")
    encoder = Encoder(tokenizer, ChatTemplate(inside, tokenizer.template_tokens))
    assert inside != MARKED
    assert said(tokenizer, encoder, {"messages": MESSAGES}) == ["it is four<|im_end|>", "  seven <|im_end|>"]


def test_a_line_end_behind_the_end_is_not_trained_whatever_the_file_calls_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = FolderTokenizer(tmp_path)
    encoder = Encoder(tokenizer, ChatTemplate(TEMPLATE, tokenizer.template_tokens))
    assert said(tokenizer, encoder, {"messages": MESSAGES}) == ["it is four<|im_end|>", "  seven <|im_end|>"]


def test_token_ids_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.template == TEMPLATE and tokenizer.eos == theirs.eos_token_id
    [(ids, _)] = Encoder(tokenizer, ChatTemplate(TEMPLATE, {})).sample({"messages": MESSAGES})
    assert ids.tolist() == theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    tools = [{"type": "function", "function": {"name": "f", "description": "a <b> \u00fc"}}]
    source = "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + TEMPLATE
    text, _ = ChatTemplate(source, tokenizer.template_tokens).render(
        Conversation(tuple(MESSAGES), (False,) * 5, tools=tools)
    )
    assert text == theirs.apply_chat_template(MESSAGES, tools=tools, chat_template=source, tokenize=False)


def test_plain_text_begins_as_the_tokenizer_says_and_its_end_is_trained(tokenizer: FolderTokenizer) -> None:
    encoder = Encoder(tokenizer, None)
    [(ids, trained)] = encoder.sample({"prompt": "what is ", "completion": "it"})
    assert tokenizer.decode(ids) == "what is it<|im_end|>"
    assert tokenizer.decode(ids[trained]) == "it<|im_end|>"
    [(ids, trained)] = encoder.sample({"text": "it is"})
    assert trained.all() and ids[-1] == tokenizer.eos


def test_a_text_that_ends_itself_is_not_ended_twice(tokenizer: FolderTokenizer) -> None:
    encoder = Encoder(tokenizer, None)
    for record in ({"text": "it is<|im_end|>"}, {"prompt": "a ", "completion": "it is<|im_end|>"}):
        [(ids, trained)] = encoder.sample(record)
        assert ids.tolist().count(tokenizer.eos) == 1 and ids[-1] == tokenizer.eos and trained[-1]
    [(ids, trained)] = encoder.sample({"prompt": "a<|im_end|>", "completion": ""})  # the answer is the end
    assert ids.tolist()[-2:] == [tokenizer.eos] * 2 and trained.tolist()[-2:] == [False, True]


def test_what_the_tokenizer_puts_in_front_is_kept_whatever_it_puts_behind(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for behind in ("", " <|im_end|>"):
        put_around(tmp_path, f"<|bos|> $A{behind}")
        tokenizer = FolderTokenizer(tmp_path)
        assert tokenizer.before == [0]
        [(ids, trained)] = Encoder(tokenizer, None).sample({"text": "it is"})
        assert tokenizer.decode(ids) == "<|bos|>it is<|im_end|>" and trained.tolist()[0] is False


def test_a_text_that_begins_itself_is_not_begun_twice(tmp_path: Path) -> None:
    """As a prompt does that came out of a chat template."""
    write_tokenizer(tmp_path)
    put_around(tmp_path, "<|bos|> $A <|im_end|>")
    tokenizer, writer = FolderTokenizer(tmp_path), TokenizerFile(tmp_path / "tokenizer.json")  # of generate.py
    encoder = Encoder(tokenizer, None)
    for bos in ("", "<|bos|>"):
        for prompt, answer in ((bos + "what is ", "it"), ("", bos + "it is")):
            [(ids, trained)] = encoder.sample({"prompt": prompt, "completion": answer})
            assert ids.tolist().count(0) == 1 and ids[0] == 0 and not trained[0], (prompt, answer)
            asked = ids[: int(trained.argmax())].tolist()
            assert encoder.prompt(prompt) == asked == writer.encode(prompt), "it goes on from what was trained"
        [(ids, trained)] = encoder.sample({"text": bos + "it is"})
        assert ids.tolist().count(0) == 1 and trained.tolist() == [False] + [True] * (len(ids) - 1)


def put_around(folder: Path, single: str) -> None:
    """Let the tokenizer put special tokens around a text."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<|bos|>", 0), ("<|im_end|>", 2)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    inner.save(str(folder / "tokenizer.json"))


def test_begin_and_end_that_are_written_out_are_these_pieces(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(KINDS["pieces-bpe"].make(tmp_path))
    bos, eos = (tokenizer.template_tokens[name] for name in ("bos_token", "eos_token"))
    [(ids, trained)] = Encoder(tokenizer, None).sample({"prompt": f"{bos}what is", "completion": f" it{eos}"})
    assert ids[0] == tokenizer.bos and ids.tolist().count(tokenizer.eos) == 1 and ids[-1] == tokenizer.eos
    assert tokenizer.decode(ids.tolist()) == f"{bos}what is it{eos}"
    assert tokenizer.decode(ids[trained].tolist()).strip() == f"it{eos}"


def test_a_sentencepiece_model_takes_a_template_with_its_own_ends(tmp_path: Path) -> None:
    from tools.train_tokenizer import main as train_tokenizer

    (tmp_path / "corpus.jsonl").write_text(
        '{"text": "what is it? it is four and seven. be brief! user assistant"}\n' * 9
    )
    train_tokenizer(
        [*("--input", str(tmp_path / "corpus.jsonl")), *("--model-prefix", str(tmp_path / "t")), "--vocab-size", "300"]
    )
    tokenizer = open_tokenizer(tmp_path / "t.model")
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        " {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        tokenizer.template_tokens,
    )
    [text] = Encoder(tokenizer, template).sample({"messages": MESSAGES[1:3]})
    ids, trained = text
    assert ids.tolist().count(tokenizer.eos) == 1 and tokenizer.eos in ids[trained]
    end = tokenizer.template_tokens["eos_token"]
    assert tokenizer.decode(ids[trained]).strip() == f"it is four{end}"
    assert marked(tokenizer, text, colours=False).count(end) == 1, "people see it too"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", TEMPLATE),
        ("chat_template.json", json.dumps({"chat_template": TEMPLATE})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": TEMPLATE}]})),
    ],
)
def test_a_template_beside_a_sentencepiece_model_is_not_passed_over(
    pieces: Path, tmp_path: Path, name: str, content: str
) -> None:
    alpaca = {"instruction": "what is it?", "output": "it is four"}
    shutil.copyfile(pieces, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert len(Encoder(open_tokenizer(tmp_path), None).sample(alpaca)) == 1
    with pytest.raises(BadSampleError, match="there is no chat template"):
        Encoder(open_tokenizer(tmp_path), None).sample({"messages": MESSAGES})
    (tmp_path / name).write_text(content)
    tokenizer = open_tokenizer(tmp_path)
    how = (
        "give it by --chat-template" if name.endswith("jinja") else "write it to a file of its own and give it by --ch"
    )
    why = f"the chat template in {tmp_path / name} is not read with a sentencepiece model: {how}"
    encoder = Encoder(tokenizer, None)
    for record, encode in (
        (alpaca, encoder.sample),
        (alpaca | {"label": True}, encoder.labelled),
        ({"messages": MESSAGES}, encoder.sample),
        ({"chosen": MESSAGES[:3], "rejected": [*MESSAGES[:2], MESSAGES[4]]}, encoder.pair),
    ):
        with pytest.raises(BadSampleError, match=re.escape(why)):
            encode(record)
    assert len(encoder.sample({"prompt": "it ", "completion": "is"})) == 1, "no template would be used"
    assert len(Encoder(tokenizer, ChatTemplate(TEMPLATE, {})).sample(alpaca)) == 1
    assert len(Encoder(open_tokenizer(tmp_path / "tokenizer.model"), None).sample(alpaca)) == 1, "the model alone"
    (tmp_path / name).write_text('{"chat_template": "')
    if name.endswith("json"):
        assert open_tokenizer(tmp_path).unread_template is None, "damage of what nothing reads"


def test_pairs_are_two_texts(tokenizer: FolderTokenizer) -> None:
    chosen, rejected = Encoder(tokenizer, None).pair({"prompt": "is it ", "chosen": "yes", "rejected": "no"})
    assert [tokenizer.decode(ids[mask]) for ids, mask in (chosen, rejected)] == ["yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "record", "why"),
    [
        (None, {"messages": MESSAGES}, "there is no chat template"),
        (TEMPLATE, {"messages": MESSAGES[:2]}, "nothing in it is trained"),
        ("{{ raise_exception('only users') }}", {"messages": MESSAGES}, "refuses it: only users"),
        ("{{ messages[9].content.foo() }}", {"messages": MESSAGES}, "the chat template"),
        (
            "{{ messages[-1].content }}",
            {"messages": MESSAGES},
            "message 0 (system) says something, which the chat templ",
        ),
        (
            "{% if messages | length < 4 %}a {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
            {"messages": MESSAGES},
            "differently when others follow",
        ),
        ("{{ range(1000000) | list }}", {"messages": MESSAGES}, "OverflowError"),
        ("{{ 1 / 0 }}", {"messages": MESSAGES}, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"messages": MESSAGES}, "RecursionError"),
        (TEMPLATE, {"messages": [*MESSAGES, {"role": "assistant", "content": "a\ufdd0b"}]}, "U+FDD0 to U+FDD4"),
        (TEMPLATE, {"messages": [*MESSAGES, {"role": "assistant", "content": "a\ud800b"}]}, "lone surrogate"),
        (None, {"prompt": "a", "completion": "\udfff"}, "lone surrogate"),
        ("{{ ''.__class__.__mro__ }}", {"messages": MESSAGES}, "refuses it"),
        ("{% do messages.clear() %}", {"messages": MESSAGES}, None),
    ],
)
def test_what_cannot_be_rendered_says_why(
    tokenizer: FolderTokenizer,
    source: str | None,
    record: dict,
    why: str | None,  # type: ignore[type-arg]
) -> None:
    if why is None:
        with pytest.raises(ValueError, match="not valid"):
            ChatTemplate(source or "", {})
        return
    template = None if source is None else ChatTemplate(source, {})
    with pytest.raises(ValueError) as error:
        Encoder(tokenizer, template).sample(record)
    assert why in str(error.value)


def test_special_tokens_and_templates_are_found_wherever_they_are(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    assert FolderTokenizer(tmp_path).template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ 1 }}"}')
    assert FolderTokenizer(tmp_path).template == "{{ 1 }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert FolderTokenizer(tmp_path).template == "{{ 2 }}"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert FolderTokenizer(tmp_path).eos == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "gone"}')
    with pytest.raises(ValueError, match="names no eos_token"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        open_tokenizer(tmp_path)


def test_a_preview_marks_what_is_trained(tokenizer: FolderTokenizer) -> None:
    [text] = Encoder(tokenizer, None).sample({"prompt": "what is ", "completion": "it"})
    assert marked(tokenizer, text, colours=True) == "\x1b[2mwhat is \x1b[0m\x1b[1;32mit<|im_end|>\x1b[0m"
    assert marked(tokenizer, text, colours=False) == "what is ⟦it<|im_end|>⟧"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "message 1 has tool_calls"),
        ({"reasoning_content": "because"}, "message 1 has reasoning_content"),
        ({"thinking": "because"}, "message 1 has thinking"),
        ({"reasoning": "because"}, "message 1 has reasoning"),
        ({"function_call": {"name": "f", "arguments": "because"}}, "message 1 has function_call"),
        ({}, "it has tools"),
    ],
)
def test_what_a_template_would_leave_out_is_told(more: dict[str, Any], said: str) -> None:
    """Else an assistant's call of a tool would be trained as an empty answer."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", **more}
    sample = recognise({"messages": [user, answer], "tools": "" if more else '[{"name": "f"}]'}, CHAT)
    assert isinstance(sample, Conversation)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    with pytest.raises(BadSampleError, match=f"{said}, which the chat template does not show"):
        ChatTemplate(source, {}).render(sample)
    name = next(iter(more), "tools")
    shown = "{{ tools }}" + source.replace("{% endfor %}", "{{ m." + name + " }};{% endfor %}")
    text, _ = ChatTemplate(shown, {}).render(sample)
    assert "because" in text or "'name': 'f'" in text
    if name in ("tools", "tool_calls", "function_call"):  # it is asked for and never written
        asked = source.replace("{{ m.content", "{% if tools or m." + name + " %}{% endif %}{{ m.content")
        with pytest.raises(BadSampleError, match=f"{said}, which the chat template does not show"):
            ChatTemplate(asked, {}).render(sample)


def test_many_calls_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering for each message with calls would be one of the whole conversation: quadratic. A single call that is
    not shown is found all the same."""
    user = {"role": "user", "content": "hi"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    sample = recognise({"messages": [user, *[call, {**user, "role": "tool"}] * 20]}, CHAT)
    assert isinstance(sample, Conversation)
    source = "{% for m in messages %}{{ m.content }}{% if loop.index0 != HIDDEN %}CALLS{% endif %};{% endfor %}"
    render, count = ChatTemplate._render, [0]

    def counted(*args: Any, **options: Any) -> str:
        count[0] += 1
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "_render", counted)
    names = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    untrained = Conversation(sample.messages, (False,) * len(sample.messages))
    ChatTemplate(source.replace("HIDDEN", "-1").replace("CALLS", names), {}).render(untrained)
    assert count[0] <= 5
    for calls in (names, "{{ m.tool_calls }}", names.replace("{{ c.function.name }}", "")):
        ChatTemplate(source.replace("HIDDEN", "-1").replace("CALLS", calls), {}).render(untrained)
        with pytest.raises(BadSampleError, match="message 7 has tool_calls, which the chat template does not show"):
            ChatTemplate(source.replace("HIDDEN", "7").replace("CALLS", calls), {}).render(untrained)


@pytest.mark.parametrize("said", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_the_name_that_the_template_reads(tokenizer: FolderTokenizer, said: str, tmp_path: Path) -> None:
    """transformers gives it to templates under both of their names."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", said: "because"}
    for name in ("thinking", "reasoning_content"):
        source = "{% for m in messages %}{{ m.role }}: {{ m." + name + " }}; {{ m.content }};{% endfor %}"
        text, _ = ChatTemplate(source, {}).render(Conversation((user, answer), (False, False)))
        assert "because; yo" in text
        assert text == theirs.apply_chat_template([user, answer], chat_template=source, tokenize=False)


def test_keys_of_messages_that_no_template_names_are_noted(tokenizer: FolderTokenizer) -> None:
    encoder = Encoder(tokenizer, ChatTemplate(TEMPLATE, {}))
    user = {"role": "user", "content": "hi", "id": 3, "tag": ""}
    row = Row({"messages": [user, {"role": "assistant", "content": "yo", "weight": 1}]})
    encoder.sample(row)
    assert row.hidden == {"id"}
    row = Row({"messages": [user, {"role": "assistant", "content": "yo"}]})
    Encoder(tokenizer, ChatTemplate(TEMPLATE.replace("{{ m['role'] }}", "{{ m.role }}{{ m.id }}"), {})).sample(row)
    assert row.hidden == set()


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_the_template_leaves_out_is_refused(tokenizer: FolderTokenizer, role: str) -> None:
    """Also where the same words stand elsewhere, and in prompts."""
    source = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role + ':' + m.content }}{% endfor %}"
    user, answer = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "four"}
    encoder = Encoder(tokenizer, ChatTemplate(source, {}))
    encoder.sample({"messages": [user, answer]})
    for content in ("be brief", "four"):
        said = {"role": role, "content": content}
        messages = [said, user, answer] if role == "system" else [user, said, answer]
        with pytest.raises(
            BadSampleError, match=rf"message \d \({role}\) says something, which the chat template does"
        ):
            encoder.sample({"messages": messages})
        with pytest.raises(BadSampleError, match=rf"\({role}\) says something"):
            encoder.prompt(Conversation(tuple(messages[:-1]), (False,) * 2))
        assert encoder.sample({"messages": [{"role": role, "content": " "}, user, answer]})


@pytest.mark.parametrize("shown", ["m.content | upper", "m.content | trim", "m.content | tojson", "m | tojson(true)"])
def test_what_is_written_otherwise_is_shown(tokenizer: FolderTokenizer, shown: str) -> None:
    source = "{% for m in messages %}{{ m.role + ':' + (" + shown + ") }}{% endfor %}"
    row = Row({"messages": [*MESSAGES[:2], {"role": "assistant", "content": ' é "it" is <|four|> '}]})
    assert Encoder(tokenizer, ChatTemplate(source, {})).sample(row) and not row.in_part


def test_reasoning_that_the_template_cuts_out_of_an_answer_is_noted(tokenizer: FolderTokenizer) -> None:
    source = "{% for m in messages %}{{ m.role + ':' + m.content.split('</think>')[-1] }}{% endfor %}"
    encoder = Encoder(tokenizer, ChatTemplate(source, {}))
    for answer, in_part in (("<think>two and two</think>four", True), ("four", False)):
        row = Row({"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]})
        encoder.sample(row)
        assert row.in_part == in_part
    # As Qwen 3's: of the last message alone.
    source = source.replace("{{ m", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m")
    encoder = Encoder(tokenizer, ChatTemplate(source.replace("{{ m.role", "{% generation %}{{ m.role").replace(
        "-1] }}", "-1] }}{% endgeneration %}"), {}))  # fmt: skip
    turns = [{"role": "assistant", "content": "four", key: "two and two"} for key in ("reasoning", "thinking")]
    for said_, in_part in ((turns, True), (turns[1:], False)):
        row = Row({"messages": said_})
        encoder.sample(row)
        assert row.in_part == in_part
    [line] = Report(in_part=3).template_notes("x")
    assert line.startswith("note: of 3 samples the chat template leaves out a part of what a message says, such as")


@pytest.mark.parametrize(
    ("answer", "noted"),
    [
        ("{{ m.content }}<|im_end|>\n", False),
        ("{{ m.content }}", True),  # as GLM's, whose next message begins with what the model stops at
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", True),
        ("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", False),
    ],
)
def test_an_answer_without_an_end_is_noted(tokenizer: FolderTokenizer, answer: str, noted: bool) -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' %}<|bos|>ANSWER{% else %}<|bos|>{{ m.content }}"
    source = (
        source.replace("ANSWER", answer) + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|bos|>{% endif %}"
    )
    encoder, row = Encoder(tokenizer, ChatTemplate(source, tokenizer.template_tokens)), Row({"messages": MESSAGES[1:]})
    encoder.sample(row)
    report = Report(unended=int(row.unended))
    assert any("nothing teaches the model to stop" in line for line in report.lines()) == noted


def test_the_last_turn_says_what_ends_a_text(tokenizer: FolderTokenizer) -> None:
    """Turns before it end with another token, as GPT-OSS's."""
    end = "{% if loop.last %}<|im_end|>{% else %}<|bos|>{% endif %}"
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}END{% endgeneration %}"
    )
    template = ChatTemplate(source.replace("END", end) + "{% else %}{{ m.content }}{% endif %}{% endfor %}", {})
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    row = Row({"messages": turns * 2})
    [(ids, trained)] = Encoder(tokenizer, template).sample(row)
    assert tokenizer.decode(ids[trained]) == "assistant<|bos|>assistant<|im_end|>" and row.ends == {tokenizer.eos}
    row = Row({"prompt": "what is it?", "completion": "it is four"})
    Encoder(tokenizer, None).sample(row)
    assert row.ends == {tokenizer.eos}


def test_texts_beside_a_template_are_messages_when_asked(tokenizer: FolderTokenizer) -> None:
    template, record = ChatTemplate(TEMPLATE, {}), {"prompt": "what is it?", "completion": "it is four"}
    for as_messages in (False, True):
        row = Row(record)
        [(ids, trained)] = Encoder(tokenizer, template, as_messages=as_messages).sample(row)
        assert tokenizer.decode(ids[trained]) == "it is four<|im_end|>" and row.as_text is not as_messages
        assert ("<|im_start|>assistant" in tokenizer.decode(ids)) is as_messages
    row = Row(record)
    Encoder(tokenizer, None).sample(row)
    assert not row.as_text, "there is no template"
    with pytest.raises(BadSampleError, match="there is no chat template"):
        Encoder(tokenizer, None, as_messages=True).sample(record)


@pytest.mark.parametrize(
    "settings",
    [
        {"sep_token": "<|bos|>"},
        {"cls_token": {"__type": "AddedToken", "content": "<|bos|>"}},
        {"extra_special_tokens": {"eot_token": "<|bos|>"}},
        {"turn_token": "<|bos|>"},
        {"extra_special_tokens": {"image_mark": "<|bos|>"}},
    ],
)
def test_a_template_may_name_every_special_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, template=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    extra = settings.get("extra_special_tokens", settings)
    name = next(iter(extra))
    tokenizer, source = open_tokenizer(tmp_path), "{% for m in messages %}{{ m.content + " + name + " }}{% endfor %}"
    text, _ = ChatTemplate(source, tokenizer.template_tokens).render(Conversation(tuple(MESSAGES), (False,) * 5))
    assert text.count("<|bos|>") == 5
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text == theirs.apply_chat_template(MESSAGES, chat_template=source, tokenize=False)


def test_special_tokens_that_a_template_names_in_vain_are_known(tokenizer: FolderTokenizer) -> None:
    source = "{% set own_token = 1 %}{{ own_token }}{{ bos_token }}{{ sep_token }}{{ messages[0].x_token }}"
    assert ChatTemplate(source, tokenizer.template_tokens).empty_tokens == ["sep_token"]


def test_files_with_a_byte_order_mark_have_none_of_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8-sig")
    assert open_tokenizer(tmp_path).template == TEMPLATE
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8-sig")
    config = (tmp_path / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8-sig")
    assert open_tokenizer(tmp_path).template == TEMPLATE


def test_a_template_reads_a_name_only_as_a_word() -> None:
    """ "thinking" inside another word shows nothing of a message's thinking."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "thinking": "because"}
    sample = recognise({"messages": [user, answer]}, CHAT)
    assert isinstance(sample, Conversation)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }} (enable_thinking);{% endfor %}"
    with pytest.raises(BadSampleError, match="message 1 has thinking, which the chat template does not show"):
        ChatTemplate(source, {}).render(sample)


def test_tools_as_text_are_json() -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    sample = recognise({**record, "tools": '[{"name": "f"}]'}, CHAT)
    assert isinstance(sample, Conversation) and sample.tools == [{"name": "f"}]
    with pytest.raises(BadSampleError, match="tools is text that is not JSON"):
        recognise({**record, "tools": "f(x)"}, CHAT)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "completion": "b", "system": "be brief"}, "system text"),
        ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "write them as tools"),
    ],
)
def test_what_a_record_says_and_no_text_would_show_is_refused(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadSampleError, match=problem):
        recognise(record, CHAT)
    if "prompt" in record:
        with pytest.raises(BadSampleError, match=problem):
            recognise_pair({"prompt": "a", "chosen": "b", "rejected": "c", "system": "be brief"}, CHAT)


def metaspace(folder: Path, prepend: str) -> FolderTokenizer:
    """A tokenizer.json that marks words by a space in front, whose BPE has merged some words."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=False))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    model.decoder = tokenizers.decoders.Metaspace(prepend_scheme=prepend, split=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], initial_alphabet=list(ALPHABET), show_progress=False
    )
    model.train_from_iterator(["2+2=4 the answer is four two plus two"] * 20, trainer)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return FolderTokenizer(folder)


ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789=+ :?"


@pytest.mark.parametrize("kind", ["bytes", "pieces", "first", "always"])
def test_ids_are_the_text_and_what_is_trained_the_answer(
    tokenizer: FolderTokenizer, pieces: Path, tmp_path: Path, kind: str
) -> None:
    """Random prompts and answers, with and without white space where they meet, apart and in a template."""
    kinds = {"bytes": lambda: tokenizer, "pieces": lambda: open_tokenizer(pieces)}
    made = kinds.get(kind, lambda: metaspace(tmp_path, kind))()
    draw, end = random.Random(0), made.decode([made.eos])
    source = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    chat, plain = Encoder(made, ChatTemplate(source, made.template_tokens)), Encoder(made, None)
    words = [*ALPHABET.replace(" ", ""), "2+2=", "the answer is", "four", "two plus"]
    for _ in range(100):
        prompt, answer = ("".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(2))
        prompt += " " if kind == "bytes" and draw.random() < 0.5 else ""
        [(ids, trained)] = plain.sample({"prompt": prompt, "completion": answer})
        assert made.decode(ids.tolist()) == f"{prompt}{answer}{end}"
        assert len(ids) - int(trained.argmax()) == trained.sum()  # the answer, to the end
        apart = len(made.decode(ids[~trained].tolist()))
        assert made.decode(ids.tolist())[apart:] == answer + end
        said_ = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        [(ids, trained)] = chat.sample({"messages": said_})
        assert made.decode(ids.tolist()) == f"{prompt}{answer}{end}"
        before = made.decode(ids[~trained].tolist())
        assert prompt.startswith(before)  # every token with a character of the answer is trained
