"""An environment plays itself: its expert's replies are to be imitated, and its mistakes are not."""

from __future__ import annotations

import pytest
from tests.actors.asking import SEARCH, ask

from silva.actors.script import Script, ScriptFault
from silva.errors import CapabilityError
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.types import Message, Segment

RENDERER = Renderer(tiny_tokenizer())


class Player:
    def __init__(self, reply: object = "<answer>up</answer>") -> None:
        self.reply = reply

    def expert_reply(self):
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def random_reply(self, seed: int) -> str:
        return f"<answer>{seed % 7}</answer>"


def test_a_script_plays_the_expert_after_its_prefill() -> None:
    reply = ask(Script(RENDERER), Player(), prefill="<answer>")
    tokens = (*RENDERER.encode("up</answer>"), RENDERER.stop_token_ids[0])
    assert reply.segments == (Segment("expert", tokens),)
    assert reply.message.content == "<answer>up</answer>"


def test_a_share_of_its_moves_are_mistakes_of_the_environment_s() -> None:
    first, again = (
        [ask(Script(RENDERER, mistakes=0.25), Player(), seed=seed) for seed in range(200)] for _ in range(2)
    )
    wrong = [r for r in first if r.segments[0].source == "environment"]
    assert 30 <= len(wrong) <= 70 and all("up" not in r.message.content for r in wrong)
    assert again == first


CALL = 'Look.\n<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n</tool_call>'


@pytest.mark.parametrize(("form", "text"), [("hermes", CALL), ("tags", "Look.\n<search>cats</search>")])
def test_an_expert_s_calls_are_written_in_the_form_in_use(form, text: str) -> None:
    reply = ask(Script(Renderer(tiny_tokenizer(), tools=form)), Player(CALL), tools=(SEARCH,))
    assert RENDERER.decode(reply.segments[0].tokens[:-1]) == text
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("search", {"query": "cats"})]
    assert reply.message.errors == ()


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [
        (object(), CapabilityError, r"'towns' cannot play itself: .* expert_reply\(\) .* on object"),
        (Player(CapabilityError("no expert")), CapabilityError, "no expert"),  # nor has any other episode
        (Player(Message("assistant", "up")), ScriptFault, "expert_reply"),
    ],
    ids=["no methods", "no expert", "a message"],
)
def test_what_cannot_play_itself_is_refused(environment, error, words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        ask(Script(RENDERER), environment, label="towns")
    if error is ScriptFault:
        assert str(raised.value.__cause__) == "returned Message, expected the text of a reply (str)"
