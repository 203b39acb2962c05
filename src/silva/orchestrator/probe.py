"""Does the engine sample from the weights that the trainer has published? Asked after every update.

    trainer.publish ──> engine.load ──> the same text, scored by both ──> mismatch
                                                    │
                              equal to the last bit to the engine's answer before, although
                              the trainer's answer has moved: the engine has kept old weights
                              larger than rounding, and than a share of how far the trainer's
                              answer has moved: some of the weights did not arrive

Both compute with kernels of their own, so their log-probabilities differ by rounding, which does not grow
with the updates. Weights that do not arrive leave a difference that grows as the trainer's answer moves.
docs/services.md has the numbers. Engines that share the trainer's parameters are not asked.

In a run whoever gives the engine the weights of its trainer does so by `WeightSync`, and so asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from silva.aio import gather
from silva.errors import EngineError
from silva.ports import uniform
from silva.protocols import Engine, Trainer
from silva.rollouts.samples import to_score
from silva.types import Snapshot

LENGTH = 32  # tokens of the text
MOST = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""By which log-probabilities of a token may differ, by the dtype of the model."""
LEAST = {"float64": 1e-14, "float32": 5e-7, "bfloat16": 1e-3, "float16": 1e-4}
"""Rounding (root of the mean square) to count on if the first probe shows less."""
ROUNDING = 8.0  # times the first probe's difference
SHARE = 0.1  # of how far the trainer's answer has moved since the first probe


class Probe:
    """Compares trainer and engine on one text.

    Args:
        vocabulary: of the model; the text is random tokens.
        dtype: of the weights.
        exact: both have the same bits, or the engine is refused.
    """

    def __init__(self, vocabulary: int, dtype: str, *, exact: bool = False) -> None:
        self._tokens = (uniform(0, np.arange(LENGTH)) * vocabulary).astype(np.int64).tolist()
        self._exact, self._most, self._rounding = exact, MOST[dtype], LEAST[dtype]
        self._asked = -1, np.empty(0)  # the trainer's version and answer
        self._first: np.ndarray | None = None  # the trainer's answer to the first probe
        self._engines: tuple[float, ...] = ()
        self._trainers = np.empty(0)

    async def ask(self, trainer: Trainer) -> None:
        """Get the trainer's answer for the next `check`. The engine may load the same weights meanwhile."""
        row = to_score(self._tokens[:1], self._tokens[1:], "probe", "probe")
        found = (await trainer.score([row], frozenset({"logprobs"}))).logprobs
        assert found is not None
        self._asked = trainer.version, np.asarray(found[0], np.float64)[1:]

    async def check(self, engine: Engine) -> dict[str, float]:
        """Compare the engine's answer with the trainer's last one.

        Returns:
            Metrics: mean KL(engine || trainer) of a token, estimated as r - 1 - ln r with
            r = trainer / engine (k3 of Schulman 2020), and the largest difference of a log-probability.

        Raises:
            EngineError: the engine does not sample from what was published.
        """
        version, trainers = self._asked
        scores = await engine.score(self._tokens, 1)
        gap = trainers - np.asarray(scores.logprobs)
        self._refuse_stale(version, scores.version, scores.logprobs, trainers, gap)
        self._engines, self._trainers = scores.logprobs, trainers
        kl, largest = float(np.mean(np.expm1(gap) - gap)), float(np.abs(gap).max())
        return {"perf/mismatch_kl": kl, "perf/mismatch_max": largest}

    def _refuse_stale(
        self, version: int, engines: int, scores: tuple[float, ...], trainers: np.ndarray, gap: np.ndarray
    ) -> None:
        where = f"the engine, after version {version} was loaded"
        if engines != version:
            raise EngineError(f"{where}: it computes with version {engines}")
        if scores == self._engines and not np.array_equal(trainers, self._trainers):
            raise EngineError(
                f"{where}: log-probabilities of a fixed text are those of the version before, to the last "
                "bit, and the trainer's have changed. The engine still has old weights"
            )
        worst = float(np.abs(gap).max())
        if self._exact and worst:
            raise EngineError(
                f"{where}: trainer.exact = true, and its log-probabilities of a fixed text differ from the "
                f"trainer's by up to {worst:.3g}. Expected Silva's engine with the processor, torch, number "
                "of threads and engine.prepack_weights of the trainer, or trainer.exact = false"
            )
        if not worst <= self._most:
            raise EngineError(
                f"{where}: its log-probabilities of a fixed text differ from the trainer's by up to "
                f"{worst:.3g}, expected at most {self._most:g}. It has other weights, or another model"
            )
        if self._first is None:
            self._first, self._rounding = trainers, max(self._rounding, _size(gap))
        moved = _size(trainers - self._first)
        if _size(gap) > (most := ROUNDING * self._rounding + SHARE * moved):
            raise EngineError(
                f"{where}: its log-probabilities of a fixed text differ from the trainer's by "
                f"{_size(gap):.3g} (root of the mean square), expected at most {most:.3g}: the "
                f"trainer's have moved by {moved:.3g}, and rounding makes {self._rounding:.3g}. "
                "Some of its weights are old"
            )


@dataclass(frozen=True)
class WeightSync:
    """What a trainer has learnt goes to an engine.

    Args:
        probe: None if the engine shares the trainer's parameters.
    """

    trainer: Trainer
    engine: Engine
    probe: Probe | None

    async def publish(self) -> dict[str, float]:
        """The engine samples from the trainer's weights now; metrics and errors as of `load`."""
        return await self.load(await self.trainer.publish())

    async def load(self, snapshot: Snapshot) -> dict[str, float]:
        """The engine loads the trainer's newest snapshot, while the trainer answers the probe.

        Returns:
            Metrics of `Probe.check`; none without a probe.

        Raises:
            EngineError: the engine does not sample from these weights.
        """
        if self.probe is None:
            await self.engine.load(snapshot)
            return {}
        await gather([self.engine.load(snapshot), self.probe.ask(self.trainer)])
        return await self.probe.check(self.engine)


def _size(differences: np.ndarray) -> float:
    return float(np.sqrt(np.mean(differences**2)))
