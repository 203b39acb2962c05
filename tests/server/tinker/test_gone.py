"""A session that has ended, a sampler and a result that are gone: lost parts of Silva's own runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.server.tinker.conftest import KEY, Service

pytest.importorskip("tinker", reason="needs tinker: pip install tinker")

from silva.engines.tinker.engine import TinkerEngine
from silva.engines.tinker.settings import TinkerEngineSettings
from silva.errors import ConfigError
from silva.trainer.tinker import ServiceAdapter, TinkerTrainer
from silva.types import LossSpec, OptimParams, Sample, SamplingParams
from silva.wire.tinker import Gone

pytestmark = pytest.mark.slow
LORA = ServiceAdapter("base", 8, 0, frozenset({"attn"}))


def row() -> Sample:
    sampled = np.arange(5) > 1
    return Sample(
        tokens=np.arange(1, 6),
        loss_weights=sampled.astype(np.float32),
        logprobs=np.where(sampled, -1.0, np.nan),
        temperatures=np.ones(5),
        versions=np.where(sampled, 0, -1),
        trajectory="t",
        group="g",
        advantages=np.ones(5),
    )


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with Service(tmp_path).running() as found:
        yield found


def test_what_this_run_has_made_and_is_gone_is_a_lost_part(running: Service, tmp_path: Path) -> None:
    settings = TinkerEngineSettings(url=running.address)
    trainer, engine = TinkerTrainer(settings, LORA, "run"), TinkerEngine(settings, "base", lambda ids: "")
    params = SamplingParams(max_tokens=2)

    async def main() -> None:
        await trainer.connect()
        await engine.connect()
        await trainer.forward_backward([row()], LossSpec("clipped"))
        await engine.load(await trainer.publish())
        assert len((await engine.sample([1, 2], params)).tokens) == 2
        await trainer.save(tmp_path / "saved")

        running.change("UPDATE sessions SET finished = 1")
        running.change("DELETE FROM samplers")
        with pytest.raises(Gone, match=r"HTTP 404: .*sampling session .*not found.*asked to sample"):
            await engine.sample([1, 2], params)
        with pytest.raises(Gone, match=r"HTTP 410: .*session of .*it has finished.*asked to step"):
            await trainer.optim_step(OptimParams(lr=1.0))
        await trainer.close()

        again = TinkerTrainer(settings, LORA, "run")
        await again.connect()
        await again.load(tmp_path / "saved")
        running.runs.hold.clear()  # a pass begins, and does not end
        late = asyncio.ensure_future(again.forward_backward([row()], LossSpec("clipped")))
        forgotten = "DELETE FROM requests WHERE kind = 'forward_backward' AND finished IS NULL"
        while not running.change(forgotten):  # until it has come
            await asyncio.sleep(0.01)
        running.runs.hold.set()
        with pytest.raises(Gone, match=r"HTTP 410: .*request .*not found.*asked to train"):
            await late
        await again.close()

    asyncio.run(main())


def test_weights_that_somebody_named_and_are_not_there_are_told_with_the_key(running: Service) -> None:
    settings = TinkerEngineSettings(url=running.address, weights="tinker://a/weights/b")
    engine = TinkerEngine(settings, "base", lambda ids: "")

    async def main() -> None:
        await engine.connect()
        with pytest.raises(
            ConfigError, match=r"engine.weights: Tinker: HTTP 404: .*checkpoint tinker://a/weig"
        ):
            await engine.sample([1, 2], SamplingParams(max_tokens=2))

    asyncio.run(main())
