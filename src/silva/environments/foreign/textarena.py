"""Games of TextArena for one player.

    type = "textarena"
    id = "Mastermind-v0"

The game's own texts are shown as they are, and it says itself how to reply (often [in brackets]). The reward
comes at the end; 1 is a win, except in games that count (`COUNTS`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.environments.foreign.game import ForeignGameSettings, SeededGame, Told
from silva.environments.foreign.library import OwnRandomness, imported, plain
from silva.environments.foreign.seeds import seeded
from silva.errors import ConfigError

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "textarena>=0.7.4"
COUNTS = {"Set": "the sets found in 20 turns", "Klondike": "the cards laid down, 52 for all"}
"""Games whose reward is a count, so that 1 is no win."""


class TextArena(ForeignGameSettings):
    """A game of TextArena for one player, by its id."""

    licence: ClassVar[str] = "MIT (textarena)"
    needs: ClassVar[str] = "`id`; word games also NLTK's word lists"
    packages: ClassVar[tuple[str, ...]] = ("textarena",)
    named_by: ClassVar[str] = "id"

    type: Literal["textarena"] = "textarena"
    id: str
    """Such as "Mastermind-v0"."""
    kwargs: Mapping[str, Any] = {}
    """Further arguments of `textarena.make`."""
    instructions: str = ""
    """Stands before the game's own text."""

    def taskset(self) -> TaskSet:
        library = imported("textarena", self.type, PACKAGE)
        counts = COUNTS.get(self.id.partition("-")[0])
        if counts and "solved_at" not in self.model_fields_set:
            raise ConfigError(
                f"environment {self.label}: {self.id} pays {counts}: set solved_at to the number that is a "
                "success"
            )

        def begins(seed: int) -> Any:
            game, text = started(library, self, seed, OwnRandomness(seed))
            return [text, plain(game.state.game_state)]

        return seeded(self, begins, lambda task: TextArenaEpisode(self, task, library))


class TextArenaEpisode(SeededGame):
    settings: TextArena
    game: Any

    async def begin(self) -> str:
        self.game, text = started(self.library, self.settings, self.task.data["seed"], self.own)
        self.chance("noise")
        return "\n".join(filter(None, (self.settings.instructions, text)))

    async def play(self, reply: str) -> Told:
        with self.own, redirect_stdout(sys.stderr):
            done, _ = self.game.step(reply)
            text, valid = seen(self.game, self.library)
        if not done:
            return Told(text, valid=valid)
        rewards, about = self.game.close()
        about = (about or {}).get(0, {})
        reason = str(about.get("reason") or "")
        if not rewards or 0 not in rewards:
            raise RuntimeError(f"environment {self.settings.label}: the game ended without a reward: {about}")
        return Told(text or reason, rewards[0], True, valid=valid and not about.get("invalid_move"))


def started(library: Any, settings: TextArena, seed: int, own: OwnRandomness) -> tuple[Any, str]:
    """A game, and what it shows first. The plain game, not the one that repeats all texts in every turn."""
    plain_id = settings.id if settings.id.endswith("-raw") else f"{settings.id.removesuffix('-train')}-raw"
    try:
        with own, redirect_stdout(sys.stderr):  # some print while they make a puzzle
            game = library.make(plain_id, **settings.kwargs)
            game.reset(num_players=1, seed=seed)
            text, _ = seen(game, library)
    except LookupError as error:
        raise ConfigError(
            f"environment {settings.label}: it needs NLTK's word lists: "
            f"python -m nltk.downloader words averaged_perceptron_tagger_eng ({str(error).strip()[:80]}...)"
        ) from error
    except AssertionError as error:
        raise ConfigError(
            f"environment {settings.label}: expected a game for one player, got {settings.id!r} ({error})"
        ) from error
    except Exception as error:  # unknown id, wrong argument, a service without a key: all are the user's
        raise ConfigError(
            f"environment {settings.label}: textarena cannot start {settings.id!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return game, text


def seen(game: Any, library: Any) -> tuple[str, bool]:
    """What the game says since it was last asked, and whether the last move was allowed."""
    player, said = game.get_observation()
    kinds = library.ObservationType
    shown = [(text, kind) for sender, text, kind in said if sender != player]
    texts = [str(text).strip() for text, _ in shown]
    return "\n".join(filter(None, texts)), all(kind != kinds.GAME_ADMIN for _, kind in shown)
