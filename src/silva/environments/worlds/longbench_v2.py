"""Questions with four choices about a text that is too long to show: it is searched and read in parts.

`search(query)` shows the part that fits best, `scroll_down` and `scroll_up` the parts after and before. The
rows come from `path`: files of LongBench-v2 (`question`, `choice_A` to `choice_D`, `answer`, `context`). If
there is no `path`, the texts are journals of deliveries, made up. All questions about one text are in one
split.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Natural, Positive
from silva.data.retrieval import Ranking, parts
from silva.data.rows import Row
from silva.data.settings import FirstRows
from silva.environments.bases.multiple_choice import MultipleChoice
from silva.environments.bases.tool_dialogue import ToolDialogueSettings
from silva.environments.tasks import Draft, Tasks, generated, listed
from silva.environments.worlds.names import FIRST_NAMES, TOWNS
from silva.errors import ConfigError
from silva.tools.function import ToolError
from silva.types import Task, ToolCall

CHOICES = "ABCD"
SHORTEST_ENTRY = 15  # words of an entry in a journal, at least
MADE_UP_KEPT = 64  # texts that were made up and are kept with their index


class LongBench(FirstRows, ToolDialogueSettings):
    type: Literal["longbench_v2"] = "longbench_v2"
    path: str = ""
    """File, folder, or data set on the hub (zai-org/LongBench-v2); empty: texts that are made up."""
    rows: Positive = 1000
    """The first rows of it that are used; their texts are kept in memory."""
    part_words: Positive = 1500
    """Words of a part, about 2,000 tokens."""
    overlap: Natural = 190
    """Words that a part shares with the one before it."""
    words: Annotated[int, Field(ge=200, le=300_000)] = 6000
    """About as many words has a text that is made up."""
    max_tool_calls: Positive = 50
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""
    max_result_chars: Positive = 20_000
    """Characters of a part that are shown."""

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        if self.overlap >= self.part_words:
            raise ValueError(f"overlap = {self.overlap}: expected less than part_words = {self.part_words}")
        return self

    def taskset(self) -> Tasks:
        if not self.path:
            made_up = lru_cache(MADE_UP_KEPT)(
                lambda key: self._document(journal(int(key), self.words)[0]),
            )
            return generated(self, self._draw, lambda task: LongBenchEpisode(self, task, made_up))
        texts: dict[str, DividedText] = {}
        drafts = list(self._drafts(texts))
        return listed(self, drafts, lambda task: LongBenchEpisode(self, task, texts.__getitem__))

    def _document(self, text: str) -> DividedText:
        return DividedText(text, self.part_words, self.overlap)

    def _drafts(self, texts: dict[str, DividedText]) -> Iterator[Draft]:
        """Puts the texts in `texts`, by their digest: tasks hold only that."""
        for row in self.read():
            text, question, answer, *choices = (_text(row, key) for key in _COLUMNS)
            if answer not in CHOICES:
                raise ConfigError(f"{row.where}: answer: got {answer!r}, expected one of A, B, C, D")
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            texts.setdefault(key, self._document(text))
            yield Draft({"question": question, "choices": choices, "document": key}, answer, [key])

    def _draw(self, rng: random.Random) -> Draft:
        key = str(rng.randrange(10**12))
        _, entries = journal(int(key), self.words)
        who, where, what = rng.choice(entries)
        near = {item for name, town, item in entries if name == who or town == where} - {what}
        far = {item for _, _, item in entries} - near - {what}
        wrong = [*rng.sample(sorted(near), len(near)), *rng.sample(sorted(far), min(len(far), 3))][:3]
        choices = [what, *wrong]
        rng.shuffle(choices)
        question = f"What did {who} bring to {where}?"
        data = {"question": question, "choices": choices, "document": key}
        return Draft(data, CHOICES[choices.index(what)], [[key, self.words]])


_COLUMNS = ("context", "question", "answer", *(f"choice_{letter}" for letter in CHOICES))


class DividedText:
    """A text in parts. They and their index are made when they are needed, and shared by all episodes."""

    def __init__(self, text: str, words: int, overlap: int) -> None:
        self._text, self._words, self._overlap = text, words, overlap

    @cached_property
    def parts(self) -> list[str]:
        return parts(self._text, self._words, self._overlap)

    @cached_property
    def ranking(self) -> Ranking:
        return Ranking(self.parts)


class LongBenchEpisode(MultipleChoice):
    settings: LongBench
    instructions = (
        "Answer the question about a long text. `search` shows the part of it that fits some words best; "
        "`scroll_down` and `scroll_up` show the parts after and before."
    )

    def __init__(self, settings: LongBench, task: Task, document: Callable[[str], DividedText]) -> None:
        super().__init__(settings, task, [])
        self.document = document(task.data["document"])
        self.place: int | None = None  # the part shown last; None: before the first
        self.lock = asyncio.Lock()  # calls of one reply run in order, since each starts from where one is

    def own_tools(self) -> Sequence[Callable[..., Any]]:
        return [self.search, self.scroll_down, self.scroll_up]

    def expert_calls(self) -> list[ToolCall]:
        """One search; the answer is known without it."""
        return [ToolCall("search", {"query": self.task.data["question"]})]

    async def search(self, query: str) -> str:
        """Show the part of the text that fits some words best."""
        async with self.lock:
            # In a thread: the index of a long text takes seconds.
            best = await asyncio.to_thread(lambda: self.document.ranking.best(query, 1))
            if not best:
                raise ToolError("no part of the text has any of these words")
            return self._show(best[0])

    async def scroll_down(self) -> str:
        """Show the next part of the text; the first one, if none was shown yet."""
        async with self.lock:
            return self._show(0 if self.place is None else self.place + 1)

    async def scroll_up(self) -> str:
        """Show the part of the text before the one that was shown last."""
        async with self.lock:
            if not self.place:
                raise ToolError("there is nothing before it")
            return self._show(self.place - 1)

    def _show(self, place: int) -> str:
        texts = self.document.parts
        if place >= len(texts):
            raise ToolError("there is nothing after it")
        self.place = place
        return f"[part {place + 1} of {len(texts)}]\n{texts[place]}"

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.document)


def journal(seed: int, words: int) -> tuple[str, list[tuple[str, str, str]]]:
    """A text of deliveries, and who brought what where; nobody comes twice to the same town."""
    rng = random.Random(f"journal/{seed}")
    many = math.ceil(math.sqrt(words / SHORTEST_ENTRY))
    people, towns = rng.sample(FIRST_NAMES, many), rng.sample(TOWNS, many)
    pairs = [(name, town) for name in people for town in towns]
    rng.shuffle(pairs)
    lines: list[str] = []
    entries: list[tuple[str, str, str]] = []
    length = 0
    while length < words:
        name, town = pairs.pop()
        item = f"{rng.choice(_AMOUNTS)} {rng.choice(_CONTAINERS)} of {rng.choice(_GOODS)}"
        date = f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"
        entries.append((name, town, item))
        lines.append(f"On {date} {name} came to {town} and brought {item}. {rng.choice(_WEATHER)}")
        length += len(lines[-1].split())
    return "\n".join(lines), entries


def _text(row: Row, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{row.where}: {key}: got {str(value)[:80]!r}, expected text, as in LongBench-v2")
    return value.strip()


_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
           "November", "December")  # fmt: skip
_AMOUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty")
_CONTAINERS = ("baskets", "barrels", "boxes", "bundles", "crates", "jars", "sacks", "trunks")
_GOODS = ("almonds", "apples", "books", "buttons", "candles", "carrots", "coal", "copper wire", "flour",
          "glass", "honey", "ink", "lentils", "nails", "olives", "paper", "pears", "pepper", "rope", "salt",
          "soap", "tea", "tiles", "wool")  # fmt: skip
_WEATHER = ("It rained all day.", "The road was dry.", "The bridge was closed.",
            "A wheel had to be mended.", "The market was crowded.", "Nobody was at the gate.")  # fmt: skip
