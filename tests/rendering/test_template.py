"""What released chat templates do, each reduced to the one habit that is tested."""

# ruff: noqa: E501 - a line break inside a template is part of it

from __future__ import annotations

import pytest
from tests.rendering.templates import byte_tokenizer
from tests.rendering.test_renderer import CALC, text, user

from silva.errors import RenderingError
from silva.rendering.codec import TokenCodec
from silva.rendering.renderer import Renderer
from silva.rendering.template import ChatTemplate
from silva.rendering.tool_calls import write_calls
from silva.types import Message, ToolCall

CALL = ToolCall("calculator", {"expression": "6*7"})
_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_COPIES = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
_LFM2_CALLS = """{% for c in m.tool_calls or [] %}{{ '<|tool_call_start|>[' + c.function.name + '(' }}\
{% for k, v in c.function.arguments.items() %}{{ k + "='" + v + "'" }}{% endfor %}{{ ')]<|tool_call_end|>' }}{% endfor %}"""
_END = "{{ '<|im_end|>\n' }}{% endfor %}" + _OPEN
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"

# LFM2.5: the role of results is copied, texts in calls are not escaped.
LFM2 = _TOOLS + "{% for m in messages %}" + _COPIES + _LFM2_CALLS + _END
# Hermes 2 and 3: goes through the tools in every dialogue.
HERMES = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}" + _COPIES + _END
# Phi-3: a dialogue that does not go on ends with the end of the text.
PHI3 = (
    "{% for m in messages %}" + _COPIES + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# DeepSeek-R1: takes calls only without content and as text, and does not end the turn after them.
R1 = """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{{ '<｜Assistant｜>' }}\
{% for c in m.tool_calls %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}\
{{ '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}\
{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}\
{% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""


def test_the_end_of_a_turn_is_not_looked_for_inside_a_mark() -> None:
    made = ChatTemplate(byte_tokenizer(R1)).features
    assert (made.form, made.arguments_as_text, made.content_as_none) == ("deepseek", True, True)


@pytest.mark.parametrize("template", ["mistral", "llama31", R1, LFM2, "qwen25", "kimi"])
@pytest.mark.parametrize("expression", ["6*7", "it's 'so' \\ \n\"x\""])
def test_an_expert_s_text_and_call_are_written_whole(template: str, expression: str) -> None:
    """Also where the template drops one of the two, or writes what cannot be read."""
    made = Renderer(byte_tokenizer(template))
    call = ToolCall("calculator", {"expression": expression})
    prompt = made.context([user("q")], [CALC])
    for said in ("", "Let me see."):
        for calls in ([call], [call, call]):
            tokens = made.script(f"{said}\n{write_calls(calls)}", prompt)
            message = made.parse(tokens, prompt=prompt, tools=[CALC])
            assert [(c.name, c.arguments) for c in message.tool_calls] == [(call.name, call.arguments)] * len(
                calls
            )
            assert (message.content, message.errors) == (said, ())


def test_an_earlier_call_is_shown_where_the_template_drops_it_beside_a_text() -> None:
    made = Renderer(byte_tokenizer(R1))
    earlier = Message("assistant", "See.", tool_calls=(CALL,))
    shown = made.decode(made.context([user("q"), earlier, Message("tool", "42", name="calculator")], [CALC]))
    assert (
        'See.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{"exp'
        in shown
    )


def test_a_template_that_describes_tools_means_the_role_that_it_copies() -> None:
    made = Renderer(byte_tokenizer(LFM2))
    assert made.tool_notes == ()
    shown = text("qwen25", made.extend(made.encode_reply("x"), [Message("tool", "42", name="calculator")]))
    assert "<|im_start|>tool\n42<|im_end|>" in shown


def test_a_template_that_needs_tools_gets_an_empty_list() -> None:
    made = Renderer(byte_tokenizer(HERMES))
    assert (
        text("qwen25", made.context([user("q")])) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_end_of_a_closed_dialogue_is_no_change_of_earlier_text() -> None:
    made = Renderer(byte_tokenizer(PHI3))
    assert made.opening == "<|im_start|>assistant\n"
    other = byte_tokenizer(PHI3.replace("eos_token", "'<|eot_id|>'"))
    with pytest.raises(RenderingError, match="changes earlier text"):
        Renderer(other)


@pytest.mark.parametrize(
    ("form", "said", "ids"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "calculator", "arguments": {}, "id": "abc123XYZ"}]', ["abc123XYZ"]),
        ("mistral", '[TOOL_CALLS][{"name": "calculator", "arguments": {}, "id": "short"}]', ["call00000"]),
        ("mistral", '[TOOL_CALLS][{"name": "calculator", "arguments": {}}]', ["call00000"]),
        ("kimi", "<|tool_call_begin|>functions.calculator:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
                 "<|tool_call_begin|>functions.now:8<|tool_call_argument_begin|>{}<|tool_call_end|>",
         ["functions.calculator:7", "functions.now:8"]),
    ],
)  # fmt: skip
def test_results_name_the_calls_as_the_model_wrote_them(form: str, said: str, ids: list[str]) -> None:
    tokenizer = byte_tokenizer(form)
    made = Renderer(tokenizer)
    prompt = made.context([user("q")], [CALC])
    reply = [*TokenCodec(tokenizer).encode_escaped(said), made.stop_token_ids[0]]
    results = [Message("tool", f"r{i}", name="calculator") for i in range(len(ids))]
    tail = made.extend(reply, results)
    places = [made.decode(tail).find(id) for id in ids]
    assert -1 not in places and places == sorted(places)
    asks = Message(
        "assistant", "", tool_calls=made.parse(reply, prompt=prompt, tools=[CALC]).tool_calls, id="1"
    )
    assert made.context([user("q"), asks, *results], [CALC], sampled={"1": reply}) == [*prompt, *reply, *tail]


def test_a_user_who_speaks_after_a_result_is_joined_to_it_where_users_and_replies_must_alternate() -> None:
    made = Renderer(byte_tokenizer("mistral"))
    asks, result = Message("assistant", "", tool_calls=(CALL,)), Message("tool", "42", name="calculator")
    for before in ([user("q")], [user("q"), asks], [user("q"), Message("assistant", "a"), user("r"), asks]):
        shown = made.decode(made.context([*before, result, user("And?")], [CALC]))
        assert shown.endswith(
            '[TOOL_RESULTS]{"content": "42\\n\\nAnd?", "call_id": "call00000"}[/TOOL_RESULTS]'
        )
    answered = made.decode(
        made.context([user("q"), asks, result, Message("assistant", "a"), user("And?")], [CALC])
    )
    assert answered.endswith("[INST]And?[/INST]")
