"""A model behind Anthropic's API, as an actor: limits, prices and faults are those of chat_api.py."""

from __future__ import annotations

from typing import Any, ClassVar

from silva.actors.anthropic_messages import anthropic_dialogue, anthropic_tools, read_anthropic
from silva.actors.chat_api import ChatModel
from silva.actors.chat_messages import ChatAnswer, chat_messages
from silva.errors import ContextOverflow, EngineError
from silva.protocols import Request
from silva.wire.transport import Refused

NO_CREDIT = "credit balance is too low"


class AnthropicModel(ChatModel):
    """Answers with a model of Anthropic. The API takes no seed."""

    sdk: ClassVar[str] = "anthropic"
    lacks: ClassVar[tuple[str, ...]] = ("min_p",)
    hottest: ClassVar[float] = 1.0

    def _body(self, request: Request) -> dict[str, Any]:
        system, messages = anthropic_dialogue(chat_messages(request.messages, self.system))
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": messages,
            "max_tokens": request.max_tokens,
        }
        if system:
            body["system"] = system
        if request.tools:
            body["tools"] = anthropic_tools(request.tools)
        return body | self._sampled("stop_sequences")

    def _read(self, text: str, request: Request) -> ChatAnswer:
        return read_anthropic(text, request.tools)

    def _refusal(self, refused: Refused) -> EngineError | ContextOverflow:
        if NO_CREDIT in str(refused):  # with the status of a request that is wrong
            return EngineError(f"{refused}. The account has no money left")
        return super()._refusal(refused)
