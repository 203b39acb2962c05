"""Settings of models behind chat APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.parts import EngineSettings
from silva.config.requests import ChatApiSettings, ModelApiSettings
from silva.config.sections import Sampling, WebAddress
from silva.wire.requests import Prices

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Actor

Price = Annotated[float, Field(ge=0)]


class PaidEngineSettings(ModelApiSettings, EngineSettings):
    """A model behind a chat API, what it costs and what it may cost."""

    remote: ClassVar[bool] = True
    only_evaluates: ClassVar[str] = "a chat API gives no token ids, no log-probabilities and no weights"

    input_price: Price = 0.0
    """For a million tokens of input, in any currency."""
    cached_price: Price | None = None
    """For a million tokens of input that the API had cached; null: as other input."""
    output_price: Price = 0.0
    """For a million tokens of output, thoughts included."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """The command ends with an error before it costs more, in the currency of the prices."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.max_cost is not None and not (self.input_price or self.output_price):
            raise ValueError("max_cost needs input_price and output_price")
        return self

    @property
    def prices(self) -> Prices:
        return Prices(
            self.input_price, self.output_price, self.cached_price, self.max_cost, setting="engine.max_cost"
        )


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
