"""Task sets: lazy, seeded, with train and eval splits that share no content.

`generated` draws tasks from a random generator, `listed` divides a list. Which split a problem belongs
to depends on its content and on `eval_share` alone: its key is hashed to a number from 0 to 1, and it is
held out if that number is below `eval_share`. No change of a seed, of `eval_size` or of the other problems
moves a held-out problem into training.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError
from silva.types import Split, Task

if TYPE_CHECKING:
    from silva.protocols import Environment, TaskSet

MAX_DRAWS = 2000  # in vain, before an environment is called too small
MAX_COMPARED = 10_000  # training tasks compared with the held-out ones, at most
TRAIN_SIZE, EVAL_SIZE = 4096, 256  # of a generator, where the settings say 0


class Draft(NamedTuple):
    """What a task is about, as plain JSON.

    `keys` are functions of the content that must not occur in both splits; if empty, the whole content is the
    key. A draft with keys in both splits is used in neither.
    """

    data: Mapping[str, Any]
    answer: Any = None
    keys: Sequence[Any] = ()

    def content(self) -> str:
        """Hexadecimal digest of data and answer."""
        return _digest([self.data, self.answer])

    def places(self) -> list[float]:
        return [_place(key) for key in self.keys or [[self.data, self.answer]]]

    def split(self, eval_share: float) -> Split | None:
        held_out = {place < eval_share for place in self.places()}
        return None if len(held_out) == 2 else "eval" if True in held_out else "train"


def held_out(key: Any, eval_share: float) -> bool:
    """Whether a key is kept for evaluation."""
    return _place(key) < eval_share


Build = Callable[[Task], "Environment"]


def generated(
    settings: EnvironmentSettings,
    draw: Callable[[random.Random], Draft],
    build: Build,
) -> Tasks:
    """Tasks drawn one by one: train task i depends on (settings.seed, i) only.

    Args:
        draw: makes a draft from a seeded generator of random numbers.
        build: makes the environment of a task.
    """
    return Tasks(settings, build, _Drawn(settings, draw))


def listed(
    settings: EnvironmentSettings,
    drafts: Iterable[Draft],
    build: Build,
    *,
    evaluation: Iterable[Draft] | None = None,
    notes: Sequence[str] = (),
) -> Tasks:
    """Tasks from a list: each distinct draft of training once, and all that are held out, or `train_size`
    and `eval_size` of them.

    Args:
        evaluation: what is held out, in place of a share of `drafts`; drafts with a key of theirs are left
            out of training.
        notes: see `Tasks`.
    """
    source = _Listed(settings, drafts, evaluation)
    return Tasks(settings, build, source, [*notes, *source.notes()])


def check_splits(taskset: TaskSet, label: str) -> None:
    """Refuse a task set that is too small, or a user's own task set whose splits share content.

    Every held-out task is compared with all training tasks, or with MAX_COMPARED evenly spaced ones if there
    are more. It takes as long as creating these tasks, plus about 10 µs for each.
    Task sets from `generated` and `listed` are disjoint by construction, so they are not checked.

    Raises:
        ConfigError: a task is in both splits or is not plain JSON, or the task set is too small.
    """
    evaluation = taskset.tasks("eval")
    if getattr(taskset, "only_held_out", False):
        return
    training = taskset.tasks("train")
    if isinstance(taskset, Tasks):
        return
    held_out = {_content(task, label): task for task in evaluation}
    for index in range(0, len(training), -(-len(training) // MAX_COMPARED) or 1):
        task = training[index]
        if again := held_out.get(_content(task, label)):
            raise ConfigError(
                f"environment {label}: training task {task.id} has the content of the held-out task "
                f"{again.id} ({json.dumps(task.data)[:100]}); the two splits of its taskset() must share none"
            )


class Tasks:
    """A `silva.protocols.TaskSet`. `tasks("eval")` is drawn at once and `tasks("train")` is started, so
    that an environment that is too small raises ConfigError early. Tasks are created when used.

    `notes`: what the user should know of how its data were read. `made_up`: its tasks come from a generator,
    so that some may be equal. `only_held_out`: it is a test set, so that `tasks("train")` raises.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        build: Build,
        source: _Drawn | _Listed,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = notes
        self.made_up = isinstance(source, _Drawn)
        self.only_held_out = settings.eval_share == 1
        self._settings = settings
        self._build = build
        self._source = source

    def tasks(self, split: Split) -> Sequence[Task]:
        if split == "eval":
            drafts = self._source.evaluation
            return _Lazy(len(drafts), lambda i: self._task("eval", i, drafts[i]))
        self._source.training(0)  # raises where nothing is left to train on
        return _Lazy(self._source.size, lambda i: self._task("train", i, self._source.training(i)))

    def environment(self, task: Task) -> Environment:
        return self._build(task)

    def _task(self, split: Split, index: int, draft: Draft) -> Task:
        seed = int(_digest([self._settings.label, self._settings.seed, split, index])[:12], 16)
        name = f"{self._settings.label}/{split}/{index}"
        return Task(name, self._settings.label, seed, draft.data, draft.answer, split)


class _Drawn:
    def __init__(self, settings: EnvironmentSettings, draw: Callable[[random.Random], Draft]) -> None:
        self.settings = settings
        self.draw = draw
        self.size = settings.train_size or TRAIN_SIZE

    def training(self, index: int) -> Draft:
        seen = set()
        for attempt in range(MAX_DRAWS):
            draft = self._attempt("train", index, attempt)
            if draft.split(self.settings.eval_share) == "train":
                return draft
            seen.add(draft.content())
        raise ConfigError(
            f"environment {self.settings.label}: too small to train on: {MAX_DRAWS} draws gave "
            f"{len(seen)} distinct problems, none for training: lower eval_share or make it larger"
        )

    @functools.cached_property
    def evaluation(self) -> list[Draft]:
        wanted = self.settings.eval_size
        drafts: dict[str, Draft] = {}
        in_vain, attempt = 0, 0
        while len(drafts) < (wanted or EVAL_SIZE):
            draft = self._attempt("eval", 0, attempt)
            attempt += 1
            content = draft.content()
            if content in drafts or draft.split(self.settings.eval_share) != "eval":
                in_vain += 1
            else:
                drafts[content] = draft
                in_vain = 0
            if in_vain == MAX_DRAWS:
                if drafts and not wanted:
                    break
                raise ConfigError(
                    f"environment {self.settings.label}: eval_size is {wanted or EVAL_SIZE}, but {attempt} "
                    f"draws gave only {len(drafts)} distinct held-out problems: lower eval_size, raise "
                    "eval_share or make the environment larger"
                )
        return list(drafts.values())

    def _attempt(self, split: Split, index: int, attempt: int) -> Draft:
        return self.draw(
            random.Random(f"{self.settings.label}/{self.settings.seed}/{split}/{index}/{attempt}")
        )


class _Listed:
    def __init__(
        self, settings: EnvironmentSettings, drafts: Iterable[Draft], evaluation: Iterable[Draft] | None
    ) -> None:
        self.settings = settings
        self._apart = evaluation is not None
        distinct = {draft.content(): draft for draft in drafts}
        parts: dict[Split | None, list[str]] = {"train": [], "eval": [], None: []}
        if evaluation is not None:
            apart = {draft.content(): draft for draft in evaluation}
            taken = {place for draft in apart.values() for place in draft.places()}
            for content, draft in distinct.items():
                parts[None if taken.intersection(draft.places()) else "train"].append(content)
            parts["eval"] = [*apart]
            distinct |= apart
        else:
            for content, draft in distinct.items():
                parts[draft.split(settings.eval_share)].append(content)
        self._all = list(distinct.values())

        def chosen(part: Split, size: int) -> list[Draft]:
            """Other problems change neither the choice nor the order."""
            order = sorted(parts[part], key=lambda content: _digest([settings.label, settings.seed, content]))
            return [distinct[content] for content in order[: size or None]]

        self._found = {split: len(contents) for split, contents in parts.items()}
        self._train = chosen("train", settings.train_size)
        self._held_out = chosen("eval", settings.eval_size)

    @property
    def size(self) -> int:
        return len(self._train)

    def notes(self) -> list[str]:
        settings, found = self.settings, self._found["train"]
        if settings.train_size in (0, found):
            return []
        return [
            f"{settings.label}: {self.size:,} of {found:,} training tasks are used "
            f"(train_size = {settings.train_size})"
        ]

    def training(self, index: int) -> Draft:
        if not self._train:
            raise self._too_small()
        return self._train[index]

    @property
    def evaluation(self) -> list[Draft]:
        if len(self._held_out) < (self.settings.eval_size or 1):
            raise self._too_small()
        return self._held_out

    def _too_small(self) -> ConfigError:
        settings, problems = self.settings, len(self._all)
        held_out, left, mixed = (self._found[part] for part in ("eval", "train", None))
        wanted = f"eval_size is {settings.eval_size}, but " if settings.eval_size else ""
        if self._apart:
            return ConfigError(
                f"environment {settings.label}: {wanted}{held_out} distinct problems are given for "
                f"evaluation, and {left} others for training; expected {settings.eval_size or 1} and 1"
            )
        left_out = f", {mixed} ask what belongs to both and are left out" if mixed else ""
        return ConfigError(
            f"environment {settings.label}: {wanted}of {problems} distinct problems eval_share = "
            f"{settings.eval_share:g} holds out {held_out} and leaves {left} for training{left_out}: "
            f"{_advice(settings, self._all)}"
        )


def _advice(settings: EnvironmentSettings, drafts: Sequence[Draft]) -> str:
    """Advises the smallest share, in hundredths, that holds out enough and leaves some to train on."""
    advice = ["lower eval_size"] if settings.eval_size else []
    ends = [(min(places), max(places)) for places in (draft.places() for draft in drafts)]
    for percent in range(1, 100):
        held_out = sum(high < percent / 100 for _, high in ends)
        if held_out >= (settings.eval_size or 1) and any(low >= percent / 100 for low, _ in ends):
            advice.insert(0, f"set eval_share to {percent / 100:g}")
            break
    return ", or ".join([*advice, "add problems"])


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


def _content(task: Task, label: str) -> str:
    try:
        return task.content()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {label}: task {task.id}: expected data and answer of plain JSON: {error}"
        ) from error


_ENCODE = json.JSONEncoder(sort_keys=True).encode  # json.dumps would make an encoder for every row


def _digest(content: Any) -> str:
    return hashlib.sha256(_ENCODE(content).encode()).hexdigest()[:16]


def _place(key: Any) -> float:
    """A pseudo-random number from 0 to 1 that depends on the key only."""
    return int(_digest(key)[:8], 16) / 2**32
