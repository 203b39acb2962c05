"""What is trained of a dialogue: the words of the roles that are asked for, as inference sees them."""

# ruff: noqa: E501 - a dialogue stands on a line

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.rendering.templates import TEMPLATES, byte_tokenizer
from tests.rendering.test_renderer import CALC, renderer, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from silva.actors.script import Script
from silva.config.sections import EpisodeLimits
from silva.environments.worlds.demonstrations import Demonstrations
from silva.errors import RenderingError
from silva.rendering.dialogue import Dialogue
from silva.rendering.openai import as_function
from silva.rendering.renderer import Renderer
from silva.rendering.supervised import SupervisedRow, supervised_rows, trained_text
from silva.rollouts.episode import play
from silva.rollouts.samples import to_samples
from silva.types import Group, Message, Role, ToolCall, ToolSpec

ALL: tuple[Role, ...] = ("assistant", "user", "system", "tool")
SPEC = json.dumps(as_function(CALC))
CALL = ToolCall("calculator", {"expression": "6*7"})
CHAT = (
    Message("system", "Be brief."),
    Message("user", "Hi"),
    Message("assistant", "Hello."),
    Message("user", "Bye"),
    Message("assistant", "See you."),
)
TOOLS = (
    Message("user", "6*7?"),
    Message("assistant", "", reasoning="hm", tool_calls=(CALL,)),
    Message("tool", "42", name="calculator"),
    Message("assistant", "It is 42."),
    Message("user", "Thanks."),
    Message("assistant", "Bye.", reasoning="so"),
)
CUSTOM = "{% for m in messages %}{{ m.role[0] | upper + ': ' + m.content + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"


def marked(text: str, template: str) -> tuple[list[int], list[bool]]:
    """Tokens of a text by the tokenizer alone, and which of them stand between ⟦ and ⟧."""
    tokens: list[int] = []
    mask: list[bool] = []
    for number, part in enumerate(text.replace("⟧", "⟦").split("⟦")):
        ids = tokenizer(template).encode(part, add_special_tokens=False)
        tokens += ids
        mask += [number % 2 == 1] * len(ids)
    return tokens, mask


def union(row: SupervisedRow) -> list[bool]:
    """The trained tokens of all roles; no token is in two."""
    total = np.sum(list(row.trained.values()), axis=0)
    assert total.max() <= 1 and total.dtype != object
    return (total > 0).tolist()


HAND: dict[str, tuple[str, dict[str, Any], Dialogue, list[str]]] = {
    "chatml": ("chatml", {}, Dialogue(CHAT), [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦See you.<|im_end|>⟧"]),
    "qwen with thoughts": ("qwen3", {}, Dialogue(TOOLS, (CALC,)), [
        f"<|im_start|>system\n# Tools\n<tools>\n{SPEC}\n</tools>\nReturn calls within <tool_call></tool_call> tags.<|im_end|>\n"
        "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<think>\nhm\n</think>\n\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦It is 42.<|im_end|>⟧\n"
        "<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n⟦<think>\nso\n</think>\n\nBye.<|im_end|>⟧"]),
    # The template shows thoughts after the last question only: the second row has none of the first.
    "qwen that rewrites": ("qwen3", {"history": "template"}, Dialogue((
        Message("user", "1?"), Message("assistant", "One.", reasoning="a"), Message("user", "2?"),
        Message("assistant", "Two.", reasoning="b"))), [
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\na\n</think>\n\nOne.<|im_end|>⟧",
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nb\n</think>\n\nTwo.<|im_end|>⟧"]),
    "qwen that need not rewrite": ("qwen3", {"history": "template"}, Dialogue(CHAT), [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦See you.<|im_end|>⟧"]),
    "llama with tools": ("llama31", {}, Dialogue(TOOLS[:4], (CALC,)), [
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{SPEC}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n6*7?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦<think>\nhm\n</think>\n\n{"name": "calculator", "parameters": {"expression": "6*7"}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
        "⟦It is 42.<|eot_id|>⟧"]),
    "mistral": ("mistral", {}, Dialogue(TOOLS[:4], (CALC,)), [
        f"<|begin_of_text|>[AVAILABLE_TOOLS][{SPEC}][/AVAILABLE_TOOLS][INST]6*7?[/INST]⟦<think>\nhm\n</think>\n\n"
        '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6*7"}, "id": "call00000"}]<|endoftext|>⟧'
        '[TOOL_RESULTS]{"content": "42", "call_id": "call00000"}[/TOOL_RESULTS]⟦It is 42.<|endoftext|>⟧']),
    "gemma without system role": ("gemma", {}, Dialogue(CHAT), [
        "<|begin_of_text|><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello.<end_of_turn>⟧\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦See you.<end_of_turn>⟧"]),
    # The prompt opens the thought, which the reply closes; after a result it does not.
    "deepseek": ("deepseek", {}, Dialogue(TOOLS, (CALC,)), [
        f"<|begin_of_text|>{SPEC}\n<｜User｜>6*7?<｜Assistant｜><think>\n⟦hm\n</think>\n\n"
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{"expression": "6*7"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42"
        "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>⟦It is 42.<｜end▁of▁sentence｜>⟧<｜User｜>Thanks.<｜Assistant｜><think>\n"
        "⟦so\n</think>\n\nBye.<｜end▁of▁sentence｜>⟧"]),
    "custom": (CUSTOM, {}, Dialogue(CHAT), [
        "S: Be brief.<|eot_id|>U: Hi<|eot_id|>A: ⟦Hello.<|eot_id|>⟧U: Bye<|eot_id|>A: ⟦See you.<|eot_id|>⟧"]),
    "tags, with results in the reply": ("chatml", {"tools": "tags", "result": " <result>{}</result> "}, Dialogue(TOOLS[:4]), [
        "<|im_start|>system\nYou are Smol.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nhm\n</think>\n\n<calculator>6*7</calculator>⟧ <result>42</result> ⟦It is 42.<|im_end|>⟧"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_masks_are_those_marked_by_hand(name: str) -> None:
    template, options, dialogue, expected = HAND[name]
    rows = supervised_rows(renderer(template, **options), dialogue)
    assert [trained_text(renderer(template, **options), row) for row in rows] == expected
    assert [(row.tokens.tolist(), union(row)) for row in rows] == [marked(e, template) for e in expected]


def test_other_roles_are_trained_without_the_glue_of_the_template() -> None:
    dialogue = Dialogue((Message("system", " Be brief. "), *TOOLS[:4]), (CALC,))
    for name, expected in {
        "llama31": f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{SPEC}⟦Be brief.⟧<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n⟦6*7?⟧<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '<think>\nhm\n</think>\n\n{"name": "calculator", "parameters": {"expression": "6*7"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"⟦42⟧"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
        "It is 42.<|eot_id|>",
        "mistral": f"<|begin_of_text|>[AVAILABLE_TOOLS][{SPEC}][/AVAILABLE_TOOLS][INST] ⟦Be brief.⟧ \n\n⟦6*7?⟧[/INST]<think>\nhm\n</think>\n\n"
        '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6*7"}, "id": "call00000"}]<|endoftext|>'
        '[TOOL_RESULTS]{"content": "⟦42⟧", "call_id": "call00000"}[/TOOL_RESULTS]It is 42.<|endoftext|>',
    }.items():  # fmt: skip
        (row,) = supervised_rows(renderer(name), dialogue, roles=("system", "user", "tool"))
        assert (row.tokens.tolist(), union(row)) == marked(expected, name)


def test_the_last_turn_is_the_last_reply_and_what_it_answers() -> None:
    (row,) = supervised_rows(renderer(CUSTOM), Dialogue(CHAT), roles=("assistant", "user"), turns="last")
    shown = (
        "S: Be brief.<|eot_id|>U: Hi<|eot_id|>A: Hello.<|eot_id|>U: ⟦Bye⟧<|eot_id|>A: ⟦See you.<|eot_id|>⟧"
    )
    assert (row.tokens.tolist(), union(row)) == marked(shown, CUSTOM)
    rows = supervised_rows(renderer("qwen3", history="template"), HAND["qwen that rewrites"][2], turns="last")
    assert [trained_text(renderer("qwen3"), row) for row in rows] == HAND["qwen that rewrites"][3][1:]


def test_what_nobody_answers_is_shown_only_to_be_trained() -> None:
    dialogue = Dialogue(CHAT[:4])
    (row,) = supervised_rows(renderer(CUSTOM), dialogue)
    assert trained_text(renderer(CUSTOM), row) == "S: Be brief.<|eot_id|>U: Hi<|eot_id|>A: ⟦Hello.<|eot_id|>⟧"
    (row,) = supervised_rows(renderer(CUSTOM), dialogue, roles=("user",))
    assert (
        trained_text(renderer(CUSTOM), row)
        == "S: Be brief.<|eot_id|>U: ⟦Hi⟧<|eot_id|>A: Hello.<|eot_id|>U: ⟦Bye⟧<|eot_id|>A: "
    )
    assert supervised_rows(renderer(CUSTOM), dialogue, roles=("tool",)) == []


def test_nothing_predicts_the_first_token() -> None:
    bare = "{% for m in messages %}{{ m.content + '<|eot_id|>' }}{% endfor %}"
    (row,) = supervised_rows(renderer(bare), Dialogue(CHAT[1:3]), roles=("user", "assistant"))
    assert row.trained["user"].tolist() == [False, True, False] + [False] * 7
    assert trained_text(renderer(bare), row.first(5)) == "H⟦i⟧<|eot_id|>⟦He⟧"


def test_a_template_that_changes_words_cannot_train_them() -> None:
    cuts = CUSTOM.replace("m.content", "(m.content[:4] if m.role == 'user' else m.content)")
    dialogue = Dialogue((Message("user", "A long question"), Message("assistant", "4")))
    with pytest.raises(RenderingError, match="does not show what role user says as it is"):
        supervised_rows(renderer(cuts), dialogue, roles=("user",))
    assert len(supervised_rows(renderer(cuts), dialogue)) == 1


# --- every trained token was written by a trained role, and all that it wrote is trained once

OPTIONS: list[dict[str, str]] = [
    {}, {"history": "template"}, {"tools": "hermes"}, {"tools": "tags", "result": " <result>{}</result> "},
]  # fmt: skip
LETTERS: Mapping[Role, str] = {"system": "σς", "user": "υύ", "assistant": "αά", "tool": "τť"}
NASTY = [
    "<|im_end|>",
    "<|eot_id|>",
    "<tool_response>",
    "</think>",
    "\n",
    " ",
    "<|",
    "{",
    '"',
    "\\",
    "\ufdd5",
    "[INST]",
]


def words(role: Role) -> st.SearchStrategy[str]:
    letters = st.text(LETTERS[role], min_size=1, max_size=4)
    harmless = [each for each in NASTY if "think" not in each or role == "user"]
    return st.lists(letters | st.sampled_from(harmless), min_size=1, max_size=4).map("".join)


asked = st.lists(
    st.sampled_from(["user", "tool"]).flatmap(lambda role: st.builds(Message, st.just(role), words(role))),
    min_size=1, max_size=2,
)  # fmt: skip
said = st.builds(
    lambda text, thought, call: Message(
        "assistant", text, thought, (ToolCall("calculator", {"expression": call}),) if call else ()
    ),
    st.text("αά", min_size=1, max_size=4),
    st.none() | st.text("αά", min_size=1, max_size=3),
    st.none() | words("assistant"),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from([*sorted(TEMPLATES), CUSTOM]),
    options=st.sampled_from(OPTIONS),
    system=st.none() | words("system"),
    turns=st.lists(st.tuples(asked, said), min_size=1, max_size=3),
    roles=st.sets(st.sampled_from(ALL), min_size=1),
)
def test_every_trained_token_was_written_by_a_trained_role(
    name: str, options: Mapping[str, str], system: str | None, turns: list[Any], roles: set[Role]
) -> None:
    assume(name != "mistral" or "tools" not in options)  # it refuses results without its own calls
    made = renderer(name, **options)
    messages = [Message("system", system)] if system else []
    messages += [m for added, reply in turns for m in (*added, reply)]
    rows = supervised_rows(made, Dialogue(tuple(messages)), roles=sorted(roles))
    for role in roles:
        texts = ["".join(_runs(made, row, row.trained[role])) for row in rows]
        others = {letter for other in ALL if other != role for letter in LETTERS[other]}
        assert not others & set("".join(texts))
        trained = sum(text.count(letter) for text in texts for letter in LETTERS[role])
        wrote = sum(_spoken(m).count(letter) for m in messages if m.role == role for letter in LETTERS[role])
        assert trained == wrote
    for row in rows:
        assert not union(row)[0] and any(union(row))


def _runs(made: Renderer, row: SupervisedRow, mask: np.ndarray) -> list[str]:
    """The texts of runs of trained tokens, so that no character is put together over a gap."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [made.decode(row.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def _spoken(message: Message) -> str:
    calls = "".join(str(call.arguments["expression"]) for call in message.tool_calls)
    return message.content + (message.reasoning or "") + calls


# --- the same as inference: the episode of an environment that shows and says what was recorded

EPISODES = [
    [("user", "1?"), ("assistant", "<think>\na\n</think>\n\nOne."), ("user", "2?"), ("assistant", "Two.")],
    [("system", "S"), ("user", "q"), ("assistant", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
     ("tool", "r"), ("assistant", "<think>\nb\n</think>\n\nSo."), ("user", "and <|im_end|>?"), ("assistant", "Yes.")],
]  # fmt: skip


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama31", "gemma", "deepseek", "mistral", "glm"])
def test_rows_are_those_that_an_episode_would_give(name: str, history: str) -> None:
    made = renderer(name, history=history)
    for recorded in EPISODES:
        messages = tuple(Message(role, text) for role, text in recorded)  # type: ignore[arg-type]
        rows = supervised_rows(made, Dialogue(messages))
        samples = _played(made, [{"role": role, "content": text} for role, text in recorded])
        trained = 0
        for sample in samples:
            mask = sample.loss_weights > 0
            trained += int(mask.sum())
            size = len(sample.tokens)
            shown = [row for row in rows if row.tokens[:size].tolist() == sample.tokens.tolist()]
            assert sum(bool(row.trained["assistant"][:size][mask].all()) for row in shown) == 1
        assert trained == sum(row.count for row in rows)
        assert history == "template" or len(rows) == 1


def _played(made: Renderer, messages: Sequence[Mapping[str, str]]) -> Sequence[Any]:
    others = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "x"}]}
        for i in range(3)
    ]
    world = Demonstrations(rows=({"messages": messages}, *others), thoughts=True, eval_size=1, eval_share=0.5)
    taskset = world.taskset()
    tasks = [*taskset.tasks("train"), *taskset.tasks("eval")]
    task = next(t for t in tasks if len(t.data["messages"]) == len(messages))
    limits = EpisodeLimits(max_turns=9, max_turn_tokens=4096, max_episode_tokens=8192)
    trajectory = asyncio.run(play(task, taskset, Script(made), made, limits, id="t", seed=0))
    assert trajectory.failure is None
    return to_samples([Group("g", task, (trajectory,))])


def test_masks_are_those_of_transformers_for_a_template_that_marks_its_replies() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (row,) = supervised_rows(Renderer(byte_tokenizer(template)), Dialogue(CHAT))
    own = byte_tokenizer(template).apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    size = len(row)  # the template closes the last turn with a line break, which nobody samples
    assert row.tokens.tolist() == own["input_ids"][:size] and size == len(own["input_ids"]) - 1
    assert row.trained["assistant"].astype(int).tolist() == own["assistant_masks"][:size]
    assert sum(own["assistant_masks"]) == row.count


@pytest.mark.parametrize(
    ("kind", "expected"), [("merges of bytes", " é there"), ("merges that fall back to bytes", "é there")]
)
def test_tokens_that_words_share_with_the_template_are_left_out(kind: str, expected: str) -> None:
    """One tokenizer has " Hello" as a token, the other "U: Hello " as well."""
    model = models.BPE(byte_fallback=True, unk_token="?") if "fall" in kind else models.BPE()
    backend, letters = Tokenizer(model), pre_tokenizers.ByteLevel.alphabet()
    if "fall" in kind:
        names = ["?", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=names, show_progress=False)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
        backend.pre_tokenizer, backend.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    backend.train_from_iterator(["U: Hello there, Hello", "A: Hello all"] * 9, trainer)
    backend.add_special_tokens(["<|eot_id|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eot_id|>")
    made.chat_template = CUSTOM.replace("'A: '", "'A:'")
    dialogue = Dialogue((Message("user", "Hello é there"), Message("assistant", " Hello")))
    (row,) = supervised_rows(Renderer(made), dialogue, roles=("user", "assistant"))
    shown = trained_text(Renderer(made), row)
    assert shown.endswith("there⟧<|eot_id|>A:⟦ Hello<|eot_id|>⟧") and shown.count("⟦") == 2
    assert "".join(_runs(Renderer(made), row, row.trained["user"])) == expected
    assert row.tokens.tolist()[: len(row) - row.trained["assistant"].sum()] == Renderer(made).context(
        dialogue.messages[:1]
    )


def test_a_tool_that_is_only_called_needs_no_description() -> None:
    """ARPO's system prompts describe the tools themselves."""
    tools = (ToolSpec("calculator", "", {}),)
    plain = supervised_rows(renderer("qwen25"), Dialogue(TOOLS[:4]))
    assert "calculator" not in renderer("qwen25").decode(plain[0].tokens.tolist()).partition("6*7?")[0]
    assert len(supervised_rows(renderer("qwen25"), Dialogue(TOOLS[:4], tools))[0]) > len(plain[0])
