"""Task sets of libraries whose problems are seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Build, Draft, Tasks, generated

LOOKED_AT = 16  # seeds, to learn whether a problem can be told from how it begins
ENOUGH = 12  # of them that differ: a small world may repeat itself


def seeded(settings: EnvironmentSettings, begins: Callable[[int], Any] | None, build: Build) -> Tasks:
    """Tasks with the data {"seed": n}.

    Args:
        begins: all that can be known of the problem of a seed, as plain JSON. If most seeds differ in it, it
            decides whether the problem is held out. Otherwise, or if it is None, the seed does.
    """
    known = set() if begins is None else {_text(begins(seed)) for seed in range(LOOKED_AT)}
    by_content = begins is not None and len(known) >= ENOUGH

    def draw(rng: random.Random) -> Draft:
        seed = rng.randrange(1 << 31)
        return Draft({"seed": seed}, None, [_text(begins(seed)) if begins and by_content else seed])

    tasks = generated(settings, draw, build)
    if not by_content:
        how = (
            "what it asks cannot be seen beforehand"
            if begins is None
            else f"{LOOKED_AT} seeds begin in {len(known)} different ways"
        )
        tasks.notes = [
            f"{settings.label}: problems are told apart by their seeds ({how}), so a held-out one may begin "
            "like one that is trained on"
        ]
    return tasks


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True)
