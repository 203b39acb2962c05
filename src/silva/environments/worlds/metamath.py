"""Questions of mathematics with several attempts: right at once earns 1, at the second 1/2, then 1/4.

The questions come from `path`: a file of MetaMathQA (`query`, `response` with "The answer is: 5" at its end,
`original_question`), or any table with a question and an answer. All versions of one original question are in
one split. Without `path` they are word problems about small whole numbers, made up from templates.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.data.row_shapes import problem, recognised
from silva.data.settings import FirstRows
from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated, listed
from silva.errors import ConfigError
from silva.rewards.text import extract_answer, is_right
from silva.tools.calculator import evaluate
from silva.types import Task

MARK = "The answer is:"  # stands before the answer in MetaMathQA's responses
ORIGINAL = "original_question"  # its column of the question of which a row is a version


class MetaMath(FirstRows, EnvironmentSettings):
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["metamath"] = "metamath"
    path: str = ""
    """File, folder, or data set on the hub (meta-math/MetaMathQA); empty: word problems from templates."""
    prompt: str = ""
    """Column of the question; recognised if empty."""
    answer: str = ""
    """Column of the answer; recognised if empty."""
    style: Literal["full", "compact"] = "full"
    """`full` says how to reply; `compact` shows the question alone."""
    attempts: Positive = 5
    """Turns of one episode."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    """An attempt earns this share of what the attempt before it would have earned."""
    largest: Annotated[int, Field(ge=5, le=10_000)] = 30
    """Largest number in a word problem."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of an empty answer."""

    def taskset(self) -> Tasks:
        if self.path:
            return listed(self, self._rows(), lambda task: MetaMathEpisode(self, task))
        return generated(self, self._draw, lambda task: MetaMathEpisode(self, task))

    def _rows(self) -> Iterator[Draft]:
        shape = None
        for row in self.read():
            if shape is None:
                shape = recognised(row, self.prompt, self.answer)
                if not shape.answer or shape.answer == shape.prompt:
                    raise ConfigError(
                        f"{row.where}: expected a table with a question and an answer; got {shape}"
                    )
                if MARK in str(row.values.get(shape.answer)):
                    shape = recognised(row, self.prompt, self.answer, MARK)
            messages, answer, columns = problem(row, shape)
            if not isinstance(answer, str | int | float):
                raise ConfigError(f"{row.where}: {shape.answer}: got {answer!r}, expected text or a number")
            question = "\n".join(message.content for message in messages)
            yield Draft({"question": question}, str(answer).strip(), [columns.get(ORIGINAL) or question])

    def _draw(self, rng: random.Random) -> Draft:
        number = rng.randrange(len(TEMPLATES))
        template, expression = TEMPLATES[number]
        letters = sorted({*re.findall(r"\{(\w)\}", template)})
        while True:
            values = {key: rng.randint(2, self.largest) for key in letters}
            value = evaluate(expression.format(**values))
            if value.denominator == 1 and value > 0:
                break
        first, second = rng.sample(NAMES, 2)
        text = template.format(**values, name=first, other=second, things=rng.choice(THINGS))
        return Draft({"question": text}, str(value), [[number, list(values.values())]])


class MetaMathEpisode(Attempts):
    settings: MetaMath

    def __init__(self, settings: MetaMath, task: Task) -> None:
        super().__init__(settings, task)
        self.attempts = settings.attempts
        self.decay = settings.decay
        self.format_penalty = settings.format_penalty

    def prompt(self) -> str:
        question = self.task.data["question"]
        if self.settings.style == "compact":
            return question
        return f"{question}\nReply with the answer in this form: <answer>5</answer>"

    def judge(self, reply: str) -> Verdict:
        right, valid = is_right(reply, self.task.answer), bool(extract_answer(reply))
        compact = self.settings.style == "compact"
        return Verdict(right, "no" if compact else "That is not right. Try again.", valid=valid)

    def expert_reply(self) -> str:
        return self._reply(self.task.answer)

    def random_reply(self, seed: int) -> str:
        """A number of about the right length."""
        rng = random.Random(f"{seed}/{self.attempt}")
        return self._reply(str(rng.randrange(10 ** min(len(self.task.answer), 9))))

    def _reply(self, answer: str) -> str:
        return answer if self.settings.style == "compact" else f"<answer>{answer}</answer>"


NAMES = ("Ana", "Bruno", "Chen", "Dilara", "Emil", "Farah", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena",
         "Mateo", "Nadia", "Omar", "Priya")  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers",
          "tickets")  # fmt: skip
TEMPLATES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "{a} + {b}"),
    ("{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} keep?",
     "{a} - {b}"),
    ("A box holds {a} {things}. How many {things} do {b} boxes hold?", "{a} * {b}"),
    ("{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
     "{a} / {b}"),
    ("{name} buys {a} notebooks at {b} dollars each and pays {c} dollars. How many dollars of change does "
     "{name} get?", "{c} - {a} * {b}"),
    ("{name} reads {a} pages a day for {b} days, and {c} pages on the day after. How many pages is that?",
     "{a} * {b} + {c}"),
    ("A shop sells {a} bags of {b} {things} and {c} bags of {d} {things}. How many {things} does it sell?",
     "{a} * {b} + {c} * {d}"),
    ("{name} is {a} years old, and {other} is {b} times as old. How old are the two together?",
     "{a} + {a} * {b}"),
    ("{name} finds {a} {things}, then loses {b}, and has {c} {things} left. How many {things} did {name} "
     "have at first?", "{c} + {b} - {a}"),
    ("A farmer plants {a} rows of {b} trees, but {c} of the trees die. How many trees are left?",
     "{a} * {b} - {c}"),
    ("{name} earns {a} dollars an hour and works {b} hours a day. How many dollars is that in {c} days?",
     "{a} * {b} * {c}"),
    ("A pack of {b} pens costs {a} dollars. How many dollars do {c} pens cost at the same price for each?",
     "{a} / {b} * {c}"),
    ("{name} and {other} collect {a} {things} each and put them with {b} others. They fill bags of {c}. "
     "How many bags do they fill?", "(2 * {a} + {b}) / {c}"),
)  # fmt: skip
"""Word problems and their answers; letters in braces are numbers."""
