"""A database that ends before or after it has done what it was asked for, again and again."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.server.tinker import live_models
from silva.server.tinker.futures import Futures
from silva.server.tinker.messages import MESSAGES
from silva.server.tinker.server import TIDY
from silva.server.tinker.tables import DatabaseFault, Tables
from silva.server.tinker.training import CLOCK

FAILING = 0.1  # of all transactions


class Patient(Client):
    """Asks again what the server could not do, as the SDK does."""

    async def post(self, where, /, **body):
        return await _surely(super().post, where, **body)

    async def passed(self, model, seq, value=1.0, **how):
        return await _surely(super().passed, model, seq, value, **how)


async def _surely(ask, *args, **kwargs):
    while (answer := await ask(*args, **kwargs)).status_code >= 500:
        pass
    return answer


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = CLOCK.sleep
    monkeypatch.setattr(CLOCK, "sleep", lambda s: sleep(s if s >= TIDY else s / 1000))
    monkeypatch.setattr(Futures.answer, "__defaults__", (0.02,))  # seconds of a poll
    monkeypatch.setattr(live_models, "KEEP_EVERY", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("recorded", [False, True])
async def test_no_request_is_lost_and_none_is_done_twice(tmp_path, monkeypatch, recorded: bool):
    """Whichever transactions fail, and whether they are recorded without an answer or not at all."""
    real, rng, failed, calm = Tables._transaction, random.Random(0), 0, True

    def transaction(tables, changes):
        nonlocal failed
        fails = not calm and rng.random() < FAILING
        result = real(tables, changes) if recorded or not fails else None
        if fails:
            failed += 1
            raise ConnectionError("the database has ended")
        return result

    monkeypatch.setattr(Tables, "_transaction", transaction)
    weight = 0.9 * (0.9 * 1.0 + 1.5) + 3.5  # of ScriptedRuns
    for trial in range(6):
        async with asyncio.timeout(600), Service(tmp_path / str(trial)).asked() as http:
            calm = False
            found = await _trained_and_sampled(http)
            calm = True
        assert found == [np.float32(weight), np.float32(weight - 1)]
    assert failed > 20


@pytest.mark.usefixtures("hurried")
async def test_a_sample_is_drawn_though_its_acceptance_was_not_answered(service: Service, monkeypatch):
    real = Futures.accept

    async def unanswered(futures, asked):
        monkeypatch.setattr(Futures, "accept", real)
        await real(futures, asked)
        raise DatabaseFault("the database has ended")

    async with service.asked() as http:
        client = await Patient(http).begin()
        made = await client.post(
            "/create_sampling_session",
            session_id=client.session,
            sampling_session_seq_id=0,
            base_model="base",
        )
        monkeypatch.setattr(Futures, "accept", unanswered)
        assert await asyncio.wait_for(_sampled(client, made.json()["sampling_session_id"]), 60) == [0.0, -1.0]


async def _trained_and_sampled(http) -> list[np.float32]:
    """What is sampled after two steps, a checkpoint, a step, and one more from the checkpoint."""
    client = await Patient(http).begin()
    model, seq = await client.model(), 0

    async def done(answer):
        found = await client.result(answer)
        assert "error" not in found
        return found

    async def ask(where, **body):
        nonlocal seq
        seq += 1
        return await done(await client.post(where, model_id=model, seq_id=seq, **body))

    async def learn(value):
        nonlocal seq
        seq += 2
        sent = [await client.passed(model, seq - 1, value), await client.step(model, seq, 0.5)]
        _, stepped = [await done(each) for each in sent]
        assert stepped["metrics"] == {"gradient:mean": value}

    await learn(2.0)
    await learn(3.0)
    saved = await ask("/save_weights", path="a")
    await learn(5.0)
    await ask("/load_weights", path=saved["path"], optimizer=True)
    await learn(7.0)
    sampler = await ask("/save_weights_for_sampler", sampling_session_seq_id=0)
    return await _sampled(client, sampler["sampling_session_id"])


async def _sampled(client: Patient, session: str) -> list[np.float32]:
    """Log-probabilities of two tokens."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    sent = await client.post(
        "/asample", sampling_session_id=session, prompt=prompt, seq_id=0,
        sampling_params={"max_tokens": 2},
    )  # fmt: skip
    asked = {"request_id": sent.json()["request_id"]}
    while b"try_again" in (found := await client.post("/retrieve_future", **asked)).content:
        pass
    (sequence,) = MESSAGES["SampleResponse"].FromString(found.content).sequences
    return list(np.frombuffer(sequence.logprobs, np.float32))
