"""What a run at a service will cost, by what the episodes of a plan's probe took there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silva.assembly import Assembly
from silva.types import Group
from silva.wire.requests import Counts, Prices, Requests, Usage


@dataclass(frozen=True)
class PlayedAtService:
    """What the episodes of a probe took. `update`: what training takes for a token of a row."""

    prices: Prices
    counts: Counts
    episodes: int
    update: Usage

    @classmethod
    def of(cls, assembly: Assembly, trainer: Any, groups: Sequence[Group]) -> PlayedAtService:
        recipe, engine = assembly.config.algorithm, assembly.engine
        requests: Requests = engine.requests  # type: ignore[attr-defined]
        update: Usage = trainer.usage(recipe.needs, recipe.loss_spec())
        episodes = sum(len(group.trajectories) for group in groups)
        return cls(requests.prices, requests.counts, episodes, update)

    def cost(self, *, steps: int, played: float, trained: float, evaluated: float) -> str:
        """In words.

        Args:
            played: episodes of a step.
            trained: tokens of the rows of a step.
            evaluated: episodes of all evaluations.
        """
        counts, prices = self.counts, self.prices
        if not counts.requests:
            return "cost: unknown, since a script has played the probe in place of the service's model"
        probe = (
            f"the probe's {self.episodes} episodes at the service read {counts.input:,} tokens "
            f"({counts.cached:,} of them cached) and sampled {counts.output:,}"
        )
        if not prices.paid:
            return f"cost: unknown without engine.input_price, output_price and train_price; {probe}"
        paid = counts.cost + counts.unknown_cost
        sampling, learning = played * paid / self.episodes, trained * prices.of(self.update)
        whole = steps * (sampling + learning) + evaluated * paid / self.episodes
        more = f" and log-probabilities ({self.update.input} times)" if self.update.input else ""
        most = "" if prices.most is None else f" (engine.max_cost = {prices.most:g})"
        return (
            f"cost: about {sampling + learning:.3g} a step by the prices in [engine], {sampling:.3g} to "
            f"sample and {learning:.3g} for gradients{more}; {whole:.3g} in all with evaluations{most}; "
            f"{probe}, for {paid:.3g}"
        )
