"""What a branching rollout computes: the same leaves with shared tokens computed once, and in each leaf.

    .venv/bin/python benchmarks/branching_cost.py --json branching_cost.json   SmolLM2-135M-Instruct, minutes
    .venv/bin/python benchmarks/branching_cost.py --quick                        a tiny model, seconds

Sampling: one task of five turns, 16 leaves from 4 roots, with the engine's cache of prefixes and without
it, in turns. The leaves are the same to the last bit, or the benchmark fails. The bound is of tokens: those
of all prompts and replies, over those that no cache can spare. Training: forward and backward over the trie
of the leaves of one task against flat layouts, as in forest.py.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import CONFIGS, Row, machine, parser, results, write
from forest import Case, measure

from silva.assembly import Assembly
from silva.config.load import load
from silva.models.memory import keep_freed_memory
from silva.protocols import Work
from silva.registries import REGISTRIES
from silva.rollouts.samples import to_samples
from silva.types import Completion, Group, SamplingParams

FLAGS = [
    "--rollout.type=branching", "--rollout.group-size=16", "--rollout.initial-rollouts=4",
    "--rollout.beam-size=3",
    "--rollout.branch-probability=0.6", "--rollout.limits.max-turns=5", "--rollout.limits.max-turn-tokens=32",
    "--rollout.limits.max-episode-tokens=1024", "--environments.0.chain=5", "--seed=1",
]  # fmt: skip
QUICK = ["--model.type=tiny", "--rollout.limits.max-turn-tokens=8"]


class Counted:
    """An engine that counts the tokens it was asked for and those that it read from its cache."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.asked, self.cached = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        found = await self._inner.sample(tokens, params, session=session)
        self.asked += len(tokens) + len(found.tokens)
        self.cached += found.cached_tokens
        return found


class Side:
    """A run's engine and strategy; each round plays another task."""

    def __init__(self, flags: Sequence[str], *, cache: bool) -> None:
        config = load([f"@{CONFIGS / 'tool_use.toml'}", *FLAGS, *flags], REGISTRIES).config
        self.assembly = Assembly(config).load()
        if not cache:
            self.assembly.engine.cache.longest_prefix = lambda tokens: (None, 0)  # type: ignore[attr-defined]
        self.assembly.engine = self.engine = Counted(self.assembly.engine)  # type: ignore[assignment]
        self.rollout = config.rollout.build(self.assembly)
        (self.tasks,) = self.assembly.tasksets.values()

    def play(self, round: int) -> tuple[float, Group]:
        """Seconds, and the leaves."""

        async def run() -> Group:
            await self.engine.sleep()  # forgets what the round before has left
            work = Work(f"round{round}", self.tasks.tasks("train")[round], self.tasks, 1.0)
            (group,) = [group async for group in self.rollout.run(work)]
            return group

        self.engine.asked = self.engine.cached = 0
        began = time.perf_counter()
        group = asyncio.run(run())
        return time.perf_counter() - began, group


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a tiny model, three rounds")
    options.add_argument("--rounds", type=int, default=7, help="rounds (default 7)")
    given = options.parse_args()
    keep_freed_memory()
    speed, words = machine()
    quick = QUICK if given.quick else []
    once, again = Side(quick, cache=True), Side(quick, cache=False)
    rounds: list[tuple[float, ...]] = []
    leaves: list[Group] = []
    count = 3 if given.quick else given.rounds
    for round in range(count):
        print(f"... round {round + 1}", file=sys.stderr, flush=True)
        first, group = once.play(round)
        second, same = again.play(round)
        if group != same:
            raise SystemExit(f"round {round}: the leaves differ with and without the cache")
        needed = sum(len(s.tokens) for turn in group.turns for s in turn.segments)
        computed = once.engine.asked - once.engine.cached
        rounds.append((first, second / first, again.engine.asked / needed, again.engine.asked / computed))
        leaves.append(group)
    seconds, ratio, bound, spared = map(statistics.median, zip(*rounds, strict=True))
    branched = statistics.mean(t.parent is not None for group in leaves for t in group.trajectories)
    rows = [
        speed,
        Row("sampling", "leaves that branched", branched, "share"),
        Row("sampling", "tokens, all requests over each token once", bound, "x"),
        Row(
            "sampling", "tokens, all requests over those computed", spared, "x", "token bound", spared / bound
        ),
        Row("sampling", "seconds", seconds, "s", "without the cache", ratio),
        Row("sampling", "share of the token bound", ratio / bound, "", "token bound", ratio / bound),
    ]
    write(rows, given.json)
    rows += measure(once.assembly.model, Case("training", to_samples(leaves[:1])), count)
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
