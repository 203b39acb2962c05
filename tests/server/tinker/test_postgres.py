"""What is different with PostgreSQL: addresses, a server that is killed, texts that it cannot hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.errors import ConfigError
from silva.server.tinker.futures import Futures
from silva.server.tinker.postgres import check_url
from silva.server.tinker.tables import DatabaseFault, Tables

pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:secret@host/db", "got a password"),
        ("postgresql:///db?password=secret", "got a password"),
        ("mysql://host/db", "got 'mysql://host/db'"),
        ("tinker.sqlite", "got 'tinker.sqlite'"),
        ("postgresql://[host/db", "expected postgresql://USER@HOST:PORT/NAME"),
    ],
)
def test_addresses_that_are_refused(url: str, said: str):
    with pytest.raises(ConfigError) as refused:
        check_url(url)
    assert said in str(refused.value) and "secret" not in str(refused.value)


def test_nobody_at_the_address_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^--database: [^\n]*No such file"):
        Tables(f"postgresql:///db?host={tmp_path}")


@pytest.mark.slow
def test_tables_of_another_version_are_refused(postgres: PostgresServer):
    import psycopg

    url = postgres.database()
    Tables(url)._db.close()
    Tables(url)._db.close()
    with psycopg.connect(url) as db:
        db.execute("UPDATE about SET version = 99")
    with pytest.raises(ConfigError, match="got version 99 of the tables"):
        Tables(url)


@pytest.mark.slow
async def test_a_server_goes_on_after_a_lost_connection_unless_another_had_the_database(
    postgres: PostgresServer,
):
    """Its models in memory would be others than those of the tables."""
    url = postgres.database()
    one = Tables(url)
    one._db.close()
    assert (await one.row("SELECT 1 AS n"))["n"] == 1  # type: ignore[index]
    one._db.close()
    other = Tables(url)
    await other.close()
    for _ in range(2):
        with pytest.raises(DatabaseFault, match="another server has used this database"):
            await one.row("SELECT 1")
    again = Tables(url)  # it holds no lock
    await again.close()


@pytest.mark.slow
def test_what_is_answered_is_durable_though_the_database_is_told_not_to_wait(postgres: PostgresServer):
    import psycopg

    url = postgres.database()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"ALTER DATABASE {db.info.dbname} SET synchronous_commit = off")
    tables = Tables(url)
    (found,) = tables._db.execute("SHOW synchronous_commit").fetchone()
    tables._db.close()
    assert found == "on"


@pytest.mark.slow
async def test_a_database_that_is_killed_loses_no_step_and_makes_none_twice(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Futures.answer, "__defaults__", (0.1,))  # seconds of a poll
    service = Service(tmp_path, postgres.database())
    async with service.asked() as http:
        client = await Client(http).begin()
        model, weight, seq = await client.model(), 0.0, 1

        async def surely(ask):
            """As the SDK does: what the server could not do is asked again."""
            while (answer := await ask()).status_code >= 500:
                await asyncio.sleep(0.02)
            return answer

        for n in range(4):
            one, two = seq, seq + 1
            passed = await surely(lambda: client.passed(model, one, 2.0))  # noqa: B023
            if n % 2:
                service.runs.hold.clear()  # it is killed in the middle of a pass
            stepped = await surely(lambda: client.step(model, two, 0.5))  # noqa: B023
            await asyncio.to_thread(postgres.kill)
            service.runs.hold.set()
            await asyncio.to_thread(postgres.start)
            for each in (passed, stepped):
                asked = {"request_id": each.json()["request_id"]}
                while True:
                    found = await surely(lambda: client.post("/retrieve_future", **asked))  # noqa: B023
                    if b"try_again" not in found.content:
                        break
            assert found.json()["metrics"] == {"gradient:mean": 2.0}
            seq, weight = seq + 2, 0.9 * weight + 0.5 * 2.0
        assert service.runs.weights[model] == weight


@pytest.mark.slow
async def test_a_text_that_it_cannot_hold_breaks_nothing(postgres: PostgresServer, tmp_path: Path):
    service = Service(tmp_path, postgres.database())
    async with service.asked() as http:
        client = await Client(http).begin()
        assert (await client.post("/session_heartbeat", session_id="\0")).status_code == 404
        assert (await http.get("/training_runs/%00")).status_code == 404
        made = await client.post("/create_session", display_name="a\0b", user_metadata={"a": "\0%s?"})
        session = (await http.get(f"/sessions/{made.json()['session_id']}")).json()
        assert session["user_metadata"] == {"a": "\0%s?"}
        saved = await client.post("/save_weights", model_id=await client.model(), seq_id=1, path="a")
        await client.result(saved)
        page = (await client.post("/sessions/search", limit=1)).json()
        (newest,), cursor = page["sessions"], page["next_cursor"]
        rest = (await client.post("/sessions/search", limit=1, cursor=cursor)).json()["sessions"]
        names = [made.json()["session_id"], client.session]
        assert [each["session_id"] for each in (newest, *rest)] == names
        assert (rest[0]["checkpoints_count"], rest[0]["checkpoint_storage_bytes"] > 0) == (1, True)
    assert not service.lines
