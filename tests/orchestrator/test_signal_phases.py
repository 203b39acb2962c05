"""Every signal in every phase of a run: how it ends, and what is left to go on from (docs/services.md)."""

import signal
from typing import Any, NamedTuple

import pytest
from tests.runs import Ended, differences, end_state

from silva.storage.checkpoints import CheckpointStore

# A warm start of three steps, a checkpoint of it, an evaluation, one step, an evaluation, a checkpoint.
OPTIONS = (
    "--warm_start.steps=3", "--warm_start.episodes_per_step=4", "--warm_start.mistakes=0.2",
    "--steps=1", "--eval.every=1", "--eval.tasks=4", "--checkpoint.every=1",
)  # fmt: skip


class Phase(NamedTuple):
    """`place`: of benchmarks/runs.py. The steps of the checkpoints that are left: after one signal, after two
    of them, after SIGKILL."""

    place: str
    once: list[int]
    twice: list[int]
    killed: list[int]


PHASES = {
    "start": Phase("load:1", [], [], []),
    "warm start": Phase("warm_start:6", [], [], []),
    "first evaluation": Phase("eval:3", [0], [0], [0]),
    "rollout": Phase("rollout:3", [0], [0], [0]),
    "issue": Phase("issue:1", [0], [0], [0]),
    "update": Phase("optim:4", [0, 1], [0], [0]),
    "evaluation": Phase("eval:11", [0, 1], [0], [0]),
    "save": Phase("checkpoint_file:7", [0, 1], [0, 1], [0]),
    "export": Phase("export:1", [0, 1], [0, 1], [0, 1]),
}
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, Any]:
    ended = server.rl("undisturbed", *OPTIONS)
    assert ended.status == 0, ended.output
    return end_state(ended.path)


def left(ended: Ended) -> list[int]:
    store = CheckpointStore(ended.path / "checkpoints", read_only=True)
    whole = [newest[0]] if (newest := store.newest()) else []
    assert whole == store.steps()[-1:] and store.skipped == []
    return store.steps()


def told(server, folder, phase: str, number: int, signals: int = 1) -> Ended:
    place = PHASES[phase].place
    ended = server.rl(
        "run", *OPTIONS, into=folder, interrupt=place, signals=signals, signal=signal.Signals(number).name
    )
    assert ended.proof == place.partition(":")[0], ended.output
    return ended


def goes_on(server, folder, undisturbed, phase: str) -> None:
    """To the end of a run that was left alone."""
    ended = server.rl("run", *OPTIONS, "--resume", into=folder)
    assert ended.status == 0, ended.output
    assert ("supervised steps" in ended.output) == (phase in ("start", "warm start"))
    assert differences(ended.path, undisturbed) == []


@pytest.mark.parametrize(("phase", "number"), [(p, ASKED[i % 3]) for i, p in enumerate(PHASES)])
def test_the_first_ends_a_run_where_it_can_go_on(server, undisturbed, tmp_path, phase, number):
    """The three do the same: tests/orchestrator/test_interrupt.py."""
    ended = told(server, tmp_path, phase, number)
    assert ended.status == 130 and ended.resumable(), ended.output
    assert ("begins the warm start again" in ended.output) == (phase == "warm start")
    assert left(ended) == PHASES[phase].once
    goes_on(server, tmp_path, undisturbed, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_the_second_ends_it_at_once(server, tmp_path, phase):
    ended = told(server, tmp_path, phase, signal.SIGINT, signals=2)
    assert ended.status == 130 and "Traceback" not in ended.output, ended.output
    assert left(ended) == PHASES[phase].twice


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_leaves_what_is_whole(server, undisturbed, tmp_path, phase):
    ended = told(server, tmp_path, phase, signal.SIGKILL)
    assert ended.status == -signal.SIGKILL and left(ended) == PHASES[phase].killed
    if phase in ("warm start", "update", "save"):  # elsewhere the folder is that of one signal, or of a start
        goes_on(server, tmp_path, undisturbed, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_is_stopped_and_continued_ends_as_if_nothing_had_been(
    server, undisturbed, tmp_path, phase
):
    ended = told(server, tmp_path, phase, signal.SIGSTOP)
    assert ended.status == 0 and differences(ended.path, undisturbed) == [], ended.output
