"""Settings of a vLLM server that `silva inference` launches, and of the client that asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.engines.remote.settings import ClientSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from silva.protocols import Context, Engine
    from silva.wire.transport import Peer


class VllmEngineSettings(ClientSettings):
    """vLLM in an environment of its own, launched as a server."""

    type: Literal["vllm"] = "vllm"
    python: str = "python"
    """Interpreter of the environment in which vLLM is installed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_concurrent: Positive = 64
    """Requests decoded together."""
    tensor_parallel: Positive = 1
    """Devices that share one copy of the model."""
    data_parallel: Positive = 1
    """Copies of the model."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM takes."""
    kv_cache_gib: Positive | None = None
    """On CPU: GiB for keys and values; null leaves it to vLLM."""
    enforce_eager: bool = False
    """Do not compile the model: it starts sooner and samples more slowly."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding, as vLLM's --speculative-config takes it."""
    arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server."""
    top_logprobs: Annotated[int, Field(ge=2)] = 20
    """Of how many of the likeliest tokens vLLM tells the log-probabilities, from which entropies are
    estimated."""

    def client(self, peers: Sequence[Peer], context: Context) -> Engine:
        """The engine that asks such servers."""
        from silva.engines.remote.engine import HttpEngine
        from silva.engines.remote.vllm import VllmDialect

        dialect = VllmDialect(
            vocabulary=context.renderer.vocabulary, top_logprobs=self.top_logprobs, reload="silva_reload"
        )
        return HttpEngine(peers, self, dialect, say=context.say)

    def build(self, context: Context) -> Engine:
        from silva.errors import CapabilityError

        raise CapabilityError(
            'engine.type = "vllm" launches a server, which this placement does not do. Set '
            'placement.type = "services"; or start `silva inference` and use engine.type = "http", '
            'dialect = "vllm"'
        )
