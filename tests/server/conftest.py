"""A tiny model's engine and renderer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.server.running import CONTEXT

from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import LoadedModel
from silva.rendering.renderer import Renderer


@pytest.fixture(scope="session")
def renderer(tiny_model: LoadedModel) -> Renderer:
    return Renderer(tiny_model.tokenizer)


@pytest.fixture
def engine(tiny_model: LoadedModel) -> Iterator[LocalEngine]:
    with ThreadPoolExecutor(1) as compute:
        settings = LocalEngineSettings(max_concurrent=4, cached_sequences=4, context=CONTEXT)
        yield LocalEngine(tiny_model, settings, compute)
