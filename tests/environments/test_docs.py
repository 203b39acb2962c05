"""docs/environments.md: every block of code runs, and every world in it can be played and loaded."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from silva.config.load import load
from silva.config.plugins import find_settings
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import check_splits
from silva.protocols import Scripted
from silva.registries import REGISTRIES

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
BLOCKS = {
    re.findall(r"^class (\w+)\(\w*(?:ToolQA|Settings)\)", text, re.MULTILINE)[0]: text
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


def test_the_page_shows_a_world_of_each_kind() -> None:
    assert list(BLOCKS) == ["Towns", "Bank", "Treasure", "Colours"]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_shown_environment_works(name: str, tmp_path: Path, play_out) -> None:
    file = tmp_path / f"{name.lower()}.py"
    file.write_text(BLOCKS[name])
    found = find_settings(f"{file}:{name}", EnvironmentSettings)
    assert found is not None
    settings = found()
    taskset = settings.taskset()
    check_splits(taskset, settings.label)
    held_out = taskset.tasks("eval")
    assert settings.label == name and len(held_out) == settings.eval_size
    solved = 0.0
    for task in held_out:
        episode = taskset.environment(task)
        assert isinstance(episode, Scripted) and isinstance(episode.random_reply(3), str)
        solved += play_out(episode)[-1].metrics["success"]
    assert solved >= 0.8 * len(held_out)  # the fog may cost a game


def test_the_shown_configuration_loads(tmp_path: Path) -> None:
    (tmp_path / "towns.py").write_text(BLOCKS["Towns"])
    texts = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for text, workers in zip(texts[:2], (0, 2), strict=True):
        (tmp_path / "towns.toml").write_text(text)
        (world,) = load([f"@{tmp_path / 'towns.toml'}"], REGISTRIES, env={}, cwd=tmp_path).config.environments
        assert (world.label, world.workers, len(world.taskset().tasks("eval"))) == ("Towns", workers, 50)
    assert tomllib.loads(texts[2])["project"]["entry-points"]["silva.environments"]["towns"]


@pytest.mark.parametrize("name", REGISTRIES.environments)
def test_every_environment_is_on_a_page(name: str) -> None:
    """As a section of its own, or as the `type` of an example."""
    pages = [path.read_text() for path in (Path(__file__).parents[2] / "docs").glob("*.md")]
    assert any(f"### {name}\n" in page or f'type = "{name}"' in page for page in pages)
