"""Recorded rollouts of trained policies, as work for the engines of decode.py.

    silva rl, once, into runs/decode ──> weights, and the rollouts of every step
        the last step's prompts, turn by turn ──> asked again of each engine, with those weights
        the replies of all steps before ──> what Silva remembers when a round begins

An episode's turn is asked for when the one before is answered; a slot that is free takes the next episode.
The prompts are the recorded ones. The replies are sampled anew, with other seeds in every round.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common import CONFIGS, Row

if TYPE_CHECKING:
    from decode import Engine

T = TypeVar("T")
FOLDER = Path("runs/decode")
EPISODES = {1: 8, 8: 32, 32: 64, 64: 64}
"""Of how many episodes a round is made, by requests at once."""


@dataclass(frozen=True)
class Policy:
    """How a policy is trained, on which texts its turns end besides its end of turn, and how often a round
    plays its episodes: a second of a tiny model's work is less than what disturbs it."""

    config: str
    flags: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    times: int = 1


POLICIES = {
    "quickstart": Policy("quickstart.toml"),
    "tool_use": Policy("tool_use.toml", stop=("</calculator>",)),
    "frozen_lake": Policy("frozen_lake_tiny.toml", ("--steps=60", "--eval.every=0"), times=8),
}


@dataclass(frozen=True)
class Recording:
    """What a trained policy has played.

    Attributes:
    model: folder of the weights.
    before: the trajectories of earlier steps, oldest first, each as what was said in turn.
    episodes: the prompts of each, turn by turn.
    params: of every request.
    """

    name: str
    model: Path
    before: Sequence[Sequence[Sequence[int]]]
    episodes: Sequence[Sequence[Sequence[int]]]
    params: Mapping[str, Any]

    def work(self, slots: int, seed: int) -> dict[str, Any]:
        """For the workers' `play`."""
        count = EPISODES[slots] * POLICIES[self.name].times
        episodes = [self.episodes[i % len(self.episodes)] for i in range(count)]
        return {"episodes": episodes, "slots": slots, "params": dict(self.params), "seed": seed}


def recording(name: str) -> Recording:
    """Train the policy, unless it is there already."""
    policy, run = POLICIES[name], FOLDER / name
    if not (run / "summary.json").exists():
        print(f"... training {name}", file=sys.stderr, flush=True)
        argv = [f"@{CONFIGS / policy.config}", *policy.flags, f"--name={name}", f"--output-dir={FOLDER}"]
        subprocess.run([sys.executable, "-m", "silva", "rl", *argv, "--overwrite"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
    *earlier, last = sorted((run / "rollouts").glob("step_*.parquet"), key=_number)
    model = max((run / "weights").glob("step_*"), key=_number)
    limits = json.loads((run / "config.json").read_text())["rollout"]["limits"]
    played = [turns for turns in _prompts(last) if turns]
    return Recording(
        name,
        model,
        [sequence for path in earlier if _number(path) for sequence in _sequences(path)],
        played,
        {"max_tokens": limits["max_turn_tokens"], "stop_token_ids": _ends(model), "stop": policy.stop},
    )


def measure(
    recorded: Recording,
    slots: int,
    workers: Mapping[str, Engine],
    ours: str,
    off: str,
    rounds: int,
) -> list[Row]:
    """Tokens a second of each engine; `ours` against all the others.

    Raises:
        SystemExit: a bit of a completion depends on drafts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    rates: dict[str, list[float]] = {name: [] for name in workers}
    drafts = {"steps": 0.0, "drafted": 0.0, "accepted": 0.0, "decoded": 0.0}
    for number in range(rounds + 1):
        digests = {}
        for name, worker in by_turns(workers, number):
            if name in (ours, off):  # both after it: it leaves less of a tiny model in the processor's cache
                worker.ask("remember", trajectories=recorded.before)
            found = worker.ask("play", **recorded.work(slots, seed=number))
            digests[name] = found.get("digest")
            if number:  # the first round warms up
                seconds[name].append(found["seconds"])
                rates[name].append(found["tokens"] / found["seconds"])
            if number and name == ours:
                for key in drafts:
                    drafts[key] += found[key]
        if off in digests and digests[off] != digests[ours]:
            raise SystemExit(f"{recorded.name}, {slots} requests: completions differ with drafts and without")
    case, rate = f"{recorded.name}, {slots} at once", statistics.median(rates[ours])

    def row(name: str) -> Row:
        ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[name], strict=True))
        return Row(case, "tokens/s", rate, "", name, ratio, target(recorded.name, slots, name == off))

    requests = max(drafts["decoded"] - drafts["accepted"], 1)
    return [
        *(row(name) for name in workers if name != ours),
        Row(case, "tokens of a request in a step", drafts["decoded"] / requests, ""),
        Row(case, "drafted tokens that were drawn", drafts["accepted"] / max(drafts["drafted"], 1), "share"),
    ]


def by_turns(workers: Mapping[str, T], number: int) -> list[tuple[str, T]]:
    """In their order in one round, the other way round in the next."""
    return list(workers.items())[:: -1 if number % 2 else 1]


def target(name: str, slots: int, off: bool) -> str:
    if off:
        return {("tool_use", 8): ">= 1.5", ("quickstart", 8): ">= 1.2"}.get((name, slots), ">= 0.98")
    return ">= 1" if slots in (8, 32) and name != "frozen_lake" else ""


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])


def _rows(path: Path) -> list[list[dict[str, Any]]]:
    """The turns of each trajectory that was played for training."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["turns", "status"]).to_pylist()
    return [row["turns"] for row in rows if row["status"] != "eval"]


def _sequences(path: Path) -> list[list[list[int]]]:
    return [[s["tokens"] for turn in turns for s in turn["segments"]] for turns in _rows(path)]


def _prompts(path: Path) -> list[list[list[int]]]:
    """All that stands before each reply."""
    found = []
    for turns in _rows(path):
        prompts: list[list[int]] = []
        text: list[int] = []
        for segment in (s for turn in turns for s in turn["segments"]):
            if segment["source"] == "policy":
                prompts.append(list(text))
            text += segment["tokens"]
        found.append(prompts)
    return found


def _ends(model: Path) -> list[int]:
    """Tokens that end a turn."""
    end = json.loads((model / "generation_config.json").read_text()).get("eos_token_id")
    return end if isinstance(end, list) else [end]
