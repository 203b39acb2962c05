"""Settings of the engine that samples through the Tinker service."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from silva.config.parts import EngineSettings, TinkerService
from silva.config.sections import Natural
from silva.errors import CapabilityError

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Engine


class TinkerEngineSettings(TinkerService, EngineSettings):
    """The sampler of the Tinker service, or of `silva serve tinker`."""

    remote: ClassVar[bool] = True

    type: Literal["tinker"] = "tinker"
    context: Natural = 0
    """Tokens of prompt and answer together; 0 takes what the service says of the model."""

    def build(self, context: Assembly) -> Engine:
        """Raises CapabilityError for a way of sampling that the service has not."""
        from silva.engines.tinker.engine import TinkerEngine
        from silva.models.loading import name_of

        for key in ("rollout", "eval"):
            if least := getattr(context.config, key).sampling.min_p:
                raise CapabilityError(f"{key}.sampling.min_p = {least:g}: the service has none; expected 0")
        name = self.model or name_of(context.config.model)
        return TinkerEngine(self, name, context.renderer.decode)
