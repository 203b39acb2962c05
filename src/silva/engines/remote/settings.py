"""Settings of the client of inference servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from silva.config.parts import EngineSettings
from silva.config.sections import Above0, Natural, PartAddress
from silva.wire.requests import Limits, key_of

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Engine

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds before a request is sent again


class ClientSettings(EngineSettings):
    """How inference servers are asked, and when one of them counts as lost."""

    remote: ClassVar[bool] = True
    section: ClassVar[str] = "engine"  # where these keys stand

    timeout: Above0 = 600.0
    """Seconds that a load of weights may take, and that a server may compute nothing while it is asked for
    something. A request may wait for its turn, and be computed, for as long as that takes."""
    retries: Natural = 8
    """How often a request is sent again after a fault that may pass."""
    context: Natural = 0
    """Tokens of prompt and answer together; 0 takes the servers' own limit."""
    check_every: Above0 = 1.0
    """Seconds between two checks whether a server is alive."""
    dead_after: Above0 = 3.0
    """Seconds that a check may take before the server is taken out."""
    patience: Above0 = 300.0
    """Seconds to wait while no server answers; then the run ends with an error."""
    probe_tolerance: Above0 = 1e-3
    """How far the log-probabilities of the probe text may differ between servers that hold the same weights.
    Models in bfloat16 need about 0.1."""

    @property
    def limits(self) -> Limits:
        return Limits(self.retries, LONGEST_PAUSE, first_pause=FIRST_PAUSE)

    def key(self, name: str) -> str:
        """As it stands in the configuration."""
        return f"{self.section}.{name}"


class PlacedClientSettings(ClientSettings):
    """Of servers that the placement knows."""

    section: ClassVar[str] = "placement"


class HttpEngineSettings(ClientSettings):
    """Inference servers at addresses: Silva's own (`silva inference`) or vLLM's."""

    type: Literal["http"] = "http"
    urls: Annotated[tuple[PartAddress, ...], Field(min_length=1)]
    """Addresses: http://HOST:PORT, https://HOST or unix:PATH."""
    dialect: Literal["silva", "vllm"] = "silva"
    """What the servers are."""
    model: str = ""
    """The API's name of the model; "" takes the name of the first model that a server lists."""
    key_variable: str = ""
    """Environment variable (or line of .env) that holds the servers' key; "" for servers without one."""
    top_logprobs: Annotated[int, Field(ge=2)] = 20
    """vLLM only: of how many of the likeliest tokens it tells the log-probabilities, from which entropies are
    estimated. vLLM refuses more than its --max-logprobs, 20 by default."""

    @field_validator("urls")
    @classmethod
    def _are_different(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"{twice[0]!r} is listed twice, expected different servers")
        return urls

    def build(self, context: Assembly) -> Engine:
        """Raises ConfigError if the environment variable of the key is not set."""
        from silva.engines.remote.engine import HttpEngine
        from silva.engines.remote.vllm import VllmDialect
        from silva.engines.remote.wire import Dialect, SilvaDialect
        from silva.wire.transport import Peer

        key = key_of(self.key_variable, "engine.key_variable")
        dialect: Dialect = SilvaDialect(self.model, owner=str(context.run_layout.path))
        if self.dialect == "vllm":
            vocabulary = context.renderer.vocabulary
            lora, sent = context.config.model.lora is not None, context.config.trainer.transfer == "nccl"
            dialect = VllmDialect(
                self.model, vocabulary=vocabulary, top_logprobs=self.top_logprobs, lora=lora, sent=sent
            )
        peers = [Peer(url, name="inference", key=key) for url in self.urls]
        return HttpEngine(peers, self, dialect, say=context.say)
