"""`silva attack`: which replies that must not be rewarded a reward accepts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silva.environments.row_shapes import problem, recognised
from silva.environments.rows import read_rows
from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError, RecordError, RewardError
from silva.protocols import Attempt, Reward, Score
from silva.rewards import cheats
from silva.rewards.cheats import CASES, CHEATS, HONEST, Case, Cheat

TASKS = 20  # of a data set
AT_ONCE = 8
SHOWN = 60  # characters of a reply


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


def cases_of(path: str) -> list[Case]:
    """The first tasks of a file of rows."""
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"--data {path}: it holds no rows")
    shape = recognised(first)
    problems = [problem(row, shape) for row in itertools.islice(itertools.chain([first], rows), TASKS)]
    return cheats.cases([(each.messages[-1].content, each.answer, each.columns) for each in problems])


def cases_in(environment: EnvironmentSettings) -> list[Case]:
    """The first tasks of a data set."""
    tasks = itertools.islice(environment.taskset().tasks("train"), TASKS)
    return cheats.cases(
        [(task.data["messages"][-1]["content"], task.answer, task.data["columns"]) for task in tasks]
    )


def attack(name: str, reward: Reward, cases: Sequence[Case] = CASES) -> Report:
    """Tries every cheat in every task.

    Raises:
        ConfigError: the reward can grade none of the tasks.
    """
    return asyncio.run(_attack(name, reward, cases))


async def _attack(name: str, reward: Reward, cases: Sequence[Case]) -> Report:
    places = asyncio.Semaphore(AT_ONCE)

    async def grade(cheat: Cheat, case: Case) -> Score | RecordError | RewardError:
        async with places:
            try:
                return await reward.score(Attempt(cheat.messages(case), case.answer, case.data))
            except (RecordError, RewardError) as error:
                return error

    honest, graded = dict.fromkeys((frame.name for frame in HONEST), 0), []
    refusal: Exception | None = None
    for case in cases:
        frames = [frame for frame in HONEST if frame.fits(case)] or [CHEATS[0]]  # it has no answer as text
        results = await asyncio.gather(*(grade(frame, case) for frame in frames))
        refusals = [result for result in results if isinstance(result, Exception)]
        if refusals:
            refusal = refusal or refusals[0]
            continue
        graded.append(case)
        for frame, result in zip(frames, results, strict=True):
            honest[frame.name] = honest.get(frame.name, 0) + (isinstance(result, Score) and result.solved)
    if not graded:
        raise ConfigError(
            f"reward {name} grades none of {len(cases)} tasks: {refusal}. Give tasks that it can grade with "
            "--data FILE"
        )
    tried = [
        (cheat, case) for cheat in CHEATS for case in graded[: 1 if cheat.once else None] if cheat.fits(case)
    ]
    results = await asyncio.gather(*(grade(*each) for each in tried))
    by_name: dict[str, list[tuple[Cheat, Case, Any]]] = {}
    for (cheat, case), result in zip(tried, results, strict=True):
        by_name.setdefault(cheat.name, []).append((cheat, case, result))
    shares = {frame.name: honest[frame.name] / len(graded) for frame in HONEST}
    found = tuple(map(_finding, by_name.values()))
    return Report(name, len(graded), len(cases) - len(graded), shares, found)


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


def show(report: Report) -> str:
    refused = f", {report.refused} that it does not grade left out" if report.refused else ""
    lines = [f"{report.reward}: {len(report.findings)} cheats in {report.tasks} tasks{refused}"]
    accepted = [f"{frame} {share:.0%}" for frame, share in report.honest.items()]
    lines.append(f"right answers solved: {', '.join(accepted)}")
    if not any(report.honest.values()):
        lines.append("warning: no right answer is solved in any of these forms, so the rest says little")
    solved = [finding for finding in report.findings if finding.solved]
    partial = [finding for finding in report.findings if finding.best > 0 and not finding.solved]
    failed = [finding for finding in report.findings if finding.error]
    lines += _listed("solved, though they must not be:", solved)
    lines += _listed("partial credit, below a solution:", sorted(partial, key=lambda f: -f.best))
    if failed:
        lines += ["", f"no result, because the reward raised ({len(failed)} cheats):"]
        lines += [f"  {finding.cheat}: {_short(finding.error or '')}" for finding in failed[:10]]
    verdict = "no cheat is solved" if report.holds else f"{len(solved)} cheats are solved"
    return "\n".join([*lines, "", verdict])


def _listed(title: str, findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    width = max(len(finding.cheat) for finding in findings)
    return ["", title] + [
        f"  {f.cheat:<{width}}  {f.best:.2f}  in {f.solved or '-'} of {f.tried}  {_short(f.reply)!r}"
        f" (right: {_short(f.answer)})"
        for f in findings
    ]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
