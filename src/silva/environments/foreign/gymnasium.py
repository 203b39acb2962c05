"""Environments of gymnasium whose observations and actions are text or names.

    type = "gymnasium"
    id = "FrozenLake-v1"
    kwargs = {is_slippery = false}

A turn shows the observation and, if the environment draws itself as text (`render_mode = "ansi"`), the
drawing. `reset` gets the seed of the task; after it, chance has the seed of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.environments.foreign.game import ForeignGameSettings, SeededGame, Told
from silva.environments.foreign.library import OwnRandomness, imported, plain
from silva.environments.foreign.seeds import seeded
from silva.environments.foreign.spaces import KNOWN, READABLE, Actions, as_text, drawn, refused
from silva.errors import CapabilityError, ConfigError, errors_about
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

TRIED = 200  # actions, to learn what the worst one costs
PACKAGE = "gymnasium>=1.0"


class Gymnasium(ForeignGameSettings):
    """An environment of gymnasium, by its id."""

    licence: ClassVar[str] = "MIT (gymnasium)"
    needs: ClassVar[str] = "`id`"
    packages: ClassVar[tuple[str, ...]] = ("gymnasium",)
    named_by: ClassVar[str] = "id"

    type: Literal["gymnasium"] = "gymnasium"
    id: str
    """Such as "FrozenLake-v1"; "module:Name-v0" imports the module that registers it."""
    kwargs: Mapping[str, Any] = {}
    """Further arguments of `gymnasium.make`."""
    actions: tuple[str, ...] = ()
    """Names of discrete actions, in their order; known ones and those that the environment gives are used."""
    instructions: str = ""
    """Stands before the first observation; the first paragraph of the environment's docstring where empty."""
    show: Literal["all", "observation", "drawing"] = "all"
    """What a turn shows: `drawing` is that of `render_mode = "ansi"`."""

    def taskset(self) -> TaskSet:
        library = imported("gymnasium", self.type, PACKAGE)
        probe = _made(library, self)
        reads = _actions(self, probe)

        def begins(seed: int) -> Any:
            with OwnRandomness(seed):
                observation, _ = probe.reset(seed=seed)
                return [plain(as_text(observation)), _drawing(self, probe)]

        worst = _worst(probe)
        return seeded(self, begins, lambda task: GymnasiumEpisode(self, task, library, reads, worst))


class GymnasiumEpisode(SeededGame):
    settings: Gymnasium

    def __init__(self, settings: Gymnasium, task: Task, library: Any, actions: Actions, worst: float) -> None:
        super().__init__(settings, task, library)
        self.actions, self.worst = actions, worst
        self.inner: Any = None

    async def begin(self) -> str:
        self.inner = _made(self.library, self.settings)
        with self.own:
            observation, _ = self.inner.reset(seed=self.task.data["seed"])
        self.chance("noise")
        paragraph = (type(self.inner.unwrapped).__doc__ or "").strip().partition("\n\n")[0]
        about = self.settings.instructions or " ".join(paragraph.split())
        return "\n".join(filter(None, (about, self.actions.rules(), self._shown(observation))))

    async def play(self, reply: str) -> Told:
        try:
            action = self.actions.read(reply)
        except ValueError:
            return Told(f"No valid action was read. {self.actions.rules()}", valid=False)
        with self.own:
            observation, reward, done, truncated, _ = self.inner.step(action)
        return Told(self._shown(observation), reward, bool(done), bool(truncated))

    def expert_reply(self) -> str:
        """
        Raises:
            CapabilityError: always: the library has no experts.
        """
        raise CapabilityError(f"environment {self.settings.label}: gymnasium has no experts")

    def random_reply(self, seed: int) -> str:
        """An action that the space draws; another in every turn."""
        action = self.actions.sample(seed * 1009 + self.actions_left)
        return f"<answer>{self.actions.write(action)}</answer>"

    async def close(self) -> None:
        await super().close()
        inner, self.inner = self.inner, None
        if inner is not None:
            await asyncio.to_thread(inner.close)

    def chance(self, what: str) -> None:
        super().chance(what)
        seed = f"{self.task.seed}/{what}".encode()
        number = int.from_bytes(seed[-8:], "big") ^ self.rng.getrandbits(32)
        base = self.inner.unwrapped
        base.np_random = self.library.utils.seeding.np_random(number)[0]

    def _shown(self, observation: Any) -> str:
        text = "" if self.settings.show == "drawing" else f"Observation: {as_text(observation)}"
        return "\n".join(filter(None, (text, _drawing(self.settings, self.inner))))

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.actions)


def _made(library: Any, settings: Gymnasium) -> Any:
    try:
        spec = library.spec(settings.id)
        draws = settings.show != "observation" and "ansi" in _render_modes(library, spec)
        mode = {"render_mode": "ansi"} if draws else {}
        made = library.make(settings.id, **{**mode, **settings.kwargs})
    except Exception as error:  # unknown id, wrong argument, a package that is missing: all are the user's
        raise ConfigError(
            f"environment {settings.label}: gymnasium cannot make {settings.id!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    part = "" if settings.show == "drawing" else refused(made.observation_space)
    if part:
        made.close()
        hint = '; or set show = "drawing"' if made.render_mode == "ansi" else ""
        raise ConfigError(
            f"environment {settings.label}: the observation space has {part}: expected {READABLE}{hint}"
        )
    if settings.show == "drawing" and made.render_mode != "ansi":
        raise ConfigError(f'environment {settings.label}: it has no render_mode "ansi" for show = "drawing"')
    return made


def _worst(probe: Any) -> float:
    """The lowest reward, from 0 down, of `TRIED` actions at random."""
    worst, over = 0.0, True
    probe.action_space.seed(0)
    # An exception is a fault of the episode that meets it.
    with OwnRandomness(0), contextlib.suppress(Exception):
        for number in range(TRIED):
            if over:
                probe.reset(seed=number)
            _, reward, done, truncated, _ = probe.step(probe.action_space.sample())
            worst, over = min(worst, float(reward)), bool(done or truncated)
    return worst


def _render_modes(library: Any, spec: Any) -> Any:
    entry = spec.entry_point
    loaded = entry if callable(entry) else library.envs.registration.load_env_creator(entry)
    return (getattr(loaded, "metadata", None) or {}).get("render_modes", ())


def _actions(settings: Gymnasium, made: Any) -> Actions:
    space = made.action_space
    names: Any = settings.actions
    if not names and type(space).__name__ == "Discrete":
        names = KNOWN.get(settings.id.rpartition(":")[2].partition("-")[0], ()) or _own_names(made.unwrapped)
        names = names if len(names) == int(space.n) else ()
    with errors_about(f"environment {settings.label}"):
        return Actions(space, names)


def _own_names(base: Any) -> list[str]:
    """Names that an environment gives its actions: `get_action_meanings()`, or an enumeration `actions`."""
    if callable(meanings := getattr(base, "get_action_meanings", None)):
        return [str(name) for name in meanings()]
    members = getattr(getattr(base, "actions", None), "__members__", {})
    return [str(name) for name in members]


def _drawing(settings: Gymnasium, made: Any) -> str:
    if settings.show == "observation" or made.render_mode != "ansi":
        return ""
    picture = made.render()
    return drawn(picture if isinstance(picture, str) else "\n".join(picture or ()))
