"""Wordle: guess a secret word; each guess is answered letter by letter.

    secret crepe, guess speed:  - Y G Y -      G: right place, Y: elsewhere, -: not, or not again, in the word

A letter is marked G or Y as often as the secret has it, first G, then Y from the left. Reward 1 for the
secret (with `discount`, less for later guesses). After the last guess in vain, `partial` times the share of
letters that it had right, which is always less. Held-out words are no secrets in training.

Secrets are common English words from a list of our own, the words of a file, or, with `alphabet`, all
sequences of a few letters, which a small model can learn from scratch.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.bases.reply_form import ReplyForm
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.errors import ConfigError
from silva.rewards.text import extract_answer
from silva.types import Message, Observation, Step, Task

WORDS = Path(__file__).with_name("wordle_words.txt")
MAX_WORDS = 10_000
PAIRS = 20_000  # of words that the expert compares for a guess, at most; takes about 0.1 s
Marked = tuple[str, str]  # a guess and its marks


class Wordle(EnvironmentSettings):
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["wordle"] = "wordle"
    style: Literal["full", "compact"] = "full"
    """`full` asks in words; `compact` shows marks alone (small models trained from scratch)."""
    think: bool = True
    """Ask for thoughts in <think>...</think> before the answer; full style only."""
    length: Annotated[int, Field(ge=2, le=10)] = 5
    """Letters of a word."""
    words: str = ""
    """File of words, separated by white space; those of another length are left out. Empty: the shipped list,
    whose words have five letters."""
    alphabet: Annotated[str, Field(pattern=r"^[a-z]*$")] = ""
    """Secrets are all sequences of these letters ("abc"); empty: words."""
    only_listed: bool = False
    """A guess must be one of the words; off: any letters will do."""
    guesses: Positive = 6
    """Turns of one episode; a reply without a guess uses up one."""
    discount: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Taken off the reward for each guess before the right one."""
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """If the word is not guessed: times the share of letters that the last guess had right. A letter in the
    wrong place counts half."""
    eval_size: Positive = 128
    """Held-out tasks, disjoint from the training tasks by content."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a turn without a guess."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.alphabet and self.words:
            raise ValueError("set `alphabet` or `words`, not both")
        if len({*self.alphabet}) < len(self.alphabet) or len(self.alphabet) == 1:
            raise ValueError(f"alphabet: got {self.alphabet!r}, expected two or more different letters")
        if len(self.alphabet) ** self.length > MAX_WORDS:
            raise ValueError(
                f"alphabet of {len(self.alphabet)} letters with length = {self.length} makes "
                f"{len(self.alphabet) ** self.length} sequences: expected at most {MAX_WORDS}"
            )
        last = 1 - self.discount * (self.guesses - 1)
        if last <= self.partial:
            raise ValueError(
                f"discount = {self.discount:g}: the last of {self.guesses} guesses earns {last:g}, which "
                f"must be more than partial = {self.partial:g}"
            )
        return self

    def taskset(self) -> Tasks:
        if self.alphabet:
            words = tuple(map("".join, itertools.product(self.alphabet, repeat=self.length)))
        else:
            words = _read_words(
                Path(self.words).expanduser() if self.words else WORDS, self.length, self.label
            )
        lexicon = Lexicon(words, self.alphabet)
        drafts = [Draft({"length": self.length}, word) for word in lexicon.words]
        return listed(self, drafts, lambda task: WordleEpisode(self, task, lexicon))


class Lexicon:
    """All words, and what an expert would guess after what it was told: all episodes share it."""

    def __init__(self, words: tuple[str, ...], alphabet: str) -> None:
        self.words = words
        self.letters = frozenset(alphabet or "abcdefghijklmnopqrstuvwxyz")
        self.known = frozenset(words)
        self._open: dict[tuple[Marked, ...], tuple[str, ...]] = {(): words}
        self._best: dict[tuple[Marked, ...], str] = {}

    def open(self, told: tuple[Marked, ...]) -> tuple[str, ...]:
        """The words that would have been answered like this."""
        if told not in self._open:
            guess, marks = told[-1]
            self._open[told] = tuple(word for word in self.open(told[:-1]) if mark(guess, word) == marks)
        return self._open[told]

    def best(self, told: tuple[Marked, ...]) -> str:
        """The guess whose answer is expected to tell most (entropy); an open word if it tells as much."""
        if told not in self._best:
            left = self.open(told)
            pool = (*left, *self.words)  # of equal values, `max` takes the first
            step = -(-len(pool) * len(left) // PAIRS)
            self._best[told] = left[0] if len(left) < 3 else max(pool[::step], key=_value(left))
        return self._best[told]


class WordleEpisode(BaseEnvironment):
    settings: Wordle

    def __init__(self, settings: Wordle, task: Task, lexicon: Lexicon) -> None:
        super().__init__(settings, task)
        self.lexicon = lexicon
        full = settings.style == "full"
        self.form = ReplyForm(settings.think and full, tags=full)
        self.secret: str = task.answer
        self.guesses = 0
        self.told: tuple[Marked, ...] = ()

    async def reset(self) -> Observation:
        self._begin()
        if self.settings.style == "compact":
            return Observation((self.say("_" * self.settings.length),))
        return Observation((self.say(f"{self._rules()}\n{self._form()}\n{self._left()}"),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        guess, problem = self._read(message.content)
        self.guesses += 1
        solved = guess == self.secret
        truncated = not solved and self.guesses == self.settings.guesses
        metrics = {"action_is_valid": float(not problem)}
        marks = mark(guess, self.secret) if guess else ""
        if guess:
            self.told = (*self.told, (guess, marks))
        if solved or truncated:
            self._end()
            metrics |= {"success": float(solved), "guesses": float(self.guesses)}
        return Step(
            Observation((self.say(self._answer(guess, marks, problem)),)),
            rewards={"guessed": self._reward(marks, solved, truncated)},
            shaped={"format": self.settings.format_penalty if problem else 0.0},
            terminated=solved,
            truncated=truncated,
            metrics=metrics,
        )

    def expert_reply(self) -> str:
        """The word that narrows the list down best, whatever the secret."""
        return self.form.say(self.lexicon.best(self.told))

    def random_reply(self, seed: int) -> str:
        """Any word of the list, whatever the answers."""
        return self.form.say(random.Random(f"{seed}/{self.guesses}").choice(self.lexicon.words))

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.lexicon)

    def _reward(self, marks: str, solved: bool, last: bool) -> float:
        """Of the last guess only, so that no credit is paid twice."""
        if solved:
            return 1 - self.settings.discount * (self.guesses - 1)
        share = (marks.count("G") + 0.5 * marks.count("Y")) / self.settings.length
        return self.settings.partial * share if last else 0.0

    def _read(self, reply: str) -> tuple[str, str]:
        """The guess of a reply, or what is wrong with it."""
        guess = extract_answer(reply).strip(" \t\r\n.,;:!\"'`*[]").casefold()
        length, letters = self.settings.length, self.settings.alphabet
        if len(guess) != length or not self.lexicon.letters.issuperset(guess):
            kind = f"letters of {letters}" if letters else "letters"
            return "", f"No guess was read: one word of {length} {kind} is expected."
        if self.settings.only_listed and guess not in self.lexicon.known:
            return "", f"{guess} is not in the list of words."
        return guess, ""

    def _answer(self, guess: str, marks: str, problem: str) -> str:
        if self.settings.style == "compact":
            return marks or "?"
        if guess == self.secret:
            return "Right."
        told = f"{problem} {self._form()}" if problem else f"{' '.join(guess)}\n{' '.join(marks)}"
        return f"{told}\n{self._left()}"

    def _rules(self) -> str:
        letters = self.settings.alphabet
        what = f"sequence of {self.settings.length} letters" if letters else "word"
        of = f" of {' '.join(letters)}" if letters else f" of {self.settings.length} letters"
        return (
            f"Guess the secret {what}{of}. Each guess is answered letter by letter: G is the right letter in "
            "the right place, Y a letter that stands elsewhere, - a letter that does not occur (again)."
        )

    def _form(self) -> str:
        return self.form.ask("x" * self.settings.length)

    def _left(self) -> str:
        return f"Guesses left: {self.settings.guesses - self.guesses}."


def mark(guess: str, secret: str) -> str:
    """G, Y or - for each letter of a guess."""
    left = [there for here, there in zip(guess, secret, strict=True) if here != there]
    marks = []
    for here, there in zip(guess, secret, strict=True):
        if here == there:
            marks.append("G")
        elif here in left:
            left.remove(here)
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)


def _value(left: Sequence[str]) -> Callable[[str], float]:
    """Bits that the answer to a guess is expected to tell about the open words."""

    def value(guess: str) -> float:
        sizes = Counter(mark(guess, word) for word in left).values()
        return -sum(size * math.log2(size) for size in sizes)

    return value


@functools.cache
def _read_words(file: Path, length: int, label: str) -> tuple[str, ...]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment {label}: words = {str(file)!r} cannot be read: {error}") from error
    found = {word.casefold() for word in text.split() if len(word) == length}
    words = tuple(sorted(word for word in found if word.isascii() and word.isalpha()))
    if not 2 <= len(words) <= MAX_WORDS:
        raise ConfigError(
            f"environment {label}: {file} has {len(words)} words of {length} letters from a to z: expected 2 "
            f"to {MAX_WORDS}"
        )
    return words
