"""Task folders of Harbor and Terminal-Bench: read as they are, run by a program that stands in for Docker."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.environments.foreign.playing import call, fork_refused, played, texts

from silva.environments.check import checks as check_module
from silva.environments.foreign.docker import MOST_OUTPUT, Docker, DockerFault, owner
from silva.environments.foreign.harbor import Harbor
from silva.environments.foreign.harbor_tasks import HarborTask, read_task, read_tasks, reward_of
from silva.errors import CapabilityError, ConfigError
from silva.types import Message

pytestmark = pytest.mark.slow

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
env = { LEVEL = "3" }
[agent]
timeout_sec = 30.0
[environment]
cpus = 2
memory = "4G"
allow_internet = false
"""
TEST = """
mkdir -p /logs/verifier
if [ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, NAME" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def harbor_task(folder: Path, name: str = "world") -> Path:
    return write(folder, **{
        "task.toml": TOML,
        "instruction.md": f"Write 'Hello, {name}' to /app/hello.txt.\n",
        "environment__Dockerfile": "FROM alpine\nWORKDIR /app\n",
        "tests__test.sh": TEST.replace("NAME", name),
        "solution__solve.sh": f"echo 'Hello, {name}' > /app/hello.txt\n",
    })  # fmt: skip


def terminal_task(folder: Path) -> Path:
    return write(folder, **{
        "task.yaml": "instruction: |-\n  Say hello.\nmax_test_timeout_sec: 7\ndifficulty: easy\n",
        "Dockerfile": "FROM alpine\n",
        "run-tests.sh": "echo '=== short test summary info ==='; echo 'PASSED test_outputs.py::test_it'\n",
        "tests__test_outputs.py": "def test_it(): pass\n",
        "solution.sh": "true\n",
    })  # fmt: skip


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Puts the stand-in before everything else; what it was called with."""
    home, programs = tmp_path / "docker", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    stub = Path(__file__).parent / "docker_stub.py"
    (programs / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {stub} "$@"\n')
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STUB", str(home))
    return home


def calls(home: Path) -> list[list[str]]:
    return [json.loads(line) for line in (home / "calls.jsonl").read_text().splitlines()]


def bash(command: str) -> Message:
    return call("bash", command=command)


def settings(folder: Path, **keys) -> Harbor:
    for number in range(8):
        harbor_task(folder / f"task{number}", f"world {number}")
    return Harbor(path=str(folder), **{"eval_size": 1, "train_size": 4, "eval_share": 0.4, **keys})


def test_a_task_of_harbor_is_read(tmp_path) -> None:
    task = read_task(harbor_task(tmp_path / "hello"))
    assert (task.kind, task.name) == ("harbor", "hello")
    assert task.instruction == "Write 'Hello, world' to /app/hello.txt."
    assert (task.build, task.test, task.solution) == ("environment", "tests/test.sh", "solution/solve.sh")
    assert (task.cpus, task.memory_mb, task.internet) == (2.0, 4096, False)
    assert (task.agent_seconds, task.verifier_seconds) == (30.0, 20.0)
    assert task.verifier_variables == {"LEVEL": "3"}


def test_a_task_of_terminal_bench_is_read(tmp_path) -> None:
    task = read_task(terminal_task(tmp_path / "hello"))
    assert (task.kind, task.name, task.instruction) == ("terminal", "hello", "Say hello.")
    assert (task.build, task.test, task.solution) == (".", "run-tests.sh", "solution.sh")
    assert task.verifier_seconds == 7.0 and task.internet


def test_folders_are_found_at_any_depth_in_order(tmp_path) -> None:
    for name in ("b/two", "b/one", "a"):
        harbor_task(tmp_path / name)
    terminal_task(tmp_path / "c")
    write(tmp_path / ".git" / "x", **{"task.toml": "nonsense"})
    assert [task.name for task in read_tasks(str(tmp_path))] == ["a", "one", "two", "c"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("task.toml", "version = ", "task.toml: "),
        ("task.toml", "[agent]\ntimeout_sec = -1\n", "agent.timeout_sec: got -1, expected a number above 0"),
        ("task.toml", "[environment]\nmemory = 'much'\n", "environment.memory: got 'much'"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "expected a shared one"),
        ("task.toml", "[verifier]\nenv = { KEY = '${OPENAI_API_KEY}' }\n", "env.KEY"),
        ("task.toml", "agent = 3\n", "agent: got 3, expected a table"),
        ("task.toml", "[environment]\ngpus = 1\n", "environment.gpus: got 1; Silva has none"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'x'\n", "environment.mcp_servers: got"),
        ("task.toml", "[environment.healthcheck]\ncommand = 'x'\n", "environment.healthcheck: got"),
        ("task.toml", "[solution.env]\nKEY = 'x'\n", "solution.env: got"),
        ("task.toml", "[agent]\nuser = 'me'\n", "agent.user: got me"),
        ("instruction.md", " \n", "instruction.md: it is empty"),
        ("environment/docker-compose.yaml", "services: {}", "several containers"),
    ],
)
def test_what_is_wrong_with_a_task_is_named(tmp_path, file, text, words) -> None:
    folder = harbor_task(tmp_path / "hello")
    (folder / file).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tasks(str(tmp_path))
    assert words in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_missing_file_is_named(tmp_path, missing) -> None:
    (harbor_task(tmp_path / "hello") / missing).unlink()
    with pytest.raises(ConfigError, match=missing.rpartition("/")[2]):
        read_tasks(str(tmp_path))


def test_no_tasks(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_tasks(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no folder with task\.toml"):
        read_tasks(str(tmp_path))


def test_the_reward_of_harbor_stands_in_a_file(tmp_path) -> None:
    task = read_task(harbor_task(tmp_path))
    assert reward_of(task, {"reward.txt": " 0.5\n"}, "") == 0.5
    assert reward_of(task, {"reward.json": '{"reward": 1, "style": 0.2}', "reward.txt": "0"}, "") == 1.0
    assert reward_of(task, {"reward.json": '{"reward": 1, "style": 0.2}'}, "", "style") == 0.2
    wrong = ({}, {"reward.txt": ""}, {"reward.txt": "nan"}, {"reward.json": "[1]"}, {"reward.json": "{"})
    for files in wrong:
        with pytest.raises(ValueError):
            reward_of(task, files, "it crashed")


@given(st.lists(st.sampled_from(["PASSED", "FAILED", "ERROR", "SKIPPED"]), min_size=1))
def test_a_failing_test_is_never_worth_a_reward(outcomes) -> None:
    task = HarborTask("f", "terminal", "t", "i", "", ".", "run-tests.sh", "", 1.0, 1.0, 1.0, 0, True)
    lines = "\n".join(f"{outcome} tests/test_x.py::test_{i}" for i, outcome in enumerate(outcomes))
    output = f"PASSED fake\n=== short test summary info ===\n{lines}\n=== done ==="
    solved = "PASSED" in outcomes and not {"FAILED", "ERROR"} & set(outcomes)
    assert reward_of(task, {}, output) == float(solved)


def test_an_episode_from_the_container_to_the_reward(tmp_path, docker) -> None:
    first, steps = played(
        settings(tmp_path / "tasks"), bash("ls /tests; echo $HOME_OF_NOBODY; exit 3"), bash("pwd")
    )
    assert [spec.name for spec in first.tools] == ["bash"]
    said = texts(steps)
    assert "No such file" in said[0] and said[0].endswith("[exit status 3]")  # the tests are not there yet
    assert said[1].strip().endswith("/app")
    name = first.messages[0].content.split("'")[1]
    _, steps = played(settings(tmp_path / "tasks"), bash(f"echo '{name}' > /app/hello.txt"), "Done.")
    assert steps[-1].rewards == {"reward": 1.0} and steps[-1].metrics["success"] == 1.0
    _, steps = played(settings(tmp_path / "tasks"), "Done.")
    assert steps[-1].rewards == {"reward": 0.0} and steps[-1].metrics["success"] == 0.0
    run = next(each for each in calls(docker) if each[0] == "run")
    assert run[run.index("--network") + 1] == "none" and run[run.index("--memory") + 1] == "4096m"
    assert [each[0] for each in calls(docker)].count("rm") == 3 and not list(docker.glob("silva-*"))


def test_a_reward_that_the_policy_writes_itself_is_not_read(tmp_path, docker) -> None:
    cheat = (
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh"
    )
    _, steps = played(settings(tmp_path / "tasks"), bash(cheat), "Done.")
    assert steps[-1].rewards == {"reward": 0.0}


def test_the_expert_is_the_solution_and_nothing_is_wrong(tmp_path, docker, monkeypatch) -> None:
    monkeypatch.setattr(check_module, "NONSENSE", dict([*check_module.NONSENSE.items()][-2:]))
    monkeypatch.setattr(
        check_module, "SLOW", 1e9
    )  # the programs of this machine decide how long a step takes
    checks = check_module.examine(settings(tmp_path / "tasks", train_size=1))
    assert all(check.ok for check in checks), [check.findings for check in checks]
    assert next(check for check in checks if check.name == "expert").done == "succeeds in 1 of 1 episodes"


def test_a_task_of_terminal_bench_is_graded_by_its_summary(tmp_path, docker) -> None:
    for number in range(8):
        folder = terminal_task(tmp_path / f"task{number}")
        (folder / "task.yaml").write_text(f"instruction: Say hello {number} times.\n")
    chosen = Harbor(path=str(tmp_path), eval_size=1, train_size=4, eval_share=0.4)
    _, steps = played(chosen, "Done.")
    assert steps[-1].rewards == {"reward": 1.0}


@pytest.mark.parametrize("verb", ["build", "run", "cp"])
def test_docker_that_fails_gives_no_result(tmp_path, docker, monkeypatch, verb) -> None:
    monkeypatch.setenv("DOCKER_STUB_FAULT", verb)
    with pytest.raises(DockerFault, match=f"docker {verb}: exit status 1: 'the daemon is away"):
        played(settings(tmp_path / "tasks"), "Done.")
    assert not list(docker.glob("silva-*"))


def test_docker_that_gives_no_answer_is_not_waited_for_nor_are_its_children(tmp_path, docker) -> None:
    """A plugin, such as that of `docker build`, holds the output of the program that started it."""
    plugin = tmp_path / "plugin"
    (tmp_path / "bin" / "docker").write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {plugin}\nexec sleep 1000\n")
    machine = Docker(read_task(harbor_task(tmp_path / "hello")), internet=False)
    for seconds in (2, 60):  # a busy machine may need longer to start the plugin
        with pytest.raises(DockerFault, match=f"docker build: no answer after {seconds} s"):
            asyncio.run(machine._docker("build", seconds=seconds))
        if plugin.exists() and plugin.read_text().endswith("\n"):
            break
    os.kill(int(plugin.read_text()), signal.SIGKILL)


def test_a_daemon_that_does_not_answer_is_found_at_the_start(tmp_path, docker, monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_STUB_FAULT", "ps")
    with pytest.raises(ConfigError, match="environment harbor: docker ps: the daemon is away"):
        settings(tmp_path / "tasks").taskset()


def left(docker: Path, seconds: float = 120.0) -> list[str]:
    """Containers, once no stub runs any more and they have had so long to go: what removes those of a dead
    process may start late on a busy machine."""
    until = time.monotonic() + seconds
    with (docker / "running").open("a") as running:
        while True:
            try:
                fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = [path.name for path in docker.glob("silva-*")]
                if not found or time.monotonic() >= until:
                    return found
                fcntl.flock(running, fcntl.LOCK_UN)
            except BlockingIOError:
                assert time.monotonic() < until + 120, "a stub still runs"
            time.sleep(0.01)


PLAYS = """
import asyncio, sys
from pathlib import Path
from silva.environments.foreign.docker import Docker
from silva.environments.foreign.harbor_tasks import read_task

async def play(task):
    machine = Docker(read_task(task), internet=False)
    await machine.start()
    await machine.run("true", 5.0, {})
    await machine.put(task / "tests", "/tests")
    await machine.close()

asyncio.run(play(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("point", ["before run", "in run", "exec", "cp", "rm"])
def test_no_container_outlives_the_process_that_started_it(tmp_path, docker, monkeypatch, point) -> None:
    monkeypatch.setenv("DOCKER_STUB_KILLS", point)
    task = harbor_task(tmp_path / "hello")
    done = subprocess.run([sys.executable, "-c", PLAYS, str(task)], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert left(docker) == []


def test_a_start_that_is_cut_off_leaves_no_container(tmp_path, docker) -> None:
    """Whether the container is there already or not."""
    machine = Docker(read_task(harbor_task(tmp_path / "hello")), internet=False)

    async def play() -> None:
        starting = asyncio.create_task(machine.start())
        while machine._main is None:
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await machine.close()

    asyncio.run(play())
    assert [each[0] for each in calls(docker)] == ["build", "run", "rm"] and left(docker) == []


def test_of_a_long_output_the_end_is_read(tmp_path, docker) -> None:
    """There stands what pytest says last, such as which tests failed."""
    task = read_task(terminal_task(tmp_path / "long"))
    machine = Docker(task, internet=False)
    says = (
        "head -c 2000000 /dev/zero | tr '\\0' x; printf '\\nshort test summary info\\nPASSED a\\nFAILED b\\n'"
    )

    async def play() -> str:
        await machine.start()
        ran = await machine.run(says, 30.0, {})
        await machine.close()
        return ran.output

    output = asyncio.run(play())
    assert len(output) == MOST_OUTPUT and output.startswith("x") and output.endswith("FAILED b\n")
    assert reward_of(task, {}, output) == 0.0


def test_a_container_that_cannot_be_removed_is_told(tmp_path, docker, monkeypatch) -> None:
    machine = Docker(read_task(harbor_task(tmp_path / "hello")), internet=False)

    async def play() -> None:
        await machine.start()
        monkeypatch.setenv("DOCKER_STUB_FAULT", "rm")
        await machine.close()

    with pytest.raises(DockerFault, match=f"the container {machine.name} stays: 'the daemon is away"):
        asyncio.run(play())


def test_containers_of_the_dead_are_removed_at_the_start(tmp_path, docker) -> None:
    own, here = owner(), socket.gethostname()
    pid = own.split(":")[1]
    owners = {
        "alive": own,
        "reused": f"{here}:{pid}:1",
        "dead": f"{here}:{2**22 + 1}:5",
        "elsewhere": "far:1:1",
    }
    for name, who in owners.items():
        write(docker / f"silva-{name}", owner=who)
    settings(tmp_path / "tasks").taskset()
    assert sorted(left(docker, 0)) == ["silva-alive", "silva-elsewhere"]


def test_a_process_that_ended_and_was_not_waited_for_is_dead() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner(child.pid) == "" and owner() != ""
    child.wait()


@pytest.mark.parametrize("said", ["No such container: x", "removal of container x is already in progress"])
def test_a_container_that_ends_by_itself_meanwhile_stops_no_start(
    tmp_path, docker, monkeypatch, said
) -> None:
    write(docker / "silva-dead", owner=f"{socket.gethostname()}:{2**22 + 1}:5")
    monkeypatch.setenv("DOCKER_STUB_RM", f"Error response from daemon: {said}")
    settings(tmp_path / "tasks").taskset()
    monkeypatch.setenv("DOCKER_STUB_RM", "permission denied")
    with pytest.raises(ConfigError, match="environment harbor: docker rm: permission denied"):
        settings(tmp_path / "tasks").taskset()


def test_a_command_that_takes_too_long_is_stopped(tmp_path, docker, monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_STUB_LATE", "echo begun")
    _, steps = played(settings(tmp_path / "tasks", tool_timeout=7.0), bash("echo begun"))
    assert steps[0].observation.messages[0].content == "begun\n\n[stopped: it took too long]"
    limit = next(each for each in calls(docker) if each[0] == "exec")[2:-1]
    assert limit == ["timeout", "--kill-after=5", "7", "bash", "-c"]


def test_a_container_cannot_be_forked_and_docker_must_be_there(tmp_path, docker, monkeypatch) -> None:
    with pytest.raises(CapabilityError, match="cannot be forked"):
        fork_refused(settings(tmp_path / "tasks"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs the program docker"):
        settings(tmp_path / "more").taskset()
