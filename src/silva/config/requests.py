"""The keys of whatever asks a service that others run: a chat API, a judge, a search service."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Above0, Natural, NotNegative, Positive, Section, WebAddress
from silva.wire.requests import Limits, Prices


class RequestSettings(Section):
    """How requests are sent, and which key they carry."""

    key_variable: str = ""
    """Environment variable (or line of .env) that holds the key; "" for a service without keys."""
    timeout: Above0 = 120.0
    """Seconds that one request may take."""
    retries: Natural = 5
    """How often a request is tried again after a fault that may pass."""
    max_wait: Above0 = 60.0
    """Longest pause in seconds before a request is tried again. If the service asks for more, it fails."""
    max_concurrent: Positive = 16
    """Requests at once."""
    requests_per_minute: Natural = 0
    """Requests started in a minute by one process, evenly spaced; 0: no limit."""

    @property
    def limits(self) -> Limits:
        return Limits(self.retries, self.max_wait, self.max_concurrent, self.requests_per_minute)


class PaidService(Section):
    """What a service of models costs and what it may cost."""

    input_price: NotNegative = 0.0
    """For a million tokens of input, in any currency."""
    cached_price: NotNegative | None = None
    """For a million tokens of input that the service had cached; null: as other input."""
    output_price: NotNegative = 0.0
    """For a million tokens of output, thoughts included."""
    max_cost: Above0 | None = None
    """The command ends with an error before it costs more, in the currency of the prices."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.max_cost is not None and not (self.input_price or self.output_price):
            raise ValueError("max_cost needs input_price and output_price")
        return self

    @property
    def prices(self) -> Prices:
        return Prices(self.input_price, self.output_price, self.cached_price, most=self.max_cost,
                      setting="engine.max_cost")  # fmt: skip


class ModelApiSettings(RequestSettings):
    """A model behind an API."""

    model: Annotated[str, Field(min_length=1)]
    """The API's name of the model."""
    base_url: WebAddress
    """Address of the API."""


class ChatApiSettings(ModelApiSettings):
    """A model behind a chat API of OpenAI's form."""

    base_url: WebAddress = "https://api.openai.com/v1"
    """Address of the API, without /chat/completions."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable (or line of .env) that holds the key; "" for an API without keys."""
    limit_name: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """What the API calls the limit of an answer; older servers know only max_tokens."""
