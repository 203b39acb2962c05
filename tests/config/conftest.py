import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that registries can name config_test_worlds

from silva.config.load import Resolved, load
from silva.config.schema import Registries
from silva.errors import ConfigError
from silva.placement import PLACEMENTS
from silva.trainer import TRAINERS

WORLDS = "config_test_worlds"


@pytest.fixture
def registries() -> Registries:
    return Registries(
        environments={"toy": f"{WORLDS}:Toy", "grid": f"{WORLDS}:Grid"},
        rollouts={"branching": f"{WORLDS}:Branching", "linear": f"{WORLDS}:Linear"},
        algorithms={"reinforce": f"{WORLDS}:Reinforce", "grpo": f"{WORLDS}:Grpo"},
        engines={"local": f"{WORLDS}:Local"},
        trainers=TRAINERS,
        placements=PLACEMENTS,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder: write("a.toml", "...")."""

    def writer(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return writer


@pytest.fixture
def resolve(tmp_path: Path, registries: Registries) -> Callable[..., Resolved]:
    """Load a command line in the test's folder, with only the given variables."""

    def resolver(line: str | list[str], **env: str) -> Resolved:
        argv = line.split() if isinstance(line, str) else line
        return load(argv, registries, env=env, cwd=tmp_path)

    return resolver


@pytest.fixture
def refuse(tmp_path: Path, resolve: Callable[..., Resolved]) -> Callable[..., str]:
    """The message of a command line that must be refused; the test's folder reads as DIR."""

    def refuser(line: str | list[str], **env: str) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve(line, **env)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(str(tmp_path.resolve()), "DIR")

    return refuser
