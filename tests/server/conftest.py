"""A tiny model's engine and renderer; a trainer's server and rows for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.coroutines import in_loop
from tests.server.running import CONTEXT, run
from tests.server.scripted_trainer import Park

from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import LoadedModel
from silva.rendering.renderer import Renderer
from silva.types import Sample

pytest_pyfunc_call = in_loop(run)


@pytest.fixture(scope="session")
def renderer(tiny_model: LoadedModel) -> Renderer:
    return Renderer(tiny_model.tokenizer)


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[LocalEngine]:
    with ThreadPoolExecutor(1) as compute:
        settings = LocalEngineSettings(max_concurrent=4, cached_sequences=4, context=CONTEXT)
        yield LocalEngine(tiny_model, settings, compute)


@pytest.fixture
def park(tmp_path: Path) -> Park:
    return Park(tmp_path)


@pytest.fixture
def rows() -> tuple[Sample, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        Sample(
            tokens=rng.integers(0, 256, length),
            loss_weights=np.append(0.0, np.full(length - 1, 1 / length)),
            logprobs=np.append(np.nan, rng.normal(size=length - 1)),
            temperatures=np.full(length, 0.7),
            versions=np.zeros(length, dtype=np.int64),
            trajectory=f"t{length}",
            group="g",
            advantages=rng.normal(size=length),
        )
        for length in (5, 9)
    )
