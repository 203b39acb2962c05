"""Makes TextWorld games in a process of its own: python -m silva.environments.foreign.textworld_maker REQUEST

REQUEST is JSON: {"challenge": "tw-cooking", "keys": {...}, "folder": "...", "seeds": [0, 1]}. A game becomes
three files: N.z8 (the game), N.json (its logic) and N.made.json (content and walkthrough, or why there is no
game), which is written last: the game is complete if it is there.

TextWorld's generator depends on the order of Python's sets: the process needs PYTHONHASHSEED=0.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from silva.environments.foreign.textworld_games import content


def main(request: dict[str, Any]) -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise SystemExit("PYTHONHASHSEED must be 0: otherwise a seed gives another game in every process")
    folder = Path(request["folder"])
    for seed in request["seeds"]:
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{seed}-") as name:
            made = _make(request["challenge"], dict(request["keys"]), seed, Path(name))
            Path(name, f"{seed}.made.json").write_text(json.dumps(made))
            for file in (f"{seed}.z8", f"{seed}.json", f"{seed}.made.json"):
                if Path(name, file).exists():
                    os.replace(Path(name, file), folder / file)


def _make(challenge: str, keys: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Makes and compiles a game, and plays its walkthrough; says what it is, or why there is none."""
    from textworld import GameOptions
    from textworld.challenges import CHALLENGES
    from textworld.generator import compile_game

    options = GameOptions()
    options.seeds = seed
    options.grammar.only_last_action = not keys.pop("hints", True)
    if challenge == "tw-cooking":
        keys |= {"recipe_seed": seed, "split": None}
    try:
        game = CHALLENGES[challenge][1](keys, options)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # some settings are impossible, others only with some seeds
        return {"error": f"{type(error).__name__}: {error}"}
    options.path, options.force_recompile = str(folder / f"{seed}.z8"), True
    file = compile_game(game, options)
    walkthrough = list(game.metadata["walkthrough"])
    if not _wins(file, walkthrough):
        return {"error": f"the walkthrough of seed {seed} does not win"}
    logic = json.loads((folder / f"{seed}.json").read_text())
    return {"content": content(logic), "walkthrough": walkthrough}


def _wins(file: str, commands: list[str]) -> bool:
    import textworld

    env = textworld.start(file, textworld.EnvInfos(won=True))
    state = env.reset()
    for command in commands:
        state, _, _ = env.step(command)
    env.close()
    return bool(state.won)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
