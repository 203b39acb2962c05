"""Processes that are started, watched and started again: with small ones that compute nothing."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.placement.processes import Park, end_of, failure, lives

from silva.errors import SilvaError
from silva.placement import supervisor
from silva.placement.supervisor import Part, Supervisor, line_writer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers")]


async def test_a_part_gets_its_environment_and_the_key_opens_it(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.key")
    parts = park.parts(env={"GIVEN": "a word"})
    async with park.supervised(parts=parts, key="k"):
        await park.until(lambda: park.up, "it has answered")
    assert park.lines == ["trainer: trainer begins a word"]


async def test_a_killed_part_is_started_again_and_named(folder: Path) -> None:
    park = Park(folder, "trainer", "inference")
    async with park.supervised():
        await park.until(lambda: park.up, "all is up")
        os.kill(park.pids("inference")[0], signal.SIGABRT)
        await park.until_said("inference was killed (SIGABRT): it is started again")
        await park.until(lambda: len(park.pids("inference")) == 2, "it runs again")
    assert len(park.said) == 1 and len(park.pids("trainer")) == 1 and len(park.pids("orchestrator")) == 1


async def test_a_stopped_part_is_noticed_at_once_and_started_again(folder: Path) -> None:
    park = Park(folder)
    async with park.supervised():
        await park.until(lambda: park.up, "all is up")
        (first,) = park.pids("trainer")
        os.kill(first, signal.SIGSTOP)
        await park.until_said("trainer was stopped (SIGSTOP): it is started again")
        alive = lives(first)
        await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
    assert not alive


async def test_a_part_that_does_not_answer_is_killed_and_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DEAD_AFTER", 1.0)
    monkeypatch.setattr(supervisor, "CHECK", 0.1)
    park = Park(folder)
    async with park.supervised():
        await park.until(lambda: park.up, "all is up")
        (first,) = park.pids("trainer")
        park.touch("trainer.hangs")
        seconds = await park.until_said("trainer has not answered for", "s: it is started again")
        (folder / "trainer.hangs").unlink()
        alive = lives(first)
        await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
    assert seconds > 0.5 and not alive


async def test_a_part_whose_core_hangs_is_started_again_though_its_server_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CHECK", 0.05)
    park = Park(folder)
    async with park.supervised(parts=park.parts(core="/core", core_patience=0.5)):
        await park.until(lambda: park.up, "all is up")
        began = time.monotonic()
        await park.until(lambda: time.monotonic() > began + 0.7, "it computes for longer than it may hang")
        assert park.said == []
        (first,) = park.pids("trainer")
        park.touch("trainer.core")
        await park.until_said("trainer answers, but what computes in it has not for 0.5 s (/core)")
        (folder / "trainer.core").unlink()
        alive = lives(first)
        await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
    assert not alive


async def test_an_orchestrator_that_dies_slowly_is_not_started_again_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives long enough to count as begun, and dies; with a new checkpoint the count begins again."""
    monkeypatch.setattr(supervisor, "SHORT", 0.0)
    monkeypatch.setattr(supervisor, "MOST_LOSSES", 3)
    park, steps = Park(folder), [0]

    async def dies(count: int) -> None:
        for _ in range(count):
            said, begun = len(park.said), len(park.pids("orchestrator"))
            os.kill(park.pids("orchestrator")[-1], signal.SIGKILL)
            await park.until(lambda said=said: len(park.said) > said, "it is started again")
            await park.until(lambda n=begun: len(park.pids("orchestrator")) > n, "it runs")

    async with park.supervised(checkpoints=lambda: list(steps)) as task:
        await park.until(lambda: park.up, "all is up")
        await dies(2)
        steps.append(1)
        await dies(2)
        os.kill(park.pids("orchestrator")[-1], signal.SIGKILL)
        with pytest.raises(
            SilvaError, match=r"orchestrator was killed \(SIGKILL\), lost 3 times without a new"
        ):
            await end_of(task)
    assert len(park.pids("orchestrator")) == 5


async def test_a_part_that_has_not_answered_yet_is_left_in_peace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model takes longer than an answer may take."""
    monkeypatch.setattr(supervisor, "DEAD_AFTER", 0.2)
    monkeypatch.setattr(supervisor, "CHECK", 0.05)
    park = Park(folder)
    park.touch("trainer.hangs")
    async with park.supervised():
        await park.until(lambda: park.pids("trainer") and park.pids("orchestrator"), "both have begun")
        began = time.monotonic()
        await park.until(lambda: time.monotonic() > began + 1.0, "some times DEAD_AFTER")
    assert park.said == [] and len(park.pids("trainer")) == 1


async def test_a_part_that_fails_at_its_start_ends_everything_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SHORT", 0.0)  # a start that takes long and fails counts too
    park = Park(folder, "trainer", "inference")
    park.touch("trainer.fails")

    first, *lines = (await failure(park)).splitlines()
    assert first == "trainer ended with exit code 3; its last lines:"
    assert [line.strip() for line in lines] == ["trainer begins", "the last line"]
    assert len(park.pids("trainer")) == supervisor.MOST_FAILURES
    assert [text for _, text in park.said] == ["trainer ended with exit code 3: it is started again"] * 2


async def lose(park: Park, count: int) -> None:
    """Kill the trainer so many times, each time after it has answered."""
    for _ in range(count):
        said = len(park.said)
        await kill(park)
        await park.until(lambda said=said: len(park.said) > said, "it is started again")


async def kill(park: Park) -> None:
    await park.until(lambda: (park.folder / "trainer.asked").exists(), "it answers")
    os.kill(park.pids("trainer")[-1], signal.SIGKILL)
    (park.folder / "trainer.asked").unlink()


async def test_a_part_may_be_lost_again_and_again_as_long_as_the_run_gets_further(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MOST_LOSSES", 4)
    park, steps = Park(folder), [0]
    async with park.supervised(checkpoints=lambda: list(steps)) as task:
        await lose(park, 3)
        steps.append(1)
        await lose(park, 3)
        assert not task.done()
        await kill(park)
        with pytest.raises(SilvaError, match=r"SIGKILL\), lost 4 times without a new checkpoint; its last"):
            await end_of(task)
    assert [text for _, text in park.said] == ["trainer was killed (SIGKILL): it is started again"] * 6


async def test_a_command_that_does_not_exist_says_so(folder: Path) -> None:
    parts = [Part("trainer", [str(folder / "no")], address=f"unix:{folder}/t.sock")]
    with pytest.raises(FileNotFoundError):
        await Supervisor(parts, log=lambda line: None, say=lambda text: None).run()


async def test_a_line_without_an_end_does_not_stop_its_part(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.long")
    async with park.supervised():
        await park.until(lambda: park.up, "it goes on behind the line")
        await park.until(
            lambda: any(line.endswith("after it") for line in park.lines), "what follows is read"
        )
    assert park.said == []


async def test_an_orchestrator_that_is_killed_starts_again_and_goes_on(folder: Path) -> None:
    park = Park(folder)
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        await park.until(lambda: len(park.pids("orchestrator")) == 2, "it runs again")
        await park.until(lambda: len(park.text("arguments").splitlines()) == 2, "it says how")
        park.end(3)
        assert await end_of(task) == 3
    assert park.text("arguments").splitlines() == ["first 1", "again -"]  # `once` is for the first start
    assert [text for _, text in park.said] == ["orchestrator was killed (SIGKILL): it is started again"]
    assert len(park.pids("trainer")) == 1


async def test_an_orchestrator_that_does_not_last_ends_everything_when_it_is_killed(folder: Path) -> None:
    park = Park(folder)
    *services, orchestrator = park.parts()
    async with park.supervised(parts=[*services, replace(orchestrator, lasting=False)]) as task:
        await park.until(lambda: park.up, "all is up")
        os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        assert await end_of(task) == 128 + signal.SIGKILL
    assert [text for _, text in park.said] == ["orchestrator was killed (SIGKILL): it is not started again"]


@pytest.mark.parametrize(
    ("short", "count", "said"),
    [(supervisor.SHORT, supervisor.MOST_FAILURES, ""), (0.0, 4, "lost 4 times without a new checkpoint")],
    ids=["at every start", "late, again and again"],
)
async def test_an_orchestrator_that_always_dies_ends_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, short: float, count: int, said: str
) -> None:
    monkeypatch.setattr(supervisor, "SHORT", short)
    monkeypatch.setattr(supervisor, "MOST_LOSSES", 4)
    park = Park(folder)
    park.touch("dies")

    words = await failure(park, checkpoints=lambda: [2])
    assert words.startswith("orchestrator was killed (SIGKILL)") and said in words
    assert len(park.pids("orchestrator")) == count


async def test_a_stopped_orchestrator_is_left_as_it_is(folder: Path) -> None:
    """Somebody wanted that, and may want it to go on."""
    park = Park(folder)
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        (pid,) = park.pids("orchestrator")
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        await park.until(lambda: time.monotonic() > began + 5 * supervisor.TICK, "some ticks")
        os.kill(pid, signal.SIGCONT)
        park.end(5)
        assert await end_of(task) == 5
    assert park.said == [] and len(park.pids("orchestrator")) == 1


def test_lines_wait_until_the_run_has_begun(tmp_path: Path) -> None:
    ready = tmp_path / "run" / "ledger.jsonl"
    write = line_writer(tmp_path / "run" / "services.log", ready.exists)
    write("trainer: one")
    write("trainer: zwölf")
    assert not ready.parent.exists()  # a folder that is not empty and no run would be refused
    ready.parent.mkdir()
    ready.touch()
    write("trainer: three")
    assert (ready.parent / "services.log").read_text() == "trainer: one\ntrainer: zwölf\ntrainer: three\n"
    write("four")
    assert (ready.parent / "services.log").read_text() == "".join(
        f"{line}\n" for line in ("trainer: one", "trainer: zwölf", "trainer: three", "four")
    )
