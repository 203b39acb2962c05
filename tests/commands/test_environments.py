"""`silva envs` and `silva envs check` as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silva import cli
from silva.commands.environments import listed, shown, sole_environment, table
from silva.environments import ENVIRONMENTS
from silva.environments.check.findings import Check, Finding
from silva.errors import ConfigError

FAULTY = Path(__file__).parents[1] / "environments" / "faulty.py"


def test_every_environment_says_its_licence_and_whether_it_runs_here() -> None:
    rows = listed(ENVIRONMENTS)
    assert [row["name"] for row in rows] == list(ENVIRONMENTS)
    for row in rows:
        assert row["licence"] and row["about"] and row["here"] == (not row["missing"] and not row["programs"])
    by_name = {row["name"]: row for row in rows}
    assert by_name["bandit"]["licence"] == "Apache-2.0" and by_name["bandit"]["needs"] == ""
    assert by_name["openenv"]["needs"] == "`url` of a running server"
    assert by_name["gymnasium"]["here"] is True


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "far_worlds.py").write_text(
        "from silva.environments.settings import EnvironmentSettings\n"
        "class Far(EnvironmentSettings):\n"
        "    '''Far away.'''\n"
        "    packages = ('no_such_library',)\n"
        "    needs = 'a telescope'\n"
        "class Launched(EnvironmentSettings):\n"
        "    '''Up there.'''\n"
        "    programs = ('no-such-rocket',)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (launched,) = listed({"launched": "far_worlds:Launched"})
    assert (launched["here"], launched["missing"], launched["programs"]) == (False, [], ["no-such-rocket"])
    line = " ".join(table([launched]).splitlines()[1].split())
    assert line == "launched no Up there. no no-such-rocket here of its package"
    (row,) = listed({"far": "far_worlds:Far"})
    assert (row["here"], row["missing"], row["licence"]) == (False, ["no_such_library"], "of its package")
    line = " ".join(table([row]).splitlines()[1].split())
    assert line == "far no Far away. a telescope; pip install no-such-library of its package"


def test_a_check_that_finds_nothing(capsys) -> None:
    assert cli.main(["envs", "check", "guess_number", "--numbers", "5", "--eval_size", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("guess_number\n  ok     task set     220 train tasks, 1 eval tasks\n")
    assert text.endswith("nothing is wrong\n")


@pytest.mark.slow
def test_a_check_of_a_file_that_finds_faults(capsys, monkeypatch) -> None:
    monkeypatch.chdir(FAULTY.parent)
    assert cli.main(["envs", "check", "faulty.py", "--fault", "crash"]) == 1
    text = capsys.readouterr().out
    line = next(i for i, line in enumerate(FAULTY.read_text().splitlines(), 1) if "split()[0]" in line)
    assert (
        f"step() raised IndexError: list index out of range, after an empty reply  (faulty.py:{line})" in text
    )
    assert text.endswith("3 faults\n")


def test_the_same_as_json(capsys) -> None:
    assert cli.main(["envs", "check", f"{FAULTY}:Faulty", "--fault", "nan", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == "Faulty" and found["ok"] is False
    episodes = next(check for check in found["checks"] if check["name"] == "episodes")
    assert episodes["findings"][0]["text"] == "rewards['right'] is nan, expected a finite number"
    assert episodes["findings"][0]["where"].startswith(f"{FAULTY}:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "silva envs check: got no name"),
        (["no_such_world"], "no_such_world"),
        (["gone.py"], "gone.py: no such file"),
        (["guess_number", "--numbrs", "5"], "did you mean numbers?"),
    ],
)
def test_wrong_input(capsys, arguments, words) -> None:
    assert cli.main(["envs", "check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_file_must_define_one_environment(tmp_path) -> None:
    file = tmp_path / "worlds.py"
    base = "from silva.environments.bases.tool_qa import ToolQA\n"
    file.write_text(base)
    with pytest.raises(ConfigError, match=r"expected one environment, got 0$"):
        sole_environment(str(file))
    file.write_text(base + "class A(ToolQA): pass\nclass B(ToolQA): pass\n")
    with pytest.raises(ConfigError, match=r"expected one environment, got 2, such as .*worlds\.py:A"):
        sole_environment(str(file))
    file.write_text(base + "class A(ToolQA): pass\n")
    assert sole_environment(str(file)) == f"{file}:A"
    assert sole_environment("bandit") == "bandit"


def test_notes_are_no_faults() -> None:
    text = shown("mine", [Check("forks", "", [Finding("note", "cannot be forked")])])
    assert text == "mine\n  ok     forks\n         note: cannot be forked\nnothing is wrong"
