"""Environments from files and packages: found, labelled, and explained when they fail. Other parts from
outside Silva: listed in registries."""

import sys
from dataclasses import replace

import pytest
from config_test_worlds import Toy

from silva.config.help import help_text
from silva.config.load import load
from silva.config.saved import to_toml
from silva.config.schema_json import json_schema
from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError
from silva.registries import REGISTRIES

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


def test_files_of_tools_are_relative_to_the_toml(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("c.jsonl", "server.py"):
        (tmp_path / "sub" / name).write_text("")
    (tmp_path / "sub" / "run.toml").write_text(
        '[[environments]]\ntype = "dataset"\nrows = [{prompt = "q", answer = "a"}]\nreward = "exact_match"\n'
        'tools = [{type = "search", arpo_cache = "a.json", backend = {type = "bm25", corpus = "c.jsonl"}},\n'
        '         {type = "mcp", command = ["python", "server.py", "--port"], lock = "pins.json"}]\n'
    )
    other = "--environments.0.tools.0.backend.corpus=c.jsonl"
    for options, folder in (((), tmp_path / "sub"), ((other,), tmp_path)):
        line = ["@sub/run.toml", *options]
        search, mcp = load(line, REGISTRIES, env={}, cwd=tmp_path).config.environments[0].tools
        assert search.backend.corpus == str(folder / "c.jsonl")
    assert search.arpo_cache == str(tmp_path / "sub" / "a.json") and search.cache == "~/.cache/silva"
    assert mcp.command == ("python", str(tmp_path / "sub" / "server.py"), "--port")
    assert mcp.lock == str(tmp_path / "sub" / "pins.json")


def test_changed_file_is_read_again(write, resolve, monkeypatch):
    """Also one of the same size that is changed within a second, of which Python has cached the bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write("maze.py", WORLD)
    assert resolve("--environments.0.type maze.py:Maze").config.environments[0].walls == 3
    write("maze.py", WORLD.replace("= 3", "= 4"))
    assert resolve("--environments.0.type maze.py:Maze").config.environments[0].walls == 4


def test_class_in_a_package(resolve):
    config = resolve("--environments.0.type config_test_worlds:Toy --environments.0.size 9").config
    assert isinstance(config.environments[0], Toy)
    assert (config.environments[0].size, config.environments[0].label) == (9, "toy")


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
        ("maze.py:", 'expected "file.py:name" or "package.module:name"'),
    ],
)
def test_failures_are_explained(write, refuse, type_, message):
    write("maze.py", WORLD)
    write("broken.py", "def f():\n    pass\nx = 1 / 0\n")
    write("syntax.py", "x = 1\ny = = 2\n")
    write("a.toml", f'[[environments]]\ntype = "{type_}"\n[[environments]]\ntype = "grid"\n')
    shown = f"DIR/{type_}" if ".py" in type_ else type_
    assert refuse("@ a.toml") == f'a.toml:2: environments.0.type = "{shown}"\n    {message}'


def test_code_that_fails_is_run_once(write, refuse, capsys):
    write("broken.py", "print('run')\nraise SystemExit\n")
    for keys in (
        "--environments.0.type broken.py:Maze",
        "--environments.0.type grid --algorithm.loss broken.py:loss",
    ):
        assert "could not be imported (line 2): SystemExit" in refuse(keys)
    assert capsys.readouterr().out == "run\n" * 2


PARTS = '''
"""Parts of somebody else, in a package of their own."""
from typing import Literal
from silva.config.sections import Positive, Section

class RemoteEngine(Section):
    """Samples elsewhere."""
    type: Literal["remote"] = "remote"
    urls: tuple[str, ...] = ()
    """Where it listens."""

class ShardedTrainer(Section):
    shards: Positive = 2
    """Parts of the model."""

class TreeRollout(Section):
    type: Literal["tree"] = "tree"
    depth: Positive = 3

class Cluster(Section):
    type: Literal["cluster"] = "cluster"
    nodes: Positive = 4
'''


@pytest.fixture
def extended(registries, write, tmp_path, monkeypatch):
    """The registries with an engine, a trainer, a rollout and a placement from a module outside Silva."""
    write("outside_parts.py", PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield replace(
        registries,
        engines={**registries.engines, "remote": "outside_parts:RemoteEngine"},
        trainers={"sharded": "outside_parts:ShardedTrainer", **registries.trainers},
        rollouts={**registries.rollouts, "tree": "outside_parts:TreeRollout"},
        placements={**registries.placements, "cluster": "outside_parts:Cluster"},
    )
    sys.modules.pop("outside_parts", None)


@pytest.mark.slow
def test_parts_from_outside_give_a_configuration(extended, write, tmp_path):
    def resolved(*argv):
        return load(["--environments.0.type=toy", *argv], extended, env={}, cwd=tmp_path)

    types = [
        "--engine.type=remote",
        "--trainer.type=sharded",
        "--rollout.type=tree",
        "--placement.type=cluster",
    ]
    given = resolved(*types, "--engine.urls", '["http://a"]', "--trainer.shards=3")
    config = given.config
    assert (config.engine.urls, config.trainer.shards, config.rollout.depth, config.placement.nodes) == (
        ("http://a",), 3, 3, 4
    )  # fmt: skip
    assert (config.trainer.type, given.provenance["trainer.shards"]) == ("sharded", "--trainer.shards")
    saved = write("saved.toml", to_toml(given))
    assert load([f"@{saved}"], extended, env={}).data == given.data
    usual = resolved().config  # the same as without them
    assert [usual.engine.type, usual.trainer.type, usual.rollout.type, usual.placement.type] == [
        "local", "local", "linear", "local"
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        resolved(
            "--trainer.shards=3", "--placement.type=cluster", "--placement.nodes=0", "--engine.type=remot"
        )
    assert str(caught.value) == (
        "3 problems in the configuration:\n"
        '--engine.type: engine.type = "remot"\n'
        '    unknown type; did you mean "remote"? known: "local", "remote"\n'
        "--trainer.shards: trainer.shards = 3\n"
        '    unknown key: it belongs to trainer.type = "sharded", and this is "local"\n'
        "--placement.nodes: placement.nodes = 0\n"
        "    expected an integer > 0"
    )


@pytest.mark.slow
def test_help_and_schema_show_parts_from_outside(extended):
    def page(topic):
        return help_text("silva rl", "silva rl: train by RL", extended, topic)

    assert "  [trainer]         Optimizer, updates and memory; types: sharded, local, tinker\n" in page("")
    assert page("trainer.sharded") == (
        '[trainer] type = "sharded"\n  shards = 2                              Parts of the model.\n'
    )
    assert page("engine.remote").startswith('[engine] type = "remote"  Samples elsewhere.\n  urls = [] ')
    assert '[placement] type = "local" (default)' in page("placement") and "  nodes = 4" in page("all")
    schema = json_schema(extended)
    types = {key: [*schema["properties"][key]["discriminator"]["mapping"]] for key in (
        "engine", "trainer", "rollout", "placement")}  # fmt: skip
    assert types == {
        "engine": ["local", "remote"], "trainer": ["local", "sharded", "tinker"],
        "rollout": ["branching", "linear", "tree"], "placement": ["cluster", "local", "ray", "services"],
    }  # fmt: skip
    assert schema["$defs"]["ShardedTrainer"]["required"] == ["type"]
    assert "required" not in schema["$defs"]["LocalTrainerSettings"]
