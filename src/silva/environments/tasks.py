"""Task sets: lazy, seeded, with train and eval splits that share no content.

`generated` draws tasks from a random generator, `listed` divides a list. Which split a problem belongs
to depends on its content alone, never on a seed: no change of seed moves a held-out problem into
training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError
from silva.types import Split, Task

if TYPE_CHECKING:
    from silva.protocols import Environment

MAX_DRAWS = 2000  # in vain, before a world is called too small


class Draft(NamedTuple):
    """What a task is about. `key` is what must not occur in both splits: the whole content where None."""

    data: Mapping[str, Any]
    answer: Any = None
    key: Any = None

    def digest(self) -> str:
        """Hexadecimal digest of the key; a key must be a function of the content."""
        return _digest(self.key if self.key is not None else [self.data, self.answer])


Build = Callable[[Task], "Environment"]


def generated(
    settings: EnvironmentSettings,
    draw: Callable[[random.Random], Draft],
    build: Build,
    eval_share: float = 0.25,
) -> Tasks:
    """Tasks drawn one by one: train task i depends on (seed, i) only.

    Args:
        draw: makes a draft from a seeded generator of random numbers.
        build: makes the environment of a task.
        eval_share: the share of all contents that is kept for evaluation.
    """
    return Tasks(settings, build, _Drawn(settings, draw, eval_share))


def listed(settings: EnvironmentSettings, drafts: Iterable[Draft], build: Build) -> Tasks:
    """Tasks from a list: whole keys go to eval until it has `eval_size` contents, the others to train.

    Training goes through its part again and again, in a new order each time.
    """
    return Tasks(settings, build, _Listed(settings, drafts))


class Tasks:
    """A `silva.protocols.TaskSet`. `tasks("eval")` is drawn at once, so that a world that is too small
    says so at the start (ConfigError); training tasks are made when they are looked up."""

    def __init__(self, settings: EnvironmentSettings, build: Build, source: _Drawn | _Listed) -> None:
        self._settings = settings
        self._build = build
        self._source = source

    def tasks(self, split: Split) -> Sequence[Task]:
        if split == "eval":
            drafts = self._source.evaluation()
            return [self._task("eval", i, draft) for i, draft in enumerate(drafts)]
        self._source.training(0)  # raises where nothing is left to train on
        return _Lazy(self._settings.train_size, lambda i: self._task("train", i, self._source.training(i)))

    def environment(self, task: Task) -> Environment:
        return self._build(task)

    def _task(self, split: Split, index: int, draft: Draft) -> Task:
        seed = int(_digest([self._settings.label, self._settings.seed, split, index])[:12], 16)
        name = f"{self._settings.label}/{split}/{index}"
        return Task(name, self._settings.label, seed, draft.data, draft.answer, split)


class _Drawn:
    def __init__(
        self, settings: EnvironmentSettings, draw: Callable[[random.Random], Draft], eval_share: float
    ) -> None:
        self.settings = settings
        self.draw = draw
        self.eval_share = eval_share
        self._evaluation: list[Draft] | None = None

    def training(self, index: int) -> Draft:
        seen = set()
        for attempt in range(MAX_DRAWS):
            draft = self._attempt("train", index, attempt)
            if not self._held_out(draft):
                return draft
            seen.add(draft.digest())
        raise ConfigError(
            f"environment {self.settings.label}: too small to train on: {MAX_DRAWS} draws gave "
            f"{len(seen)} distinct problems, all held out for evaluation"
        )

    def evaluation(self) -> list[Draft]:
        if self._evaluation is None:
            self._evaluation = self._held_out_drafts()
        return self._evaluation

    def _held_out_drafts(self) -> list[Draft]:
        wanted = self.settings.eval_size
        drafts: dict[str, Draft] = {}
        in_vain, attempt = 0, 0
        while len(drafts) < wanted:
            draft = self._attempt("eval", 0, attempt)
            attempt += 1
            content = _digest([draft.data, draft.answer])
            if content in drafts or not self._held_out(draft):
                in_vain += 1
            else:
                drafts[content] = draft
                in_vain = 0
            if in_vain == MAX_DRAWS:
                raise ConfigError(
                    f"environment {self.settings.label}: eval_size is {wanted}, but {attempt} draws gave "
                    f"only {len(drafts)} distinct held-out problems: lower eval_size or make the world larger"
                )
        return list(drafts.values())

    def _attempt(self, split: Split, index: int, attempt: int) -> Draft:
        return self.draw(
            random.Random(f"{self.settings.label}/{self.settings.seed}/{split}/{index}/{attempt}")
        )

    def _held_out(self, draft: Draft) -> bool:
        return int(draft.digest()[:8], 16) < self.eval_share * 2**32


class _Listed:
    def __init__(self, settings: EnvironmentSettings, drafts: Iterable[Draft]) -> None:
        self.settings = settings
        distinct = {_digest([draft.data, draft.answer]): draft for draft in drafts}
        by_key: dict[str, list[Draft]] = {}
        for draft in distinct.values():
            by_key.setdefault(draft.digest(), []).append(draft)
        held_out: list[Draft] = []
        self._train: list[Draft] = []
        for key in sorted(by_key):
            (held_out if len(held_out) < settings.eval_size else self._train).extend(by_key[key])
        if len(held_out) < settings.eval_size or not self._train:
            raise ConfigError(
                f"environment {settings.label}: {len(distinct)} distinct problems cannot give eval_size = "
                f"{settings.eval_size} held-out ones and leave some to train on: lower eval_size"
            )
        random.Random(f"{settings.label}/{settings.seed}/eval").shuffle(held_out)
        self._evaluation = held_out[: settings.eval_size]
        self._lap = -1  # the one whose order is kept
        self._order: list[int] = []

    def training(self, index: int) -> Draft:
        lap, place = divmod(index, len(self._train))
        if lap != self._lap:
            self._lap, self._order = lap, list(range(len(self._train)))
            random.Random(f"{self.settings.label}/{self.settings.seed}/train/{lap}").shuffle(self._order)
        return self._train[self._order[place]]

    def evaluation(self) -> list[Draft]:
        return self._evaluation


class _Lazy(Sequence[Task]):
    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._range = range(size)
        self._make = make

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in self._range[index]]
        return self._make(self._range[index])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
