"""Which games are made, with a maker that makes none."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from silva.environments.foreign import textworld_games
from silva.environments.foreign.textworld_games import Wanted, content, found, made
from silva.environments.tasks import held_out
from silva.errors import ConfigError

# {"different": n} makes n different games, {"broken": n} fails for seeds divisible by n.
FAKE = """
import json, os, sys
from pathlib import Path
request = json.loads(sys.argv[1])
keys, folder = request["keys"], Path(request["folder"])
assert os.environ["PYTHONHASHSEED"] == "0"
if "dies" in keys:
    sys.exit("no disk left")
for seed in request["seeds"]:
    record = {"content": f"game {seed % keys.get('different', 1 << 31)}", "walkthrough": ["go east"]}
    if "broken" in keys and seed % keys["broken"] == 0:
        record = {"error": "ValueError: too many rooms"}
    (folder / f"{seed}.made.json").write_text(json.dumps(record))
    with open(folder / "log", "a") as log:
        log.write(f"{seed}\\n")
"""


@pytest.fixture(autouse=True)
def fake_maker(tmp_path, monkeypatch):
    (tmp_path / "makes_nothing.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(textworld_games, "MAKER", "makes_nothing")


def wanted(training: int = 6, evaluation: int = 2, seed: int = 0, **keys: int) -> Wanted:
    return Wanted("tw-x", keys, training, evaluation, 0.25, seed)


def logged(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_as_many_different_games_as_are_wanted_on_each_side(tmp_path) -> None:
    games = made(wanted(), tmp_path / "a", "mine")
    sides = [held_out(game.content, 0.25) for game in games]
    assert (sides.count(False), sides.count(True)) == (6, 2)
    assert len({game.content for game in games}) == 8
    assert games[0].path == tmp_path / "a" / games[0].name and games[0].walkthrough == ("go east",)


@pytest.mark.slow
def test_a_seed_decides_which_games_and_a_larger_set_has_the_smaller_one(tmp_path) -> None:
    games = made(wanted(), tmp_path / "a", "mine")
    assert [g.name for g in made(wanted(), tmp_path / "b", "mine")] == [g.name for g in games]
    assert {g.name for g in made(wanted(12, 3), tmp_path / "a", "mine")} > {g.name for g in games}
    assert not {g.name for g in made(wanted(seed=1), tmp_path / "a", "mine")} & {g.name for g in games}


def test_a_game_is_made_once(tmp_path, capsys) -> None:
    """Also if several ask at the same time."""
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(made, wanted(), tmp_path / "a", "mine") for _ in range(3)]
    assert asked[0].result() == asked[1].result() == asked[2].result()
    seeds = logged(tmp_path / "a")
    assert len(seeds) == len({*seeds}) >= 8
    capsys.readouterr()
    made(wanted(), tmp_path / "a", "mine")
    assert logged(tmp_path / "a") == seeds and capsys.readouterr().err == ""


def test_games_that_cannot_be_made_are_left_out(tmp_path) -> None:
    games = made(wanted(broken=2), tmp_path / "a", "mine")
    assert len(games) == 8 and all(int(game.path.stem) % 2 for game in games)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "words"),
    [({"different": 3}, "of 6 games to train on"), ({"broken": 1}, "too many rooms")],
)
def test_settings_that_give_too_few(tmp_path, keys, words) -> None:
    with pytest.raises(ConfigError, match=f"mine: 24 seeds in turn gave no new game .*{words}"):
        made(wanted(**keys), tmp_path / "a", "mine")


def test_a_maker_that_fails_is_no_error_of_the_settings(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="no disk left"):
        made(wanted(dies=1), tmp_path / "a", "mine")


def logic(*facts: str, desc: str = "") -> dict:
    """Facts such as "at r_0 key"; r_0 is the kitchen."""
    infos = [["r_0", {"name": "kitchen", "desc": desc}], ["P", {"name": None}]]
    split = [fact.split() for fact in facts]
    world = [{"name": name, "arguments": [{"name": each} for each in rest]} for name, *rest in split]
    return {"infos": infos, "world": world, "metadata": {"walkthrough": ["take key"]}}


def test_the_content_is_what_is_where() -> None:
    known = content(logic("at P r_0", "open door"))
    assert content(logic("open door", "at P r_0", desc="A kitchen. How nice.")) == known
    assert content(logic("at P r_1", "open door")) != known
    other = logic("at P r_0", "open door")
    other["infos"][0][1]["name"] = "cellar"
    assert content(other) != known


def test_games_of_a_folder(tmp_path) -> None:
    for name in ("b/2", "a/1", "3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.z8").write_bytes(b"")
        if name != "3":
            (tmp_path / f"{name}.json").write_text(json.dumps(logic(f"at P r_{name[-1]}")))
    games, left_out = found(tmp_path, "mine")
    assert [game.name for game in games] == ["a/1.z8", "b/2.z8"] and left_out == 1
    assert games[0].walkthrough == ("take key",)


def test_a_folder_without_games(tmp_path) -> None:
    (tmp_path / "zork.z8").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"expected games of TextWorld, .* got 1 \.z8 files"):
        found(tmp_path, "mine")
