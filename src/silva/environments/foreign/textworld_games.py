"""Files of TextWorld games: made once and kept in a folder, or those of a folder of the user's."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from silva.environments.process.variables import variables
from silva.environments.tasks import held_out
from silva.errors import ConfigError

IN_VAIN = 24  # seeds without a new game that is needed, before the settings are called too small
MAKER = "silva.environments.foreign.textworld_maker"


class GameFile(NamedTuple):
    """`path`: the .z8 file, `name`: the same from its folder on. `content`: see `content`."""

    path: Path
    name: str
    content: str
    walkthrough: tuple[str, ...]


class Wanted(NamedTuple):
    """Games to be made: so many to train on, and so many that `eval_share` holds out."""

    challenge: str
    keys: Mapping[str, Any]
    training: int
    evaluation: int
    eval_share: float
    seed: int


def content(logic: Mapping[str, Any]) -> str:
    """Digest of all facts of a game's JSON, with the names that the player sees.

    Leaves out the descriptions, which are chosen at random, and the goal.
    """
    names = {key: info["name"] or key for key, info in logic["infos"]}
    facts = [
        [fact["name"], *(names.get(a["name"], a["name"]) for a in fact["arguments"])]
        for fact in logic["world"]
    ]
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()[:16]


def found(folder: Path, label: str) -> tuple[list[GameFile], int]:
    """The games below a folder, in the order of their paths, and how many files were left out.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.rglob("*.z8"))
    games = [_found(file, folder) for file in files if file.with_suffix(".json").exists()]
    if not games:
        raise ConfigError(
            f"environment {label}: {folder}: expected games of TextWorld, each a .z8 file with a .json file "
            f"of the same name (tw-make writes both), got {len(files)} .z8 files"
        )
    return games, len(files) - len(games)


def made(wanted: Wanted, folder: Path, label: str) -> list[GameFile]:
    """Games in the order of their seeds: no more than are wanted, no two alike.

    Those that the folder has are taken from it. Several processes may ask at the same time: one makes the
    games, the others wait for it.

    Raises:
        ConfigError: the settings give no games, or too few different ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"textworld/{wanted.seed}")
    games, seen, seeds, errors = list[GameFile](), set[str](), list[int](), set[str]()
    lacking, in_vain = {True: wanted.evaluation, False: wanted.training}, 0
    while any(lacking.values()):
        if not seeds:
            share = wanted.eval_share
            likely = max(round(lacking[True] / share), round(lacking[False] / (1 - share)), 1)
            seeds = [rng.randrange(1 << 31) for _ in range(likely)]
            _complete(wanted, folder, seeds, label)
        record = json.loads((folder / f"{(seed := seeds.pop(0))}.made.json").read_text())
        if "error" in record or record["content"] in seen:
            errors |= {record["error"]} if "error" in record else set()
            in_vain += 1
            if in_vain == IN_VAIN:
                raise ConfigError(_too_few(wanted, lacking, sorted(errors), label))
            continue
        in_vain = 0
        game = GameFile(folder / f"{seed}.z8", f"{seed}.z8", record["content"], tuple(record["walkthrough"]))
        seen.add(game.content)
        if lacking[apart := held_out(game.content, wanted.eval_share)]:
            lacking[apart] -= 1
            games.append(game)
    return games


def _found(file: Path, folder: Path) -> GameFile:
    logic = json.loads(file.with_suffix(".json").read_text())
    walkthrough = logic.get("metadata", {}).get("walkthrough") or ()
    return GameFile(file, file.relative_to(folder).as_posix(), content(logic), tuple(walkthrough))


def _complete(wanted: Wanted, folder: Path, seeds: Sequence[int], label: str) -> None:
    """Makes the games that the folder lacks, in as many processes as there are cores."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes that want to make games here wait
        lacking = [seed for seed in seeds if not (folder / f"{seed}.made.json").exists()]
        if not lacking:
            return
        print(f"{label}: making games in {folder}, once: {len(lacking)}, some seconds each", file=sys.stderr)
        count = min(os.cpu_count() or 1, -(-len(lacking) // 2))  # a process takes 2 s to start
        makers = [_maker(wanted, folder, lacking[i::count]) for i in range(count)]
        try:
            said = [maker.communicate()[0] for maker in makers]
        finally:
            for maker in makers:
                if maker.poll() is None:
                    maker.kill()
                    maker.wait()
        for maker, text in zip(makers, said, strict=True):
            if maker.returncode:
                raise RuntimeError(
                    f"environment {label}: making games ended with {maker.returncode}: {text[-2000:]}"
                )


def _maker(wanted: Wanted, folder: Path, seeds: Sequence[int]) -> subprocess.Popen[str]:
    keys = dict(wanted.keys)
    request = {"challenge": wanted.challenge, "keys": keys, "folder": str(folder), "seeds": seeds}
    return subprocess.Popen(
        [sys.executable, "-m", MAKER, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**variables(), "PYTHONHASHSEED": "0"},
    )


def _too_few(wanted: Wanted, lacking: Mapping[bool, int], errors: Sequence[str], label: str) -> str:
    got = f"{wanted.training - lacking[False]} of {wanted.training} games to train on"
    kept = f"{wanted.evaluation - lacking[True]} of {wanted.evaluation} held-out ones"
    reason = f" ({errors[0]})" if errors else ""
    return (
        f"environment {label}: {IN_VAIN} seeds in turn gave no new game after {got} and {kept}{reason}: make "
        "the games larger, or lower `games` or eval_size"
    )
