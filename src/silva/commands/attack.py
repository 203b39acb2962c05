"""`silva attack`: which replies that must not be rewarded a reward accepts."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from silva.config.load import load
from silva.environments.row_shapes import problem, recognised
from silva.environments.rows import read_rows
from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError, RecordError, RewardError
from silva.protocols import Attempt, Reward, Score
from silva.registries import REGISTRIES
from silva.rewards import cheats
from silva.rewards.cheats import CASES, CHEATS, HONEST, Case, Cheat

TASKS = 20  # of a data set
AT_ONCE = 8
SHOWN = 60  # characters of a reply

Result = Score | RecordError | RewardError


@dataclass(frozen=True, slots=True)
class Finding:
    """What a reward made of one cheat. `best`: the highest value; `reply` and `answer`: where it got it."""

    cheat: str
    tried: int
    solved: int
    best: float
    reply: str
    answer: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """`honest`: frame -> share of tasks solved by the right answer in it; `refused`: tasks not graded."""

    reward: str
    tasks: int
    refused: int
    honest: dict[str, float]
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        return not any(finding.solved for finding in self.findings)


def settings(arguments: Sequence[str], data: str | None = None) -> tuple[str, Reward, list[Case]]:
    """What to attack, by its name, and in which tasks.

    Args:
        arguments: a type, "file.py:function" or "package.module:function" and keys of the reward; or
            "@ FILE.toml" and keys of a configuration.
        data: a file of rows.

    Raises:
        ConfigError: there is no such reward, or no such file.
    """
    environment: Any = _environment(list(arguments))
    reward = environment.reward
    if data is not None:
        cases = _cases_of(data)
    else:
        cases = _cases_in(environment) if arguments[0].startswith("@") else list(CASES)
    return getattr(reward, "function", reward.type), reward.build(), cases


def attack(name: str, reward: Reward, cases: Sequence[Case] = CASES) -> Report:
    """Tries every cheat in every task.

    Raises:
        ConfigError: the reward can grade none of the tasks.
    """
    return asyncio.run(_attack(name, reward, cases))


async def _attack(name: str, reward: Reward, cases: Sequence[Case]) -> Report:
    places = asyncio.Semaphore(AT_ONCE)

    async def grade(cheat: Cheat, case: Case) -> Result:
        async with places:
            try:
                return await reward.score(Attempt(cheat.messages(case), case.answer, case.data))
            except (RecordError, RewardError) as error:
                return error

    honest = {frame.name: 0.0 for frame in HONEST}
    graded, refusals = [], []
    for case in cases:
        frames = [frame for frame in HONEST if frame.fits(case)] or [CHEATS[0]]  # its answer is no text
        results = await asyncio.gather(*(grade(frame, case) for frame in frames))
        if refused := [result for result in results if not isinstance(result, Score)]:
            refusals.append(refused[0])
            continue
        graded.append(case)
        for frame, score in zip(frames, results, strict=True):
            honest[frame.name] = honest.get(frame.name, 0.0) + (isinstance(score, Score) and score.solved)
    if not graded:
        why = refusals[0] if refusals else "there are none"
        raise ConfigError(
            f"reward {name} grades none of {len(cases)} tasks: {why}. Give others with --data FILE"
        )
    tried = [(cheat, case) for cheat in CHEATS for case in _tasks(cheat, graded)]
    results = await asyncio.gather(*(grade(*each) for each in tried))
    by_name: dict[str, list[tuple[Cheat, Case, Result]]] = {}
    for (cheat, case), result in zip(tried, results, strict=True):
        by_name.setdefault(cheat.name, []).append((cheat, case, result))
    shares = {frame.name: honest[frame.name] / len(graded) for frame in HONEST}
    found = tuple(map(_finding, by_name.values()))
    return Report(name, len(graded), len(refusals), shares, found)


def _tasks(cheat: Cheat, cases: Sequence[Case]) -> list[Case]:
    fitting = [case for case in cases if cheat.fits(case)]
    return fitting[:1] if cheat.once else fitting


def _finding(results: list[tuple[Cheat, Case, Any]]) -> Finding:
    scores = [
        (score.solved, score.value, i) for i, (_, _, score) in enumerate(results) if isinstance(score, Score)
    ]
    errors = [str(error) for _, _, error in results if isinstance(error, Exception)]
    _, value, index = max(scores, default=(False, 0.0, 0))
    cheat, case, _ = results[index]
    return Finding(
        cheat=cheat.name,
        tried=len(results),
        solved=sum(solved for solved, _, _ in scores),
        best=value,
        reply=cheats.filled(cheat.reply, case),
        answer=str(case.answer),
        error=errors[0] if errors else None,
    )


def as_table(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {**asdict(report), "holds": report.holds}


def show(report: Report) -> str:
    refused = f"; {report.refused} that it does not grade left out" if report.refused else ""
    accepted = [f"{frame} {share:.0%}" for frame, share in report.honest.items()]
    lines = [
        f"{report.reward}: {len(report.findings)} cheats, tasks: {report.tasks}{refused}",
        f"right answers solved, by form: {', '.join(accepted)}",
    ]
    if not any(report.honest.values()):
        lines.append("warning: no right answer is solved in any of these forms, so the rest says little")
    solved = [finding for finding in report.findings if finding.solved]
    partial = [finding for finding in report.findings if finding.best > 0 and not finding.solved]
    failed = [finding for finding in report.findings if finding.error]
    lines += _listed("solved, though they must not be:", solved)
    lines += _listed("partial credit, below a solution:", partial)
    if failed:
        lines += ["", f"no result, because the reward raised: {len(failed)} cheats, such as"]
        lines += [f"  {finding.cheat}: {_short(finding.error or '', 3 * SHOWN)}" for finding in failed[:3]]
    verdict = "no cheat is solved" if report.holds else f"cheats that are solved: {len(solved)}"
    return "\n".join([*lines, "", verdict])


def _listed(title: str, findings: Sequence[Finding]) -> list[str]:
    """A line for each content, with the best value in any form."""
    if not findings:
        return []
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.cheat.partition(",")[0], []).append(finding)
    ordered = sorted(groups.items(), key=lambda group: -max(f.best for f in group[1]))
    width = max(map(len, groups))
    lines = []
    for name, several in ordered:
        best = max(several, key=lambda f: f.best)
        shown = f"{_short(best.reply)!r} for {_short(best.answer)!r}"
        lines.append(f"  {name:<{width}}  {best.best:.2f}  {shown}")
    return ["", title, *lines]


def _short(text: str, most: int = SHOWN) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _environment(arguments: list[str]) -> Any:
    """The first one with a reward in a configuration, or one around the reward that is named."""
    if arguments[0].startswith("@"):
        given = [e for e in load(arguments, REGISTRIES).config.environments if hasattr(e, "reward")]
        if not given:
            raise ConfigError("silva attack: no environment in this configuration has a key `reward`")
        return given[0]
    name, keys, prefix = arguments[0], arguments[1:], "environments.0.reward."
    chosen = {"type": "function", "function": name} if ":" in name else {"type": name}
    own = [f"--{prefix}{key}={value}" for key, value in chosen.items()]
    rows = ["--environments.0.type=dataset", '--environments.0.rows=[{"question": "?", "answer": "!"}]']
    keys = [re.sub("^--(no-)?", rf"--\1{prefix}", key) for key in keys]
    try:
        return load([*rows, *own, *keys], REGISTRIES).config.environments[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace(prefix, "")) from None


def _cases_of(path: str) -> list[Case]:
    """The first tasks of a file of rows."""
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"--data {path}: it holds no rows")
    shape = recognised(first)
    problems = [problem(row, shape) for row in itertools.islice(itertools.chain([first], rows), TASKS)]
    return cheats.cases([(each.messages[-1].content, each.answer, each.columns) for each in problems])


def _cases_in(environment: EnvironmentSettings) -> list[Case]:
    """The first tasks of a data set."""
    tasks = itertools.islice(environment.taskset().tasks("train"), TASKS)
    return cheats.cases(
        [(task.data["messages"][-1]["content"], task.answer, task.data["columns"]) for task in tasks]
    )
