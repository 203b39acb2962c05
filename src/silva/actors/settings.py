"""Settings of models behind chat APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from silva.config.parts import EngineSettings
from silva.config.requests import ChatApiSettings, ModelApiSettings, PaidService
from silva.config.sections import Sampling, WebAddress

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Actor


class PaidEngineSettings(ModelApiSettings, PaidService, EngineSettings):
    """A model behind a chat API, what it costs and what it may cost."""

    remote: ClassVar[bool] = True
    only_evaluates: ClassVar[str] = "a chat API gives no token ids, no log-probabilities and no weights"


class OpenAIEngineSettings(ChatApiSettings, PaidEngineSettings):
    """A model behind a chat API (OpenAI, vLLM, llama.cpp, ...), for evaluation only."""

    type: Literal["openai"] = "openai"

    def actor(self, context: Assembly, sampling: Sampling) -> Actor:
        from silva.actors.chat_api import ChatModel

        return ChatModel(self, sampling, system=context.config.rendering.system)


class AnthropicEngineSettings(PaidEngineSettings):
    """A model of Anthropic, for evaluation only."""

    type: Literal["anthropic"] = "anthropic"
    base_url: WebAddress = "https://api.anthropic.com"
    """Address of the API, without /v1/messages."""
    key_variable: str = "ANTHROPIC_API_KEY"
    """Environment variable (or line of .env) that holds the key."""

    def actor(self, context: Assembly, sampling: Sampling) -> Actor:
        from silva.actors.anthropic import AnthropicModel

        return AnthropicModel(self, sampling, system=context.config.rendering.system)
