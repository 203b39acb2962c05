"""What a seed is about: a configuration out of a few dozen, and what befalls the run."""

from __future__ import annotations

import errno
import functools
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.disk import FAULTS

from silva.commands.common import as_resolved
from silva.config.load import Resolved
from silva.ports import CRASH_POINTS

FAMILIES = 56
SUPERVISED = 8  # of them, the last ones: `silva sft`
SERVERS = 3  # at most
TRAINER = "unix:/simulated/trainer"
INFERENCE = tuple(f"unix:/simulated/inference-{i}" for i in range(SERVERS))
WORLDS = Path(__file__).with_name("worlds.py")
PATIENCE = 10.0


@functools.cache
def resolved(family: int, runs: Path) -> Resolved:
    """One of the configurations: small, and each of them different."""
    rng = Random(f"family {family}")
    level = rng.choice((0, 0, 1, 2))
    overlap = level == 0 and rng.random() < 0.3
    share = rng.choice((0.0, 0.15, 0.3))
    worlds = [{"type": f"{WORLDS}:World", "name": name, "turns": rng.choice((1, 1, 2)), "share": share}
              for name in "ab"[: rng.choice((1, 1, 2))]]  # fmt: skip
    updates = 2 if overlap else rng.choice((1, 1, 2))
    algorithm: dict[str, Any] = {"type": "grpo", "drop_zero_variance": rng.random() < 0.5, "max_refills": 0}
    if not overlap:
        algorithm["max_refills"] = rng.choice((0, 1))
        algorithm["oversample"] = rng.choice((1.0, 1.0, 1.5))
        if rng.random() < 0.2:
            algorithm["replay"] = {"groups": 2, "max_staleness": 3}
    values: dict[str, Any] = {
        "name": "run", "output_dir": str(runs), "seed": family, "steps": rng.choice((2, 2, 2, 3)),
        "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
        "environments": worlds,
        "rollout": {
            "groups_per_step": 2, "group_size": 2, "max_async_level": level,
            "overlap_training": overlap, "redo": rng.choice((0, 1)), "max_failed": 1.0,
            "max_off_policy_steps": rng.choice((None, 0, 1)) if level else None,
            "limits": {"max_turns": 4, "max_turn_tokens": 64, "max_episode_tokens": 1500, "timeout": 4.0},
        },
        "algorithm": algorithm,
        "trainer": {"updates_per_step": updates},
        "eval": {"every": rng.choice((0, 0, 1, 2)), "tasks": 1},
        "checkpoint": {"every": rng.choice((0, 1, 1, 2)), "keep": rng.choice((1, 2)),
                       "keep_best": rng.random() < 0.5},
        "monitoring": {"terminal": "off", "tensorboard": False, "report": False, "stall_after": 1e6,
                       "rollouts": rng.random() < 0.06},
        "placement": {"type": "services", "trainer": TRAINER, "patience": PATIENCE, "timeout": 12.0,
                      "inference": INFERENCE[: rng.choice((1, 1, 2, 3))]},
    }  # fmt: skip
    if family >= FAMILIES - SUPERVISED:
        values |= _supervised(rng, worlds)
    return as_resolved(values)


def _supervised(rng: Random, worlds: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole epochs of a few dialogues in whole batches; half of these runs play no environment."""
    rows = [{"messages": [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": reply}]}
            for number, reply in enumerate(("a", "b", "ab", "ba", "aab", "abb"))]  # fmt: skip
    data = {"sources": [{"rows": rows}], "epochs": rng.choice((1, 2)),
            "dialogues_per_step": rng.choice((2, 3))}  # fmt: skip
    return {"data": data, "environments": rng.choice((worlds, [])), "algorithm": {"type": "grpo"},
            "rollout": {"redo": 1, "max_failed": 1.0}, "trainer": {}}  # fmt: skip


@dataclass(frozen=True)
class Blow:
    """What happens once in a life of the run.

    kind: "kill" and "power" end the run's process, and all processes of the machine; "signal" is Ctrl-C;
        "die", "stop" and "gone" are of a node, which comes back after `seconds` ("gone": in the next life);
        "fault" fails operations of the disk; "rot" changes a byte of the newest checkpoint after the life.
    at: seconds, or for "kill" and "power" the name of a crash point; "disk": an operation of the disk.
    count: which time at a crash point, or which operation.
    """

    kind: str
    at: float | str
    count: int = 1
    seconds: float = 0.0
    node: int = 0
    code: int = errno.ENOSPC
    length: int = 1


@dataclass(frozen=True)
class Plan:
    """Of one life.

    noise: share of requests that the network spoils.
    lies: share of loads in which an engine keeps old weights and says that it has the new ones.
    fails: share of calls in which the trainer raises.
    """

    blows: tuple[Blow, ...] = ()
    noise: float = 0.0
    lies: float = 0.0
    fails: float = 0.0


QUIET = Plan()


def plans(rng: Random, nodes: int) -> list[Plan]:
    """What befalls the first lives; later ones are left alone."""
    return [
        Plan(
            tuple(_blow(rng, nodes) for _ in range(rng.choice((0, 1, 1, 2, 3)))),
            noise=rng.choice((0.0, 0.0, 0.01, 0.04, 0.15)),
            lies=0.3 if rng.random() < 0.05 else 0.0,
            fails=0.05 if rng.random() < 0.08 else 0.0,
        )
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]


def _blow(rng: Random, nodes: int) -> Blow:
    kind = rng.choice(
        ("kill", "kill", "power", "signal", "die", "die", "stop", "gone", "fault", "fault", "rot")
    )
    when = rng.uniform(0.0, 4.0)
    node, seconds = rng.randrange(nodes), rng.uniform(0.2, 7.0)
    if kind in ("kill", "power"):
        where = rng.choice(("time", "point", "point", "disk"))
        if where == "point":
            return Blow(kind, rng.choice(CRASH_POINTS), rng.randint(1, 6))
        return Blow(kind, "disk", rng.randint(1, 150)) if where == "disk" else Blow(kind, when)
    if kind == "fault":
        length = rng.choice((1, 1, 2, 8))
        return Blow(kind, "disk", rng.randint(1, 150), code=rng.choice(FAULTS), length=length)
    if kind == "signal":
        return Blow(kind, when, rng.choice((1, 1, 2)), seconds)
    return Blow(kind, when, node=node, seconds=seconds)
