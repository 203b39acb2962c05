"""Task folders of Harbor and of Terminal-Bench, read by us: Harbor's own package is not needed.

    harbor      task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh
    terminal    task.yaml                  Dockerfile              run-tests.sh   solution.sh        tests/

Harbor's test.sh writes its reward to /logs/verifier. Terminal-Bench's run-tests.sh runs pytest, whose summary
decides: 1 if at least one test ran and all passed.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silva.environments.foreign.library import finite, imported
from silva.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}  # a bare number is MiB
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s", re.MULTILINE)
KNOWN_KEYS = {
    "environment": {
        "docker_image", "cpus", "memory", "memory_mb", "allow_internet", "network_mode", "env", "workdir",
        "build_timeout_sec", "storage", "storage_mb",
    },
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env", "environment_mode"},
    "solution": set(),
}  # fmt: skip
"""Of task.toml. Storage is not limited; a longer time to build hurts nobody."""
PASSED = ("PASSED", "XFAIL", "SKIPPED")


@dataclass(frozen=True)
class HarborTask:
    """A folder.

    Attributes:
        image: of a registry; "" if `build` is built.
        build: folder with the Dockerfile, relative to `folder`; "" if there is none.
        test: the script that grades, relative to `folder`.
        solution: the script that solves it, relative to `folder`; "" if there is none.
        memory_mb: 0: no limit is declared.
    """

    folder: str
    kind: str  # harbor | terminal
    name: str
    instruction: str
    image: str
    build: str
    test: str
    solution: str
    agent_seconds: float
    verifier_seconds: float
    cpus: float
    memory_mb: int
    internet: bool
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""  # of commands and tests; "": the image's own


def read_tasks(path: str) -> list[HarborTask]:
    """The tasks in a folder: itself, or its folders, at any depth, in the order of their paths.

    Raises:
        ConfigError: there are none, or one is not of the format; it names file and key.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{path}: no such folder")
    found = [read_task(folder) for folder in _folders(root)]
    if not found:
        raise ConfigError(f"{path}: no folder with task.toml (Harbor) or task.yaml (Terminal-Bench) in it")
    return found


def read_task(folder: Path) -> HarborTask:
    harbor = (folder / "task.toml").exists()
    return _harbor(folder) if harbor else _terminal(folder)


def reward_of(task: HarborTask, files: Mapping[str, str], output: str, key: str = "reward") -> float:
    """What the tests say.

    Args:
        files: what stands in /logs/verifier, by name.
        output: of the test script.
        key: which of the named values of reward.json is the reward.

    Raises:
        ValueError: they say nothing: there is no result.
    """
    if task.kind == "terminal":
        outcomes = _OUTCOME.findall(output.rpartition("short test summary info")[2])
        if not outcomes:
            raise ValueError(f"{task.name}: {task.test} shows no summary of pytest: {output[-200:]!r}")
        return float(all(outcome in PASSED for outcome in outcomes) and "PASSED" in outcomes)
    if "reward.json" in files:
        try:
            values = json.loads(files["reward.json"])
        except ValueError as error:
            raise ValueError(f"{task.name}: reward.json: {error}") from None
        if not isinstance(values, dict) or key not in values:
            raise ValueError(f"{task.name}: reward.json: got {str(values)[:100]}, expected {key!r} in it")
        return finite(values[key], f"{task.name}: reward.json")
    if "reward.txt" in files:
        text = files["reward.txt"].strip()
        try:
            return finite(float(text), f"{task.name}: reward.txt")
        except ValueError:
            raise ValueError(f"{task.name}: reward.txt: got {text!r}, expected a finite number") from None
    raise ValueError(f"{task.name}: {task.test} wrote no reward to /logs/verifier: {output[-200:]!r}")


def _folders(root: Path) -> Iterator[Path]:
    if (root / "task.toml").exists() or (root / "task.yaml").exists():
        yield root
        return
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        yield from _folders(folder)


def _harbor(folder: Path) -> HarborTask:
    file = folder / "task.toml"
    try:
        told = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    box, agent, verifier = (_table(file, told, key) for key in ("environment", "agent", "verifier"))
    _refuse_what_matters(file, told)
    if verifier.get("environment_mode", "shared") != "shared":
        raise ConfigError(f"{file}: verifier.environment_mode: got a separate box, expected a shared one")
    build = "environment" if (folder / "environment" / "Dockerfile").exists() else ""
    image = str(box.get("docker_image") or "")
    if not build and not image:
        raise ConfigError(f"{file}: expected environment.docker_image, or environment/Dockerfile beside it")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise ConfigError(
            f"{folder}/environment/docker-compose.yaml: tasks of several containers cannot be run"
        )
    return HarborTask(
        folder=str(folder),
        kind="harbor",
        name=str(_table(file, told, "task").get("name") or folder.name),
        instruction=_text(folder, "instruction.md"),
        image=image,
        build="" if image else build,
        test=_there(folder, "tests/test.sh"),
        solution="solution/solve.sh" if (folder / "solution" / "solve.sh").exists() else "",
        agent_seconds=_number(file, "agent.timeout_sec", agent.get("timeout_sec", 600.0)),
        verifier_seconds=_number(file, "verifier.timeout_sec", verifier.get("timeout_sec", 600.0)),
        cpus=_number(file, "environment.cpus", box.get("cpus", 1)),
        memory_mb=_mib(file, "environment.memory", box.get("memory_mb", box.get("memory", 0))),
        internet=box.get("allow_internet", True) is True and box.get("network_mode") != "no-network",
        variables=_variables(file, box.get("env", {})),
        verifier_variables=_variables(file, verifier.get("env", {})),
        workdir=str(box.get("workdir") or ""),
    )


def _refuse_what_matters(file: Path, told: Mapping[str, Any]) -> None:
    """Keys that are read, and those that only describe a task, may stand in its tables. Others change it."""
    for table, known in KNOWN_KEYS.items():
        for key, value in _table(file, told, table).items():
            if key not in known and value not in (None, "", 0, False, [], {}):
                raise ConfigError(f"{file}: {table}.{key}: got {str(value)[:80]}; Silva has none for a task")


def _terminal(folder: Path) -> HarborTask:
    yaml = imported("yaml", "harbor", "pyyaml")
    file = folder / "task.yaml"
    try:
        told = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(told, dict) or not isinstance(told.get("instruction"), str):
        raise ConfigError(f"{file}: instruction: expected a text")
    _there(folder, "Dockerfile")
    return HarborTask(
        folder=str(folder),
        kind="terminal",
        name=folder.name,
        instruction=told["instruction"].strip(),
        image="",
        build=".",
        test=_there(folder, "run-tests.sh"),
        solution="solution.sh" if (folder / "solution.sh").exists() else "",
        agent_seconds=_number(file, "max_agent_timeout_sec", told.get("max_agent_timeout_sec", 600.0)),
        verifier_seconds=_number(file, "max_test_timeout_sec", told.get("max_test_timeout_sec", 600.0)),
        cpus=1.0,
        memory_mb=0,
        internet=True,
    )


def _table(file: Path, told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = told.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {key}: got {value!r}, expected a table")
    return value


def _number(file: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{file}: {key}: got {value!r}, expected a number above 0")
    return float(value)


def _mib(file: Path, key: str, value: Any) -> int:
    found = _SIZE.fullmatch(str(value).strip())
    if found is None or isinstance(value, bool):
        raise ConfigError(f"{file}: {key}: got {value!r}, expected MiB or a size such as 4G")
    return round(float(found[1]) * _MIB[found[2].upper()])


def _variables(file: Path, value: Any) -> dict[str, str]:
    """Those with a value; a template such as "${KEY}" would hand out the environment of this process."""
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: env: got {value!r}, expected a table")
    for name, each in value.items():
        if not isinstance(each, str) or "${" in each:
            raise ConfigError(f"{file}: env.{name}: got {each!r}, expected a text without ${{...}}")
    return dict(value)


def _text(folder: Path, name: str) -> str:
    text = (folder / _there(folder, name)).read_text("utf-8").strip()
    if not text:
        raise ConfigError(f"{folder / name}: it is empty")
    return text


def _there(folder: Path, name: str) -> str:
    if not (folder / name).is_file():
        raise ConfigError(f"{folder / name}: no such file")
    return name
