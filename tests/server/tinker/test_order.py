"""The order of requests, over the wire alone: gaps, repeats, restarts, turns."""

from __future__ import annotations

import asyncio
import sqlite3

import numpy as np
import pytest
from safetensors import SafetensorError
from tests.server.running import until
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.errors import CheckpointError, ConfigError
from silva.server.tinker import futures, live_models, messages, postgres, training
from silva.server.tinker.sampling import OwnerTurns
from silva.server.tinker.tables import DatabaseFault, Tables


async def test_requests_are_done_in_the_order_of_their_numbers(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        late = [
            await client.passed(model, 3, 3.0),
            await client.step(model, 4),
            await client.passed(model, 2, 2.0),
        ]
        waiting = await client.post("/retrieve_future", request_id=late[0].json()["request_id"])
        assert waiting.json()["type"] == "try_again"
        assert waiting.json()["queue_state_reason"] == "request 1 of this model has not come"
        assert service.runs.together == []
        first = await client.passed(model, 1, 1.0)
        assert (await client.result(late[1])) == {"metrics": {"gradient:mean": 6.0}}
        assert await client.result(first) == {"loss:sum": 2.0}
        assert service.runs.together == [[model]] * 3


@pytest.fixture
def service(of_each_database: Service) -> Service:
    """Every test of this file is one of both databases."""
    return of_each_database


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    real = futures.Futures.answer
    monkeypatch.setattr(
        futures.Futures, "answer", lambda self, name, owner, seconds=0.1: real(self, name, owner, seconds)
    )


async def test_what_is_sent_twice_is_done_once(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        sent = await asyncio.gather(*(client.passed(model, 1, 5.0) for _ in range(4)))
        assert len({each.text for each in sent}) == 1
        stepped = [await client.step(model, 2) for _ in range(3)]
        assert len({each.text for each in stepped}) == 1
        assert (await client.result(stepped[2]))["metrics"] == {"gradient:mean": 5.0}
        again = await client.passed(model, 1, 5.0)  # after it was done
        assert again.text == sent[0].text and await client.result(again) == {"loss:sum": 10.0}
        other = await client.passed(model, 1, 6.0)
        assert other.status_code == 400 and "was another request" in other.text
        assert service.runs.weights[model] == 5.0 and len(service.runs.together) == 1


async def test_models_that_are_ready_together_share_a_pass_and_nobody_waits_for_a_queue(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        one, other = await client.model(0), await client.model(1)
        service.runs.hold.clear()
        blocked = await client.passed(one, 1)
        await until(
            lambda: not service.runs.hold.is_set() and service.runs.calls[-1] == ("create", other), ""
        )
        queue = [await client.passed(one, seq) for seq in range(2, 20)]
        mine = [await client.passed(other, 1), await client.step(other, 2), await client.passed(other, 3)]
        service.runs.hold.set()
        for each in (blocked, *queue, *mine):
            await client.result(each)
        # The step of the other one does not keep it out of the pass after it.
        together = [sorted(each) for each in service.runs.together]
        assert together == [[one], [one, other], [one, other], *[[one]] * 16]


async def test_keys_take_turns_however_many_models_each_has(service: Service, monkeypatch):
    monkeypatch.setattr(training, "TOGETHER", 2)
    async with service.asked() as http:
        client, other = await Client(http).begin(), await Client(http, **{"x-api-key": "tml-other"}).begin()
        many, one = [await client.model(number) for number in range(4)], await other.model()
        service.runs.hold.clear()
        sent = [(client, await client.passed(many[0], 1))]
        await until(lambda: service.runs.calls[-1] == ("create", one), "")
        sent += [(client, await client.passed(model, 1)) for model in many[1:]]
        sent.append((other, await other.passed(one, 1)))
        service.runs.hold.set()
        for who, each in sent:
            await who.result(each)
        assert service.runs.together == [[many[0]], [many[1], one], [many[2], many[3]]]


async def test_a_wrong_request_fails_alone_and_those_after_it_go_on(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        wrong = [
            await client.passed(model, 1, targets=(1, 2, 3)),
            await client.passed(model, 2, loss="magic"),
            await client.passed(model, 3, float("nan")),
            await client.step(model, 4, lr=-1.0),
            await client.post("/save_weights", model_id=model, seq_id=5, path="../../etc/passwd"),
            await client.post("/save_weights_external", model_id=model, seq_id=6, path="a/b"),
            await client.post("/optim_step", model_id=model, seq_id=7, optimizer_params={"type": "dimuon"}),
        ]
        for answer, words in zip(
            wrong,
            ("expected 2", "got 'magic'", "not finite", "learning_rate", "path", "path",
             "optimizer_params"), strict=True,
        ):  # fmt: skip
            found = await client.result(answer)
            assert found["category"] == "user" and words in found["error"]
        assert await client.result(await client.passed(model, 8)) == {"loss:sum": 2.0}
        assert not service.lines


async def test_a_full_disk_loses_no_step_and_makes_none_twice(service: Service, monkeypatch):
    monkeypatch.setattr(live_models, "KEEP_EVERY", 2)

    def full(run, folder, *, optimizer=True):
        raise CheckpointError("cannot be written") from SafetensorError("no space left on device")

    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        saved = await client.result(await client.post("/save_weights", model_id=model, seq_id=1, path="old"))
        save = service.runs.save
        monkeypatch.setattr(service.runs, "save", full)
        await client.result(await client.passed(model, 2, 2.0))
        assert (await client.result(await client.step(model, 3)))["metrics"] == {"gradient:mean": 2.0}
        assert (
            "optim_step 3" in service.lines[0] and "not kept on disk: cannot be written" in service.lines[0]
        )
        body = {"model_id": model, "path": saved["path"], "optimizer": True}
        found = await client.result(await client.post("/load_weights", seq_id=4, **body))
        assert found["category"] == "server" and "load_weights 4" in service.lines[1]
        await client.result(await client.passed(model, 5, 4.0))
        await client.result(await client.step(model, 6))
        assert service.runs.weights[model] == 0.9 * 2.0 + 4.0
        monkeypatch.setattr(service.runs, "save", save)
        await client.result(await client.step(model, 7))
        weight = service.runs.weights[model]
    async with service.asked() as http:
        client.http = http
        await client.result(await client.passed(model, 8, 0.0))
        assert service.runs.weights[model] == weight


async def test_a_bug_fails_its_request_and_the_model_is_made_again(service: Service, monkeypatch):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        await client.result(await client.passed(model, 1, 2.0))
        await client.result(await client.step(model, 2))
        step = service.runs.optim_step

        def breaks(run, params):
            step(run, params)  # half-way
            raise RuntimeError("a bug")

        await client.result(await client.passed(model, 3, 4.0))
        monkeypatch.setattr(service.runs, "optim_step", breaks)
        failed = await client.step(model, 4)
        found = await client.result(failed)
        assert found["category"] == "server" and "a bug" not in found["error"]
        monkeypatch.setattr(service.runs, "optim_step", step)
        assert (await client.result(await client.step(model, 5)))["metrics"] == {"gradient:mean": 4.0}
        assert service.runs.weights[model] == 0.9 * 2.0 + 4.0
        assert "RuntimeError: a bug" in service.lines[0]


@pytest.mark.slow
async def test_a_server_goes_on_where_another_was_killed(service: Service):
    """Results are kept, requests that waited are done, and weights are what they would have been."""
    values = [float(n) for n in range(1, 28)]
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        seq, sent = 0, []
        for value in values[:25]:
            sent.append(await client.passed(model, seq + 1, value))
            sent.append(await client.step(model, seq + 2, 0.5))
            seq += 2
        done = [await client.result(each) for each in sent]
        assert sum(call[0] == "save" for call in service.runs.calls) == 50 // live_models.KEEP_EVERY
        service.runs.hold.clear()
        waits = [await client.passed(model, seq + 1, values[25]), await client.step(model, seq + 2, 0.5)]
        before = service.runs.weights[model]
    async with service.asked() as http:
        client.http = http
        assert [await client.result(each) for each in sent] == done
        await client.result(waits[1])
        assert service.runs.weights[model] == 0.9 * before + 0.5 * values[25]
        loads = [call for call in service.runs.calls if call[0] in ("load", "create")]
        assert [call[0] for call in loads] == ["create", "load"]
        assert (
            len(service.runs.together) == (50 % live_models.KEEP_EVERY) // 2 + 1
        )  # since the folder, and the new one
        await client.result(await client.passed(model, seq + 3, values[26]))
        await client.result(await client.step(model, seq + 4, 0.5))
    expected = 0.0
    for value in values:
        expected = 0.9 * expected + 0.5 * value
    assert service.runs.weights[model] == expected and not service.lines


async def test_passes_without_a_step_are_not_repeated_for_ever(service: Service, monkeypatch):
    monkeypatch.setattr(live_models, "KEEP_EVERY", 1)
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        for seq in range(1, 11):
            await client.result(await client.passed(model, seq, 2.0))
    async with service.asked() as http:
        client.http = http
        assert (await client.result(await client.step(model, 11)))["metrics"] == {"gradient:mean": 20.0}
        assert len(service.runs.together) == 10 % 4


async def test_models_that_were_not_used_for_long_leave_memory_and_come_back(service: Service, monkeypatch):
    monkeypatch.setattr(live_models, "LIVE", 1)
    async with service.asked() as http:
        client = await Client(http).begin()
        one, other = await client.model(0), await client.model(1)
        for seq, lr in ((1, 1.0), (3, 2.0)):
            for model in (one, other):
                await client.passed(model, seq, 3.0)
                await client.result(await client.step(model, seq + 1, lr))
            assert len(service.runs.weights) <= 2
        dropped = [call[1] for call in service.runs.calls if call[0] == "drop"]
        assert {one, other} == set(dropped)
        await client.result(await client.passed(one, 5))
        assert service.runs.weights[one] == 0.9 * 3.0 + 6.0


async def test_memory_of_passes_is_given_back_once_nothing_is_asked(service: Service, monkeypatch):
    given = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(training, "IDLE", 0.01)
    monkeypatch.setattr(training, "give_freed_memory_back", lambda: loop.call_soon_threadsafe(given.set))
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        await asyncio.wait_for(given.wait(), 60)
        assert await client.result(await client.passed(model, 1)) == {"loss:sum": 2.0}


async def test_sampling_goes_on_after_a_restart_with_the_same_seeds(service: Service):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    params = {"max_tokens": 2, "stop": [9]}
    async with service.asked() as http:
        client = await Client(http).begin()
        made = await client.post("/create_sampling_session", session_id=client.session,
                                 sampling_session_seq_id=0, base_model="base")  # fmt: skip
        session = made.json()["sampling_session_id"]
        asleep = asyncio.Event()
        seeds = []

        async def never(tokens, given, adapter):
            seeds.append(given.seed)
            await asleep.wait()

        service.sampler.sample = never
        asked = {
            "sampling_session_id": session,
            "prompt": prompt,
            "sampling_params": params,
            "num_samples": 2,
        }
        sent = await client.post("/asample", **asked, seq_id=0)
        twice = await client.post("/asample", **asked, seq_id=0)
        assert sent.text == twice.text and len(sent.json()["sample_sequence_ids"]) == 2
        cancelled = await client.post("/asample", **asked, seq_id=1)
        await client.post("/cancel_future", request_id=cancelled.json()["request_id"])
        assert "cancelled" in (await client.result(cancelled))["error"]
        await until(lambda: len(seeds) >= 2, "it is asked for")
    async with service.asked() as http:
        client.http = http
        found = await client.post("/retrieve_future", request_id=sent.json()["request_id"])
        response = messages.MESSAGES["SampleResponse"]()
        response.ParseFromString(found.content)
        assert [np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences] == [[6, 7]] * 2
        assert [params.seed for _, params in service.sampler.asked] == seeds[:2] and seeds[0] != seeds[1]
        assert [params.stop_token_ids for _, params in service.sampler.asked] == [(63, 9)] * 2


async def test_owners_take_turns():
    turns, order = OwnerTurns(1), []

    async def ask(owner):
        async with turns.of(owner):
            order.append(owner)
            await asyncio.sleep(0)

    asked = [asyncio.ensure_future(ask(owner)) for owner in "aaaaabbc"]
    await asyncio.sleep(0)
    asked[2].cancel()  # while it waits
    await asyncio.gather(*asked, return_exceptions=True)
    assert "".join(order) == "aabcaba"
    await asyncio.wait_for(ask("d"), 60)


async def test_one_folder_has_one_server(service: Service, monkeypatch):
    monkeypatch.setattr(postgres, "PATIENCE", 50)
    async with service.asked():
        with pytest.raises(ConfigError, match="other server uses"):
            Tables(service.database or service.state / "tinker.sqlite")


def test_a_damaged_file_is_told(tmp_path):
    path, whole = tmp_path / "tinker.sqlite", tmp_path / "whole.sqlite"
    Tables(whole)._db.close()
    content = whole.read_bytes()
    for damaged in (b"\x5a" * 5000, content[:4096] + b"\x5a" * (len(content) - 4096), content[:5000]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"^[^\n]*damaged"):
            Tables(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="can be written"):
        Tables(path)


async def test_an_error_of_the_disk_is_not_hidden_by_its_rollback(tmp_path):
    def full(db):
        db.execute("ROLLBACK")  # as SQLite does itself
        raise sqlite3.OperationalError("database or disk is full")

    tables = Tables(tmp_path / "tinker.sqlite")
    with pytest.raises(DatabaseFault, match="OperationalError: database or disk is full"):
        await tables.do(full)
    await tables.close()


async def test_runs_of_all_weights_take_turns_in_memory(service: Service):
    """One is there at a time; it stays till it has a folder, and comes back with all that it had learned."""
    async with service.asked() as http:
        client = await Client(http).begin()
        one, other, lora = [await client.model(n, rank=rank) for n, rank in enumerate((0, 0, 4))]
        service.runs.hold.clear()
        asked = [await client.passed(lora, 1)]
        for seq in range(1, 2 * live_models.KEEP_EVERY + 1, 2):
            for model in (one, other):
                asked += [await client.passed(model, seq, 2.0), await client.step(model, seq + 1)]
        service.runs.hold.set()
        for each in asked:
            await client.result(each)
        weights, calls = dict(service.runs.weights), service.runs.calls
        assert {*weights} in ({one, lora}, {other, lora})
        # Each is made when it begins, and twice for its steps: these and as many again make two folders.
        made = [name for what, name, *_ in calls if what == "create" and name != lora]
        assert len(made) <= 2 + 4
        steps = [name for what, name, *_ in calls if what == "optim_step"]
        assert steps.count(one) == steps.count(other) == live_models.KEEP_EVERY
        found = [
            (await client.result(await client.passed(model, 33, 0.0)))["loss:sum"] for model in (one, other)
        ]
        assert len({*found}) == 1
    service.full = 0
    async with service.asked() as http:
        client.http = http
        refused = await client.result(await client.step(one, 34))
        assert (
            refused["category"] == "user" and "rank 0: this server trains adapters alone" in refused["error"]
        )
        assert (await client.result(await client.passed(lora, 2))) == {"loss:sum": 2.0}
