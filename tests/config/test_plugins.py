"""Environments from files and packages: found, labelled, and explained when they fail."""

import sys

import pytest
from config_test_worlds import Toy

from silva.config import plugins
from silva.environments.settings import EnvironmentSettings

WORLD = '''
from silva.environments.settings import EnvironmentSettings

class Maze(EnvironmentSettings):
    walls: int = 3
    """How many walls."""

def helper(): ...
'''


def test_class_in_a_file_beside_the_toml(write, resolve):
    file = write("worlds/maze.py", WORLD)
    write(
        "worlds/a.toml",
        '[[environments]]\ntype = "maze.py:Maze"\nwalls = 5\n[[environments]]\ntype = "toy"\n',
    )
    resolved = resolve("@ worlds/a.toml")
    maze = resolved.config.environments[0]
    assert isinstance(maze, EnvironmentSettings)
    assert (maze.label, maze.walls) == ("Maze", 5)
    assert maze.type == f"{file.resolve()}:Maze"  # the same from any folder
    assert resolved.provenance["environments.0.type"] == "worlds/a.toml:2"


def test_file_on_the_command_line_is_relative_to_the_working_folder(write, resolve):
    write("maze.py", WORLD)
    config = resolve("--environments.0.type maze.py:Maze --environments.0.name m").config
    assert (config.environments[0].walls, config.environments[0].label) == (3, "m")


def test_changed_file_is_read_again(write, resolve):
    write("maze.py", WORLD)
    assert resolve("--environments.0.type maze.py:Maze").config.environments[0].walls == 3
    write("maze.py", WORLD.replace("= 3", "= 4"))
    assert resolve("--environments.0.type maze.py:Maze").config.environments[0].walls == 4


def test_class_in_a_package(resolve):
    config = resolve("--environments.0.type config_test_worlds:Toy --environments.0.size 9").config
    assert isinstance(config.environments[0], Toy)
    assert (config.environments[0].size, config.environments[0].label) == (9, "toy")


def test_entry_point(resolve, tmp_path, monkeypatch):
    package = tmp_path / "worlds_package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: worlds-package\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[silva.environments]\nlabyrinth = labyrinth_module:Maze\n")
    (tmp_path / "labyrinth_module.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert plugins.entry_points() == {"labyrinth": "labyrinth_module:Maze"}
        config = resolve("--environments.0.type labyrinth --environments.0.walls 7").config
    finally:
        sys.modules.pop("labyrinth_module", None)
    assert (config.environments[0].walls, config.environments[0].label) == (7, "labyrinth")


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("mase.py:Maze", "no such file; did you mean maze.py?"),
        ("maze.py:Mase", "DIR/maze.py has no Mase; it defines Maze"),
        (
            "maze.py:helper",
            "helper in DIR/maze.py is not a subclass of EnvironmentSettings: it is a function",
        ),
        (
            "broken.py:Maze",
            "DIR/broken.py could not be imported (line 3): ZeroDivisionError: division by zero",
        ),
        ("syntax.py:Maze", "DIR/syntax.py could not be imported (line 2): SyntaxError: invalid syntax"),
        ("no_such_module:Maze", "there is no module no_such_module (it must be installed)"),
    ],
)
def test_failures_are_explained(write, refuse, type_, message):
    write("maze.py", WORLD)
    write("broken.py", "def f():\n    pass\nx = 1 / 0\n")
    write("syntax.py", "x = 1\ny = = 2\n")
    write("a.toml", f'[[environments]]\ntype = "{type_}"\n[[environments]]\ntype = "grid"\n')
    shown = f"DIR/{type_}" if ".py" in type_ else type_
    assert refuse("@ a.toml") == f'a.toml:2: environments.0.type = "{shown}"\n    {message}'
