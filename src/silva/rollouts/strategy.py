"""What strategies have in common: from what they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from silva.protocols import Engine
from silva.rendering.renderer import Renderer
from silva.rollouts.faults import UNWATCHED, Watch
from silva.rollouts.settings import RolloutSettings

S = TypeVar("S", bound=RolloutSettings)


@dataclass
class Strategy(Generic[S]):
    """Base of a `Rollout`.

    Attributes:
        seed: of the run; with the id of the work and the episode's place in it, it fixes every sample.
        on_turn: told (episode id, whom it waits for); None for an episode that has ended.
    """

    settings: S
    engine: Engine
    renderer: Renderer
    _: KW_ONLY
    seed: int
    on_turn: Callable[[str, str | None], None] = lambda episode, waiting_for: None
    watch: Watch = UNWATCHED
