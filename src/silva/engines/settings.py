"""Settings of the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from silva.config.parts import EngineSettings
from silva.config.sections import Natural, Positive

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Engine


class LocalEngineSettings(EngineSettings):
    """In-process torch, sampling from the trainer's own parameters."""

    shares: ClassVar[bool] = True
    type: Literal["local"] = "local"
    max_concurrent: Positive = 64
    """Requests decoded together."""
    cached_sequences: Natural = 64
    """Finished sequences kept for reuse of their prefix, besides the running ones."""
    context: Natural = 0
    """Tokens of prompt and answer together; 0 takes the model's own limit."""
    prepack_weights: bool = True
    """On CPU in float32: sample from copies of the large weights laid out for its kernels (as much memory
    again as the weights), made again for each version. The last bits are those of plain products, except on
    AMD's processors."""
    prefill_tokens: Positive = 512
    """Prompt tokens computed in one step, so that long prompts do not stall decoding."""
    max_adapters: Positive = 32
    """LoRA adapters that requests can name; of more, the one that was used longest ago is dropped."""

    drafts: Literal["forest", "off"] = "forest"
    """`forest`: compute several tokens of a request in one step where prompts and earlier rollouts make them
    likely. Completions are the same to the last bit, and come sooner. Works on CPU where a row's bits do not
    depend on its company (`silva doctor` tells)."""

    def build(self, context: Assembly) -> Engine:
        from silva.engines.local.engine import LocalEngine

        routes = context.config.replays_routing
        return context.compute.run(LocalEngine, context.model, self, context.compute, routes=routes)
