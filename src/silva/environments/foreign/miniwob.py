"""Pages of MiniWoB++ (Liu et al. 2018, arXiv:1802.08802) in a real browser, by the text of their elements.

    type = "miniwob"                 # pip install --no-deps miniwob; it needs chromium
    tasks = ["click-test", "enter-text"]

    <think>The button is 4.</think><answer>click 4</answer>

An episode is solved if the page's raw reward is above 0, as published; then it earns 1, otherwise 0. There is
no decay with time, as the page's clock stands still between actions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from silva.config.sections import Positive
from silva.environments.foreign.miniwob_browser import (
    ARROWS,
    HELD,
    KEYS,
    PROGRAM,
    Action,
    BrowserPage,
    PageView,
    page,
    pages,
)
from silva.environments.foreign.text_adventure import Adventure, AdventureSettings, Scene, Story
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError, ConfigError
from silva.rewards.text import extract_answer

if TYPE_CHECKING:
    from silva.protocols import TaskSet

LONGEST = 1000  # characters of a command
# What commands on elements cannot do.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "dragging": (
        "drag-box", "drag-circle", "drag-cube", "drag-items", "drag-items-grid", "drag-shapes",
        "drag-shapes-2", "drag-single-shape", "drag-sort-numbers", "draw-circle", "draw-line",
        "highlight-text", "highlight-text-2", "resize-textarea", "daily-calendar",
    ),
    "a place in a picture": (
        "bisect-angle", "circle-center", "count-sides", "find-midpoint", "hot-cold", "right-angle",
        "use-colorwheel", "use-colorwheel-2",
    ),
    "what moves or flashes": (
        "chase-circle", "hover-shape", "moving-items", "simon-says", "stock-market",
    ),
}  # fmt: skip
FORMS = (
    "Commands: click REF; type REF TEXT (in place of what a field holds); select REF OPTION; press KEY, such "
    "as enter, tab, arrowdown, pagedown, control+a, control+c, control+v; scroll REF down or up; wait (a "
    "second, as any command). REF is the number of an element."
)
SYNONYMS = {"ctrl": "control", "return": "enter", "esc": "escape"} | {each[5:]: each for each in ARROWS}
NAMES = (*KEYS, *(f"{held}+{key}" for held, keys in HELD.items() for key in keys))
_COMMAND = re.compile(r"(click|type|select|press|scroll|wait)(?:\s+(\S+)(?:\s(.*))?)?", re.IGNORECASE)


class MiniWob(AdventureSettings):
    """Small web pages of MiniWoB++, in a real browser."""

    licence: ClassVar[str] = "MIT (miniwob)"
    needs: ClassVar[str] = "chromium"
    packages: ClassVar[tuple[str, ...]] = ("miniwob",)
    programs: ClassVar[tuple[str, ...]] = (PROGRAM,)

    type: Literal["miniwob"] = "miniwob"
    tasks: tuple[str, ...] = ()
    """Names of pages; empty: all but those that need dragging, a place in a picture, or what moves."""
    problems: Positive = 50
    """Problems of each page to train on."""
    held_out: Positive = 5
    """Problems of each page that evaluate, with the test part of the few pages that have parts."""
    show_commands: bool = False
    """List elements that can be clicked below every text."""
    max_actions: Positive = 30
    """Commands of one episode."""

    def taskset(self) -> TaskSet:
        known = sorted(path.stem for path in pages().glob("*.html"))
        if unknown := [task for task in self.tasks if task not in known]:
            raise ConfigError(
                f"environment miniwob: tasks: got {unknown[0]!r}, expected some of {', '.join(known)}"
            )
        left_out = {task for group in LEFT_OUT.values() for task in group}
        tasks = self.tasks or tuple(task for task in known if task not in left_out)

        def drafts(mode: str, seeds: range) -> list[Draft]:
            return [Draft({"task": task, "seed": seed, "mode": mode}) for task in tasks for seed in seeds]

        note = (
            f"{self.label}: problems are told apart by their seeds, so a held-out one may be trained on too"
        )
        return listed(
            self,
            drafts("train", range(self.held_out, self.held_out + self.problems)),
            lambda task: MiniWobEpisode(self, task),
            evaluation=drafts("test", range(self.held_out)),
            notes=[note],
        )


class MiniWobEpisode(Adventure):
    """One problem of a page."""

    example: ClassVar[str] = "wait"
    settings: MiniWob
    story: MiniWobStory | None

    def open(self) -> MiniWobStory:
        return MiniWobStory(page(), **self.task.data)

    def rules(self) -> str:
        assert self.story is not None
        return f"A web page, as its elements. Your task in it: {self.story.state.asked}\n{FORMS}"

    def read(self, reply: str) -> str:
        """With capitals and quotes: they may be part of a text."""
        text = extract_answer(reply).strip().strip("`").strip()
        return text if len(text) <= LONGEST and text.isprintable() else ""

    def effective(self, command: str, before: Scene) -> bool:
        return self.scene != before

    def expert_reply(self) -> str:
        """
        Raises:
            CapabilityError: always: the package has no experts.
        """
        raise CapabilityError(f"environment {self.settings.label}: miniwob has no experts")


class MiniWobStory(Story):
    """A problem of a page, in a browser."""

    env: BrowserPage
    state: PageView

    def __init__(self, env: BrowserPage, task: str, seed: int, mode: str) -> None:
        super().__init__(env, ())
        self.problem = task, seed, mode

    def start(self) -> Scene:
        self.state = self.env.open(*self.problem)
        return self.scene()

    def send(self, command: str) -> Scene:
        self.state = self.env.act(action(command, self.state))
        return self.scene()

    def refusal(self, command: str) -> str:
        try:
            action(command, self.state)
        except ValueError as error:
            return str(error)
        return ""

    def plan(self, said: Sequence[str]) -> Sequence[str]:
        return ()

    def scene(self) -> Scene:
        view = self.state
        won = view.done and view.reward > 0
        commands = tuple(f"click {ref}" for ref, kind in view.kinds.items() if kind != "select")
        text = "The task is over." if view.done else view.text or "The page is empty."
        return Scene(text, commands, float(won), won, view.done and not won)


def action(command: str, view: PageView) -> Action:
    """What a command means in a page.

    Raises:
        ValueError: it means nothing there; the message is for the policy.
    """
    found = _COMMAND.fullmatch(command)
    if found is None:
        raise ValueError(f"There is no such command. {FORMS}")
    verb, first, rest = found[1].lower(), found[2] or "", (found[3] or "").strip()
    if verb == "wait":
        return Action(verb)
    if verb == "press":
        return _pressed(f"{first} {rest}".strip())
    number = first.strip("[]")
    ref = int(number) if number.isdecimal() else 0
    if ref not in view.kinds:
        raise ValueError(f"There is no element {first or 'without a number'} in this page.")
    kind = view.kinds[ref]
    if verb == "click" and kind == "select":
        raise ValueError(f"Element {ref} is a list of options: select {ref} OPTION.")
    if verb == "type" and kind not in ("field", "value"):
        raise ValueError(f"Element {ref} takes no text.")
    if verb == "select" and rest not in view.options.get(ref, ()):
        raise ValueError(
            f"Element {ref} has no option {rest!r}." if kind == "select" else f"Element {ref} has no options."
        )
    if verb == "scroll" and rest not in ("up", "down"):
        raise ValueError(f"Scroll up or down: scroll {ref} down.")
    return Action("fill" if kind == "value" and verb == "type" else verb, ref, rest)


def _pressed(keys: str) -> Action:
    *held, key = (SYNONYMS.get(part.lower(), part) for part in re.split(r"(?<=.)\+", keys))
    name = "+".join([*held, key]).lower() if len(keys) > 1 else keys
    if name not in NAMES and len(name) != 1:
        raise ValueError(f"There is no key {keys!r}. Keys: a character, {', '.join(NAMES)}.")
    return Action("press", text=name)
