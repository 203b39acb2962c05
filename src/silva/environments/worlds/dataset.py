"""A data set of your own as an environment: rows with a prompt, a reward, and tools where they are wanted.

    [[environments]]
    type = "dataset"
    path = "train.jsonl"            or hub = "openai/gsm8k" and subset = "main"
    reward = "math"                 or "rewards.py:my_reward"
    tools = ["calculator"]          optional

Where prompt and answer stand is recognised by looking at the first row (see row_shapes.py), and shown with
three rows. The keys `prompt` and `answer` say it instead.
"""

from __future__ import annotations

import base64
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from silva.data.row_shapes import Problem, problem, recognised, shown
from silva.data.rows import Row, read_rows
from silva.data.settings import GivenRows
from silva.environments.bases.tool_dialogue import RewardedDialogue, ToolDialogueSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.errors import CapabilityError, ConfigError, RecordError, RewardError
from silva.protocols import ChecksTasks, Reward, Toolset
from silva.rewards.answers import references
from silva.rewards.choice import AnyReward
from silva.tools.choice import AnyTool
from silva.types import Message, Task

_COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")  # {answer}, {solution}


class Dataset(GivenRows, ToolDialogueSettings):
    needs: ClassVar[str] = "rows (`path`, `hub` or `rows`), `reward`"

    type: Literal["dataset"] = "dataset"
    eval_path: str = ""
    """The same, held out in place of a share of `path`."""
    eval_split: str = ""
    """Of the data set on the hub, held out in place of a share of `split`."""
    prompt: str = ""
    """Where the prompt stands in a row: "question", or dotted "a.b"; recognised if empty."""
    answer: str = ""
    """Where the expected answer stands; recognised where empty."""
    answer_after: str = ""
    """The answer is what follows this text: "####" in GSM8K, which is recognised."""
    without: tuple[str, ...] = ()
    """Rows with something in one of these columns are left out, such as an image or a file."""
    canary: str = ""
    """Column with the key of rows whose prompt and answer are encrypted against contamination, as those of
    xbench: base64 of the text XOR the key. Rows with nothing in it are read as they are."""
    system: str = ""
    """A system message for rows without one."""
    reward: AnyReward
    """What grades a finished dialogue: a table with `type`, the name of one, or "file.py:function"."""
    tools: tuple[AnyTool, ...] = ()
    """Tools on offer: tables with `type`, names, or "file.py:function"."""
    expert: str = "{answer}"
    """What an expert replies, for a warm start: "<answer>{answer}</answer>"; any column in braces."""

    @model_validator(mode="after")
    def _expert_replies(self) -> Self:
        if not _COLUMN.search(self.expert):
            raise ValueError('expected a column in `expert`, as in "<answer>{answer}</answer>"')
        return self

    def taskset(self) -> Tasks:
        reward, toolsets = self.reward.build(), [tool.build() for tool in self.tools]
        drafts, notes = self._drafts(self.read(), reward)
        evaluation = None
        if self.eval_path:
            evaluation = self._drafts(read_rows(self.eval_path), reward)[0]
        elif self.eval_split:
            rows = read_rows(self.hub, split=self.eval_split, subset=self.subset)
            evaluation = self._drafts(rows, reward)[0]
        return listed(
            self,
            drafts,
            lambda task: DatasetEpisode(self, task, toolsets, reward, drafts[:1000]),
            evaluation=evaluation,
            notes=notes,
        )

    def _drafts(self, rows: Iterator[Row], reward: Reward) -> tuple[list[Draft], list[str]]:
        """What the rows ask, and how they were understood.

        Raises:
            ConfigError: a row cannot be read or graded, or `expert` names a column that is not there.
        """
        kept = _without(rows, self.without, left_out := Counter[str]())
        first = next(kept, None)
        if first is None:
            raise ConfigError(f"environment {self.label}: {self.path or self.hub} holds no rows")
        shape = recognised(first, self.prompt, self.answer, self.answer_after)
        problems = []
        # Asked here and not of each row, which would take a minute.
        check = reward.check if isinstance(reward, ChecksTasks) else None
        for row in itertools.chain([first], kept):
            each = problem(_decrypted(row, self.canary, (shape.prompt, shape.answer)), shape)
            problems.append(each)
            if check:
                try:
                    check(each.answer, each.columns)
                except (RecordError, RewardError) as error:
                    raise ConfigError(f"{row.where}: {shape.answer or 'no answer'}: {error}") from None
        known = sorted({"answer", *problems[0].columns})
        if unknown := [name for name in _COLUMN.findall(self.expert) if name not in known]:
            raise ConfigError(
                f"environment {self.label}: expert: got {{{unknown[0]}}}, expected columns of the rows: "
                f"{', '.join(known)}"
            )
        said = shown(self.label, shape, problems)
        if first.left_out:
            columns = ", ".join(f"{key} ({kind})" for key, kind in first.left_out.items())
            said.append(f"  columns that are left out: {columns}")
        said += [f"{self.label}: {count:,} rows with `{key}` are left out" for key, count in left_out.items()]
        return [_draft(each) for each in problems], said


class DatasetEpisode(RewardedDialogue):
    """A `Scripted` environment: shows a row's prompt, runs called tools, grades the last reply."""

    settings: Dataset

    def __init__(
        self,
        settings: Dataset,
        task: Task,
        toolsets: Sequence[Toolset],
        reward: Reward,
        others: Sequence[Draft],
    ) -> None:
        super().__init__(settings, task, toolsets, reward)
        self.others = others

    def opening(self) -> Sequence[Message]:
        said = [(entry["role"], entry["content"]) for entry in self.task.data["messages"]]
        if self.settings.system and said[0][0] != "system":
            said.insert(0, ("system", self.settings.system))
        if self.settings.instructions:
            first = next((i for i, (role, _) in enumerate(said) if role == "user"), len(said) - 1)
            said[first] = (said[first][0], f"{self.settings.instructions}\n{said[first][1]}")
        return [self.say(text, role) for role, text in said]

    def columns(self) -> Mapping[str, Any]:
        columns: Mapping[str, Any] = self.task.data["columns"]
        return columns

    def expert_reply(self) -> str:
        """The answer of the row.

        Raises:
            CapabilityError: it has none that is text or a number, or must be found with tools.
        """
        if self.settings.tool_required:
            raise CapabilityError(f"environment {self.settings.label}: no expert knows which tools to call")
        return self._filled(self.task.answer, self.columns())

    def random_reply(self, seed: int) -> str:
        """What the expert says of another row."""
        other = random.Random(seed).choice(self.others)
        return self._filled(other.answer, other.data["columns"])

    def _filled(self, answer: Any, columns: Mapping[str, Any]) -> str:
        def text(found: re.Match[str]) -> str:
            value = answer if found[1] == "answer" else columns.get(found[1])
            try:
                return references(value)[0]
            except RecordError:
                kind = "no value" if value is None else f"a {type(value).__name__}"
                raise CapabilityError(
                    f"environment {self.settings.label}: no expert for a row with {kind} in {found[0]}"
                ) from None

        return _COLUMN.sub(text, self.settings.expert)

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.others)


def _without(rows: Iterator[Row], columns: Sequence[str], left_out: Counter[str]) -> Iterator[Row]:
    """The rows with nothing in these columns; the others are counted in `left_out`."""
    for row in rows:
        has = next((key for key in columns if row.values.get(key) or key in row.left_out), None)
        if has is None:
            yield row
        else:
            left_out[has] += 1


def _decrypted(row: Row, canary: str, columns: Sequence[str]) -> Row:
    """The row with these columns in plain text.

    Raises:
        ConfigError: there is a key, and a column is not encrypted with it.
    """
    key = str(row.values.get(canary) or "").encode() if canary else b""
    if not key:
        return row
    plain = {}
    for column in filter(None, columns):
        try:
            data = base64.b64decode(str(row.values.get(column)), validate=True)
            plain[column] = bytes(a ^ b for a, b in zip(data, itertools.cycle(key), strict=False)).decode()
        except ValueError:
            raise ConfigError(
                f"{row.where}: {column}: got {str(row.values.get(column))[:60]!r}, expected text that is "
                f"encrypted with the key in {canary}"
            ) from None
    return row._replace(values={**row.values, **plain})


def _draft(problem: Problem) -> Draft:
    messages = [{"role": message.role, "content": message.content} for message in problem.messages]
    return Draft({"messages": messages, "columns": dict(problem.columns)}, problem.answer, [messages])
