"""A run whose parts are Ray actors ends as one in a single process, whoever of them is killed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import ray_cluster
from tests.runs import Server, differences, end_state, write_config
from tests.sockets import LOOPBACK, listening

from silva.placement.ray import PART

from supervised_run import supervised, wait_for  # isort: skip (beside runs, whose folder tests.runs has put on the path)

LIMIT = 600.0  # seconds for one run, on a machine with ten times as much work as it can do
SOON = 10.0  # seconds after which nothing of a run may be left
SHORT = ("--steps=2", "--eval.every=2", "--eval.tasks=4", "--checkpoint.every=1")
SLOW = ("--environments.0.delay=200", "--environments.1.delay=200")  # changes no number
WORKERS = ("--environments.0.workers=2", "--environments.0.delay=20", SLOW[1])  # one call at a time
REST = """
import json, ray
from ray.util import list_named_actors, placement_group_table
ray.init(address="auto", log_to_driver=False)
groups = {group["state"] for group in placement_group_table().values()}
print(json.dumps([list_named_actors(True), sorted(groups), ray.available_resources()["CPU"]]))
"""
NOTHING = [[], ["REMOVED"], ray_cluster.CPUS]
"""What `rest` says of a cluster that has been given back."""
pytestmark = [*ray_cluster.NEEDS_RAY, pytest.mark.same_bits]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ray")
    write_config(made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """The end state of the run in one process."""
    server = Server(folder)
    ended = server.rl("local", *SHORT)
    server.close()
    assert ended.status == 0, ended.output
    return end_state(ended.path)


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, str]]:
    """The environment of those who may use a cluster that runs already."""
    with ray_cluster.cluster() as env:
        yield env


class Run:
    """A command line, and how the processes of its actors are found, whose cluster it may be."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.path, self.mark = folder / name, f"ACTOR_OF={secrets.token_hex(8)}"
        own = ["--name", name, "--output_dir", str(folder), "--placement.type=ray", "--placement.threads=1"]
        marked = f"--placement.env_vars.{self.mark}"
        self.argv = ["rl", f"@{folder / 'run.toml'}", *own, marked, *SHORT, *options]

    def sealed(self) -> int:
        ledger = self.path / "ledger.jsonl"
        return ledger.read_text().count('"sealed"') if ledger.exists() else 0

    def actors(self) -> dict[str, int]:
        return {name: pid for pid, name in self.processes().items() if name}

    def processes(self) -> dict[int, str]:
        """Actors, and with no name what they have started."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = dict(e.partition("=")[::2] for e in file.read_bytes().decode().split("\0"))
            except (OSError, UnicodeDecodeError):
                continue
            key, _, value = self.mark.partition("=")
            if environ.get(key) == value:
                found[int(file.parent.name)] = environ.get(PART, "").partition("@")[0]
        return found


def rest(given: dict[str, str]) -> Any:
    """Names of actors, states of placement groups and free cores of a cluster."""
    argv = [sys.executable, "-c", REST]
    done = subprocess.run(argv, env={**os.environ, **given}, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_on_a_cluster_of_its_own_is_the_run_in_one_process_bit_for_bit(
    folder: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    needs = "--placement.worker_needs.CPU=40"  # more than there are: its parts share those of this machine
    run = Run(folder, "own", f"--placement.working_dir={tmp_path}", needs, *WORKERS)
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        with supervised(run.argv, {"TMPDIR": temporary}) as process:
            assert wait_for(lambda: run.sealed() or process.process.poll() is not None, LIMIT)
            (private,) = Path(temporary).glob("silva-ray-*")
            assert private.stat().st_mode & 0o777 == 0o700
            assert (private / "token").stat().st_mode & 0o777 == 0o600
            actors = run.actors()
            assert {*actors} == {"trainer", "inference", "worker", "worker1"}, process.output
            assert {*actors.values()} < {*process.alive()}
            for pid in run.processes():
                assert "working_dir_files" in os.readlink(f"/proc/{pid}/cwd")
            priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in actors.values()}
            assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}
            assert listening(process.alive()) <= LOOPBACK
            assert process.wait(LIMIT) == 0, process.output
            assert process.left() == []
        assert [*Path(temporary).glob("silva-*")] == []
    assert differences(run.path, reference) == []
    assert process.said("silva: ") is None  # nobody was lost
    assert "inference: weights: version 1" in (run.path / "services.log").read_text()


def test_a_trainer_and_workers_that_are_killed_or_stopped_and_a_server_that_is_stopped_change_nothing(
    folder: Path, reference: dict[str, Any], given: dict[str, str]
) -> None:
    run = Run(folder, "faults", "--placement.address=auto", *WORKERS)
    with supervised(run.argv, given) as process:
        assert wait_for(lambda: run.sealed() or process.process.poll() is not None, LIMIT)
        before = run.actors()
        assert {*before} == {"trainer", "inference", "worker", "worker1"}, process.output
        assert [*run.processes().values()].count("") == 2  # which play the episodes
        os.kill(before["worker"], signal.SIGKILL)
        os.kill(before["worker1"], signal.SIGSTOP)
        for name in ("worker", "worker1"):
            assert wait_for(lambda name=name: run.actors().get(name, before[name]) != before[name], LIMIT)  # type: ignore[misc]
        os.kill(run.actors()["trainer"], signal.SIGKILL)
        assert wait_for(lambda: process.said("silva: trainer has died"), LIMIT), process.output
        os.kill(run.actors()["inference"], signal.SIGSTOP)
        assert process.wait(LIMIT) == 0, process.output
        assert wait_for(lambda: not run.processes(), SOON)
        assert process.left() == []
    assert process.said("silva: inference has not answered for 4 s: it is started again"), process.output
    assert process.said("the run goes on from its last checkpoint")
    assert process.said("a worker of parity is lost (no sign of life for 4 s)"), process.output
    assert differences(run.path, reference) == []
    assert rest(given) == NOTHING


def test_ranks_of_a_trainer_are_those_of_one_machine_and_end_together(
    folder: Path, given: dict[str, str]
) -> None:
    two = ["--trainer.ranks=2", "--placement.type=services"]
    plain = [word for word in Run(folder, "services").argv if not word.startswith("--placement.type")]
    with supervised([*(w for w in plain if "env_vars" not in w), *two]) as process:
        assert process.wait(LIMIT) == 0, process.output
    run = Run(folder, "ranks", "--placement.address=auto", "--trainer.ranks=2", *SLOW)
    with supervised(run.argv, given) as process:
        assert wait_for(lambda: run.sealed() or process.process.poll() is not None, LIMIT)
        actors = run.actors()
        assert {*actors} == {"trainer", "trainer1", "inference"}, process.output
        os.kill(actors["trainer1"], signal.SIGKILL)
        assert process.wait(LIMIT) == 0, process.output
    assert process.said("silva: trainer has died"), process.output
    assert differences(run.path, end_state(folder / "services")) == []
    assert rest(given) == NOTHING


def test_a_trainer_and_a_worker_whose_node_dies_go_on_at_another(
    folder: Path, reference: dict[str, Any], given: dict[str, str]
) -> None:
    needs = ["--placement.trainer_needs.large=0.5", "--placement.worker_needs.large=0.25"]
    run = Run(folder, "node", "--placement.address=auto", *needs, *WORKERS)
    large = {"large": 1.0}
    with ray_cluster.node(given, large) as one, ray_cluster.node(given, large) as other:
        with supervised(run.argv, given) as process:
            assert wait_for(lambda: run.sealed() or process.process.poll() is not None, LIMIT)
            below = {os.getpgid(one.pid): one, os.getpgid(other.pid): other}
            (node,) = {os.getsid(run.actors()[name]) for name in ("trainer", "worker", "worker1")}
            ray_cluster.kill(below[node].pid)
            assert process.wait(LIMIT) == 0, process.output
        assert process.said("silva: trainer has died"), process.output
        assert differences(run.path, reference) == []


def test_nothing_is_left_of_a_command_that_is_killed_and_the_run_goes_on_elsewhere(
    folder: Path, reference: dict[str, Any], given: dict[str, str]
) -> None:
    run = Run(folder, "killed", f"--placement.address={given['RAY_ADDRESS']}", *WORKERS)
    with supervised(run.argv, given) as process:
        assert wait_for(lambda: run.sealed() or process.process.poll() is not None, LIMIT)
        for name in ("trainer", "worker"):
            os.kill(run.actors()[name], signal.SIGSTOP)  # as they may be at that moment
        process.process.kill()
        assert wait_for(lambda: not run.processes(), SOON)
        assert process.left() == []
    elsewhere = [word for word in run.argv if not word.startswith("--placement.")]
    with supervised([*elsewhere, "--resume", "--placement.threads=1"]) as process:
        assert process.wait(LIMIT) == 0, process.output
    assert differences(run.path, reference) == []
    assert rest(given) == NOTHING


def test_parts_that_do_not_fit_are_refused_with_what_is_missing(folder: Path, given: dict[str, str]) -> None:
    needs = ["--placement.address=auto", "--placement.trainer_needs.GPU=2", "--placement.patience=0.5"]
    with supervised(Run(folder, "large", *needs, *WORKERS).argv, given) as process:
        assert process.wait(LIMIT) == 2
    assert process.said("Asked: CPU 3, GPU 2", "worker1 CPU 1"), process.output
    assert process.said("trainer needs GPU 2 on one node, and no node has more than 0"), process.output
    assert not (folder / "large").exists()
    assert rest(given) == NOTHING
