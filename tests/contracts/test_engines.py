"""What every engine does. A new one adds itself to the fixture `engine`.

Not here: `TinkerEngine`, which has no entropies and loads samplers of its service alone; a server takes some
seconds to start. tests/server/tinker/test_runs_of_silva.py and tests/trainer/test_tinker.py try it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from tests.contracts.doubles import Failing, Slow
from tests.engines.inference_server import serving

from silva.engines.local.engine import LocalEngine
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import SilvaDialect
from silva.engines.settings import LocalEngineSettings
from silva.errors import ContextOverflow, EngineError
from silva.models.loading import LoadedModel
from silva.models.snapshots import weight_folder
from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine
from silva.protocols import Engine
from silva.types import Completion, SamplingParams, Snapshot
from silva.wire.transport import Peer

CONTEXT = 48
PROMPT = list(range(40, 60))
Make = Callable[[], Engine]


def scripted() -> Engine:
    """Counts on from the last token, and ends nothing by itself."""
    return ScriptedEngine(
        lambda tokens, params: [tokens[-1] + 1 + i for i in range(params.max_tokens)], context=CONTEXT
    )


@pytest.fixture(params=["local", "scripted", "slow local", "traced", "http"])
def engine(request: pytest.FixtureRequest, tiny_model: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    with ThreadPoolExecutor(1) as compute, ExitStack() as stack:
        settings = LocalEngineSettings(max_concurrent=3, cached_sequences=2, context=CONTEXT)

        def behind_http() -> Engine:
            server = stack.enter_context(serving(LocalEngine(tiny_model, settings, compute), tmp_path / "s"))
            client = HttpEngine([Peer(server.address, name="inference")], ClientSettings(), SilvaDialect())
            asyncio.run(client.connect())
            return client

        made = {
            "local": lambda: LocalEngine(tiny_model, settings, compute),
            "slow local": lambda: Slow(LocalEngine(tiny_model, settings, compute)),
            "scripted": scripted,
            "traced": lambda: TracedEngine(scripted(), Trace(None)),
            "http": behind_http,
        }
        yield made[request.param]()


def ask(engine: Engine, *prompts: list[int], **params: int | tuple[int, ...]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        asked = (
            engine.sample(prompt, SamplingParams(**{"max_tokens": 6, "seed": i} | params))
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(all_of_them())


def test_every_token_has_its_numbers(engine: Engine) -> None:
    (found,) = ask(engine, PROMPT)
    assert (len(found.tokens), found.stop_reason) == (6, "length")
    assert found.versions == (engine.version,) * 6
    assert all(math.isfinite(x) and x <= 0 for x in (*found.logprobs, *found.raw_logprobs))
    assert found.raw_logprobs is found.logprobs  # the same at temperature 1: kept once
    if engine.capabilities.entropies:
        assert all(math.isfinite(x) and x >= 0 for x in found.entropies)


@pytest.mark.slow
def test_requests_together_are_answered_as_alone(engine: Engine) -> None:
    prompts = [PROMPT[: 3 + i] for i in range(8)]  # more than run at once
    together = ask(engine, *prompts)
    alone = [ask(engine, prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    assert [found.tokens for found in together] == [found.tokens for found in alone]


@pytest.mark.slow
def test_a_stop_token_is_the_last_one(engine: Engine) -> None:
    (free,) = ask(engine, PROMPT)
    stop = free.tokens[2]
    (found,) = ask(engine, PROMPT, stop_token_ids=(stop,))
    assert found.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert found.stop_reason == "stop_token"


@pytest.mark.slow
def test_the_context_holds_prompt_and_answer(engine: Engine) -> None:
    full = list(range(CONTEXT - 2))
    (found,) = ask(engine, full)
    assert (len(found.tokens), found.stop_reason) == (2, "context_overflow")
    assert engine.capabilities.context == CONTEXT
    with pytest.raises(ContextOverflow, match=f"prompt of {CONTEXT} tokens"):
        ask(engine, list(range(CONTEXT)))
    assert len(ask(engine, PROMPT)[0].tokens) == 6


@pytest.mark.slow
def test_a_request_that_is_cancelled_leaves_the_others_alone(engine: Engine) -> None:
    async def run() -> list[Completion]:
        asked = [
            asyncio.ensure_future(engine.sample(PROMPT, SamplingParams(max_tokens=6, seed=i)))
            for i in range(5)
        ]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.wait(asked)
        assert asked[1].cancelled()
        return [task.result() for i, task in enumerate(asked) if i != 1]

    expected = ask(engine, *[PROMPT] * 5)
    del expected[1]
    assert [found.tokens for found in asyncio.run(run())] == [found.tokens for found in expected]


@pytest.mark.slow
def test_a_snapshot_gives_its_version_and_sleep_changes_nothing(
    engine: Engine, tiny_model: LoadedModel, tmp_path: Path
) -> None:
    before = ask(engine, PROMPT)[0]
    tiny_model.model.save_pretrained(tmp_path / "weights")
    shares = "shared" in engine.capabilities.loads
    asyncio.run(engine.load(Snapshot(7, None if shares else weight_folder(tmp_path / "weights"))))
    assert engine.version == 7
    asyncio.run(engine.sleep())
    after = ask(engine, PROMPT)[0]
    assert (after.tokens, after.versions) == (before.tokens, (7,) * 6)


def test_tokens_that_are_given_have_log_probabilities(engine: Engine) -> None:
    found = asyncio.run(engine.score(PROMPT, 5)).logprobs
    assert len(found) == len(PROMPT) - 5 and all(math.isfinite(x) and x <= 0 for x in found)


def test_what_fails_once_is_an_engine_error_and_works_again() -> None:
    engine = Failing(scripted(), "sample")
    with pytest.raises(EngineError, match="the connection was cut"):
        ask(engine, PROMPT)
    assert len(ask(engine, PROMPT)[0].tokens) == 6
