"""`silva attack`: cheating agents against a reward.

    tasks x cheats ──> attempts ──> reward ──> solved, or worth as much as an honest solution: a hole

A task counts only if the reward solves it for some honest reply: where nobody wins, a cheat that loses proves
nothing. What is tried is data, in `silva.rewards.cheats`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from silva.commands.command import Given
from silva.config.load import load
from silva.data.row_shapes import problem, recognised
from silva.data.rows import read_rows
from silva.environments.bases.tool_qa import ToolQA
from silva.errors import ConfigError, RewardError, SilvaError, shorten
from silva.monitoring.printable import put
from silva.protocols import Attempt, Reward, Score
from silva.registries import REGISTRIES
from silva.rewards.cheats import CHEATS, EXAMPLES, HONEST, Cheat, Example, attempts
from silva.rewards.function import line_in
from silva.types import Message

AT_ONCE = 16  # attempts that are graded at the same time
MAX_TASKS = 20  # of a file
LISTED = 20  # lines of what was found
SHOWN = 60  # characters of a reply
OTHERS = ("something else", "another thing", "none of these")  # wrong answers, where the data has too few


@dataclass
class CheatResult:
    """What one cheat got: `holes` are replies that were worth a solution."""

    name: str
    about: str
    tried: int = 0
    solved: int = 0
    best: float | None = None  # the highest value it got
    holes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """`honest`: the least value of an honest solution. `left_out`: tasks that no honest reply solves."""

    tasks: int
    honest: float
    findings: list[CheatResult]
    left_out: list[str]

    @property
    def holes(self) -> int:
        return sum(len(finding.holes) for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        return {"holes": self.holes, **asdict(self)}


def run(given: Given) -> int:
    given.first(f"reward; expected one, as in silva attack {given.command.example}")
    examples = examples_of(given.options["--data"]) if "--data" in given else EXAMPLES
    report = attack(reward_of(given.rest), examples)
    put(json.dumps(report.plain(), indent=1) if "--json" in given else show(report))
    return 1 if report.holes else 0


def reward_of(arguments: Sequence[str]) -> Reward:
    """What to attack: "math", "file.py:function" and keys of the reward, or "@ FILE.toml" and keys of it.

    Raises:
        ConfigError: there is no such reward.
    """
    if arguments[0].startswith("@"):
        environments = load(list(arguments), REGISTRIES).config.environments
        settings = next((each.reward for each in environments if hasattr(each, "reward")), None)
        if settings is None:
            grading = next((each for each in environments if isinstance(each, ToolQA)), None)
            if grading is None:
                raise ConfigError(
                    "silva attack: no environment of this configuration has a key `reward`, and none is a "
                    "ToolQA, which grades answers"
                )
            return Grade(grading.grade)
    else:
        settings = reward_settings(arguments)
    reward: Reward = settings.build()
    return reward


def reward_settings(arguments: Sequence[str]) -> Any:
    """Settings of "math", or of "file.py:function", with the keys that follow, as in `--extract boxed`.

    Raises:
        ConfigError: there is no such reward, or no such key of it.
    """
    key, name = "environments.0.reward", arguments[0]
    kind = [f"--{key}.type={name}"]
    if ":" in name:
        kind = [f"--{key}.type=function", f"--{key}.function={name}"]
    own = [re.sub("^--(no-)?", rf"--\1{key}.", argument) for argument in arguments[1:]]
    task = ["--environments.0.type=dataset", '--environments.0.rows=[{"prompt": "?", "answer": "!"}]']
    try:
        environment: Any = load([*task, *kind, *own], REGISTRIES).config.environments[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{key}.", "")) from None
    return environment.reward


@dataclass(frozen=True)
class Grade:
    """The `grade` of a `ToolQA` as a reward."""

    grade: Callable[[str, str], bool]

    async def score(self, attempt: Attempt) -> Score:
        reply = attempt.reply
        try:
            solved = any(self.grade(reply, str(each)) for each in _answers(attempt.answer))
        except Exception as error:
            at = line_in(self.grade, error)
            raise RewardError(f"grade raised {type(error).__name__}: {error}{at}") from error
        return Score(float(solved), solved)


def examples_of(path: str) -> dict[str, tuple[Example, ...]]:
    """Tasks of a file of rows, at most MAX_TASKS; answers of other rows are the wrong ones."""
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: holds no rows")
    shape = recognised(first)
    chosen = [problem(row, shape) for row in itertools.islice(itertools.chain([first], rows), MAX_TASKS)]
    if any(each.answer is None for each in chosen):
        raise ConfigError(f"{path}: expected rows with an answer, read as {shape}")
    answers = list(dict.fromkeys(_text(each.answer) for each in chosen))
    found = []
    for each in chosen:
        others = [answer for answer in answers if answer != _text(each.answer)]
        wrong = (*others, *OTHERS)[:3]
        prompt = each.messages[-1].content
        found.append(Example(prompt, each.answer, wrong, "", each.columns, each.messages))  # type: ignore[arg-type]
    return {path: tuple(found)}


def attack(
    reward: Reward,
    examples: Mapping[str, Sequence[Example]] = EXAMPLES,
    cheats: Sequence[Cheat] = CHEATS,
) -> Report:
    """Tries every cheat on every task that an honest reply solves.

    Raises:
        ConfigError: there is no such task.
    """
    return asyncio.run(_attack(reward, examples, cheats))


def show(report: Report) -> str:
    """A table of cheats, the holes, and what could not be tried."""
    width = max(len(finding.name) for finding in report.findings)
    lines = [f"{'cheat':<{width}}  replies  solved    best  what it does"]
    for each in report.findings:
        best = "-" if each.best is None else f"{each.best:.3g}"
        lines.append(f"{each.name:<{width}}  {each.tried:7}  {each.solved:6}  {best:>6}  {each.about}")
    for title, of in (("worth a solution", "holes"), ("without a result", "faults")):
        kinds = [[f"  {each.name}: {text}" for text in getattr(each, of)] for each in report.findings]
        turns = itertools.zip_longest(*kinds)  # one of each kind, then a second of each
        said = [text for turn in turns for text in turn if text is not None]
        more = [f"  ... and {len(said) - LISTED} more"] if len(said) > LISTED else []
        lines += [f"{title}:", *said[:LISTED], *more] if said else []
    if report.left_out:
        lines.append(f"left out: {len(report.left_out)} tasks that no honest reply solves")
    lines.append(
        f"{report.tasks} tasks, an honest solution is worth {report.honest:.3g} or more: "
        + (f"{report.holes} replies cheat it" if report.holes else "no cheat reaches it")
    )
    return "\n".join(lines)


async def _attack(
    reward: Reward, examples: Mapping[str, Sequence[Example]], cheats: Sequence[Cheat]
) -> Report:
    grade = _Grader(reward)
    solvable, least, left_out = [], float("inf"), []
    for kind, group in examples.items():
        for example in group:
            scores = await grade.all(attempts(HONEST, example))
            solved = [score.value for score in scores if isinstance(score, Score) and score.solved]
            if solved:
                solvable.append(example)
                least = min(least, *solved)
            else:
                fault = next((str(score) for score in scores if not isinstance(score, Score)), "not solved")
                left_out.append(f"{kind}: {shorten(example.prompt, SHOWN)!r}: {fault}")
    if not solvable:
        raise ConfigError(
            "no honest reply solves any task, so a cheat that loses proves nothing: give tasks that fit the "
            f"reward with --data. {'; '.join(dict.fromkeys(left_out))[:500]}"
        )
    findings = [await _tried(grade, cheat, solvable, least) for cheat in cheats]
    return Report(len(solvable), least, findings, left_out)


async def _tried(grade: _Grader, cheat: Cheat, examples: Sequence[Example], least: float) -> CheatResult:
    finding = CheatResult(cheat.name, cheat.about)
    for example in examples:
        made = [each for each in attempts(cheat.replies, example) if not _is_right(each, example)]
        for attempt, score in zip(made, await grade.all(made), strict=True):
            finding.tried += 1
            said = f"{shorten(example.prompt, SHOWN)!r} -> {shorten(_last(attempt), SHOWN)!r}"
            if not isinstance(score, Score):
                finding.faults.append(f"{said}: {score}")
                continue
            finding.solved += score.solved
            finding.best = score.value if finding.best is None else max(finding.best, score.value)
            if score.solved or score.value >= least:
                finding.holes.append(said)
    return finding


class _Grader:
    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._places = asyncio.Semaphore(AT_ONCE)

    async def all(self, made: Sequence[Attempt]) -> list[Score | SilvaError]:
        """The scores, in order; a fault where there is none."""
        return list(await asyncio.gather(*map(self._one, made)))

    async def _one(self, attempt: Attempt) -> Score | SilvaError:
        async with self._places:
            try:
                return await self.reward.score(attempt)
            except ConfigError:
                raise
            except SilvaError as error:
                return error


def _is_right(attempt: Attempt, example: Example) -> bool:
    """A cheat that happens to be the answer: "A" for a task whose answer is A, the word "correct"."""
    return attempt.reply.strip().casefold() == example.right.strip().casefold()


def _last(attempt: Attempt) -> str:
    last: Message = attempt.messages[-1]
    return last.raw if last.raw is not None else last.content


def _answers(answer: Any) -> Sequence[Any]:
    return answer if isinstance(answer, list | tuple) and answer else [answer]


def _text(answer: Any) -> str:
    return str(_answers(answer)[0])
