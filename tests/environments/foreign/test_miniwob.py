"""MiniWoB: against a page of four elements, and in a real browser where it and the package are installed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.environments.foreign.playing import first_task, played, texts, wrong

from silva.environments.foreign import miniwob
from silva.environments.foreign.miniwob import LEFT_OUT, MiniWob, action
from silva.environments.foreign.miniwob_browser import (
    Action,
    Browser,
    BrowserGoneError,
    PageView,
    page,
    pages,
)
from silva.errors import CapabilityError, ConfigError
from silva.types import Message, Task

TEXT = '[4] input_text#name value=""\n[5] select#size options="S, M"\n[6] input_date#day\n[7] button "OK"'
VIEW = PageView("Enter Ann.", TEXT, {4: "field", 5: "select", 6: "value", 7: ""}, {5: ("S", "M")})


class Page:
    """Solved by the name and then the button; the raw reward of another name is -1, of none 0."""

    def open(self, task: str, seed: int, mode: str) -> PageView:
        self.name = ""
        return VIEW._replace(asked=f"Enter Ann in {task} {seed} {mode}.")

    def act(self, action: Action) -> PageView:
        if action.verb == "type":
            self.name = action.text
        if action == Action("click", 7):
            reward = 0.3 if self.name == "Ann" else -float(bool(self.name))
            return PageView("", "", {}, {}, done=True, reward=reward)
        return VIEW._replace(text=TEXT.replace('value=""', f'value="{self.name}"'))

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Settings, in place of the package and the browser."""
    for name in ("enter-text", "click-test", "drag-box"):
        (tmp_path / f"{name}.html").touch()
    monkeypatch.setattr(miniwob, "pages", lambda: tmp_path)
    monkeypatch.setattr(miniwob, "page", Page)
    return MiniWob(problems=3, held_out=2, max_actions=6)


def test_the_first_text_has_task_commands_and_elements(fake) -> None:
    task = first_task(fake)
    first, _ = played(fake, task=task)
    lines = first.messages[0].content.split("\n")
    asked = "Enter Ann in {task} {seed} {mode}.".format(**task.data)
    assert lines[0] == f"A web page, as its elements. Your task in it: {asked}"
    assert lines[1].startswith("Commands: click REF; ")
    assert lines[3:] == [*TEXT.split("\n"), "Actions left: 6."]


def test_a_raw_reward_above_0_is_a_solution_and_nothing_else_pays(fake) -> None:
    for name, score in (("Ann", 1.0), ("Bo", 0.0), ("", 0.0)):
        _, (typed, done) = played(fake, f"type 4 {name}", "<answer>click [7]</answer>")
        assert f'value="{name}"' in texts([typed])[0] and typed.rewards == {"score": 0.0}
        assert done.terminated and done.rewards == {"score": score} and done.metrics["success"] == score


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ('type 4 He said "A.b!"', Action("type", 4, 'He said "A.b!"')),
        ("Type [4]", Action("type", 4)),
        ("type 6 2020-01-31", Action("fill", 6, "2020-01-31")),
        ("select 5 M", Action("select", 5, "M")),
        ("press Ctrl+A", Action("press", 0, "control+a")),
        ("press Down", Action("press", 0, "arrowdown")),
        ("press +", Action("press", 0, "+")),
        ("press Q", Action("press", 0, "Q")),
        ("scroll 4 down", Action("scroll", 4, "down")),
        ("wait", Action("wait")),
        ("jump 4", "There is no such command. Commands: click REF"),
        ("click", "There is no element without a number in this page."),
        ("click 9", "There is no element 9 in this page."),
        ("click ²", "There is no element ² in this page."),
        ("click 5", "Element 5 is a list of options: select 5 OPTION."),
        ("type 7 x", "Element 7 takes no text."),
        ("select 5 L", "Element 5 has no option 'L'."),
        ("select 4 L", "Element 4 has no options."),
        ("scroll 4 left", "Scroll up or down: scroll 4 down."),
        ("press control+w", "There is no key 'control+w'. Keys: a character, backspace"),  # closes a window
        ("press", "There is no key ''."),
    ],
)
def test_a_command_is_read_or_answered(fake, command: str, meant: Action | str) -> None:
    if isinstance(meant, Action):
        assert action(command, VIEW) == meant
        return
    _, (step,) = played(fake, command)
    assert texts([step])[0].startswith(meant) and "\nActions left: 5." in texts([step])[0]
    assert step.metrics["action_is_valid"] == 0.0 and step.shaped["format"] == -0.1 and not step.terminated


def test_seeds_and_parts_say_what_is_held_out(fake) -> None:
    def found(settings: MiniWob, split) -> set[tuple[object, ...]]:
        return {tuple(task.data.values()) for task in settings.taskset().tasks(split)}

    both = ("click-test", "enter-text")  # drag-box is left out
    assert found(fake, "train") == {(task, seed, "train") for task in both for seed in (2, 3, 4)}
    assert found(fake, "eval") == {(task, seed, "test") for task in both for seed in (0, 1)}
    one = fake.model_copy(update={"tasks": ("drag-box",)})
    assert found(one, "eval") == {("drag-box", 0, "test"), ("drag-box", 1, "test")}
    with pytest.raises(ConfigError, match=r"tasks: got 'click-tset', expected some of click-test, drag-box"):
        fake.model_copy(update={"tasks": ("click-tset",)}).taskset()


def test_nothing_is_wrong_with_the_fake(fake) -> None:
    assert wrong(fake) == []


def test_a_missing_package_is_named_with_the_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "miniwob", None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps 'miniwob>=1\.1\.0'"):
        MiniWob().taskset()


def test_a_missing_browser_is_named(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="no chromium on the path: install it"):
        Browser()


@pytest.fixture
def real():
    try:
        pages()
    except ConfigError:
        pytest.skip("pip install --no-deps miniwob")
    if not shutil.which("chromium"):
        pytest.skip("no chromium")
    return MiniWob(max_actions=12)


def problem(name: str, seed: int = 1) -> Task:
    return Task(name, "miniwob", 0, {"task": name, "seed": seed, "mode": "train"}, None, "train")


LAST = ("click", 'button.* "(Submit|Login)"')
# A verb, what stands in the line of its element, the rest of the command; of the task: its quoted texts, what
# is to be selected, its date.
SOLUTIONS: dict[str, Callable[[list[str], list[str], str], list[tuple[str, ...]]]] = {
    "click-test": lambda said, chosen, day: [("click", "Click Me!")],
    "click-button": lambda said, chosen, day: [("click", f'button "{said[0]}"')],
    "enter-text": lambda said, chosen, day: [("type", "#tt", *said), LAST],
    "enter-date": lambda said, chosen, day: [("type", "#tt", day), LAST],
    "login-user": lambda said, chosen, day: [("type", "#user", said[0]), ("type", "#pass", said[1]), LAST],
    "choose-list": lambda said, chosen, day: [("select", "#options", ", ".join(chosen)), LAST],
    "click-scroll-list": lambda said, chosen, day: [*(("select", "#options", each) for each in chosen), LAST],
    "copy-paste": lambda said, chosen, day: [
        ("click", "#to-copy"), ("press", "", "control+a"), ("press", "", "control+c"),
        ("click", "#answer-input"), ("press", "", "control+v"), LAST,
    ],
}  # fmt: skip


async def solved(settings: MiniWob, task: Task, pause: float = 0.0) -> tuple[list[str], float]:
    """All texts of an episode that is played to its solution, and what it earned."""
    episode = settings.taskset().environment(task)
    shown = [(await episode.reset()).messages[0].content]
    asked, earned = shown[0].split("\n")[0].partition("Your task in it: ")[2], 0.0
    chosen = re.sub(r"Select | from the.*", "", asked).split(", ")
    day = re.sub(r".*?(\d+)/(\d+)/(\d+).*", r"\3-\1-\2", asked)
    for verb, element, *rest in SOLUTIONS[task.id](re.findall(r'"(.*?)"', asked), chosen, day):
        found = re.search(rf"\[(\d+)\] .*?{element}", shown[-1]) if element else None
        command = " ".join([verb, *([found[1]] if found else []), *rest])
        await asyncio.sleep(pause)
        step = await episode.step(Message("assistant", f"<answer>{command}</answer>"))
        shown.append(step.observation.messages[0].content)
        earned += step.rewards["score"] + step.shaped["format"]
    assert step.terminated
    await episode.close()
    return shown, earned


@pytest.mark.slow
def test_real_pages_are_solved_and_repeat_themselves_at_any_speed(real) -> None:
    """Side by side, with their commands interleaved, and alone with pauses in which a clock would go on."""

    async def together() -> list[tuple[list[str], float]]:
        return await asyncio.gather(*(solved(real, problem(name), 0.01) for name in SOLUTIONS))

    both = dict(zip(SOLUTIONS, asyncio.run(together()), strict=True))
    assert {name: earned for name, (_, earned) in both.items()} == dict.fromkeys(SOLUTIONS, 1.0)
    assert asyncio.run(solved(real, problem("copy-paste"), 0.3)) == both["copy-paste"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "command"),
    # Submit; and an icon that becomes another file, for a while without a size, once the mouse is over it.
    [(problem("enter-text"), "click 6"), (problem("social-media", 7), "click 77")],
    ids=lambda each: getattr(each, "id", ""),
)
def test_a_real_page_that_is_done_wrong_earns_nothing(real, task: Task, command: str) -> None:
    _, (step,) = played(real, command, task=task)
    assert step.terminated and step.rewards["score"] == 0.0 == step.metrics["success"]


@pytest.mark.slow
def test_a_real_fork_goes_on_alike(real) -> None:
    episode = real.taskset().environment(problem("enter-text"))

    async def run() -> None:
        await episode.reset()
        field, *_ = re.findall(r"\[(\d+)\] input", episode.scene.text)
        await episode.step(Message("assistant", f"type {field} so"))
        twin = await episode.fork(1)
        assert 'value="so"' in twin.story.state.text
        reply = Message("assistant", "press a")
        assert await twin.step(reply) == await episode.step(reply)
        await twin.close()
        await episode.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_browser_that_is_killed_is_no_result_and_the_next_episode_has_a_new_one(real) -> None:
    episode = real.taskset().environment(problem("click-test"))

    async def run() -> None:
        await episode.reset()
        shell = episode.story.env._browser._process.pid
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        with pytest.raises(BrowserGoneError):
            await episode.step(Message("assistant", "wait"))
        await episode.close()

    asyncio.run(run())
    assert asyncio.run(solved(real, problem("click-test")))[1] == 1.0


@pytest.mark.slow
def test_a_page_reaches_no_network(real) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        where = f"http://127.0.0.1:{server.getsockname()[1]}/"
        tab = page()
        tab._call("Runtime.evaluate", expression=f"fetch('{where}').catch(() => 0)", awaitPromise=True)
        tab.close()
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.slow
def test_the_browser_and_its_folder_go_with_a_process_that_is_killed(real) -> None:
    """Its folder, where all its files are, is removed when it has ended."""
    code = (
        "from silva.environments.foreign.miniwob_browser import Browser\n"
        "import time; browser = Browser(); print(flush=True); time.sleep(60)"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket in it must be short
        command, env = [sys.executable, "-c", code], {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert len(os.listdir(folder)) == 1
            process.send_signal(signal.SIGKILL)
        until = time.monotonic() + 120
        while os.listdir(folder):
            assert time.monotonic() < until, "the browser lives on"
            time.sleep(0.05)


def test_what_is_left_out_are_pages_of_the_package(real) -> None:
    known = {path.stem for path in pages().glob("*.html")}
    left_out = [task for group in LEFT_OUT.values() for task in group]
    assert known.issuperset(left_out) and len({*left_out}) == len(left_out) and len(known) == 130
    assert len(real.taskset().tasks("eval")) == 5 * (130 - len(left_out))
    with pytest.raises(CapabilityError, match="miniwob has no experts"):
        real.taskset().environment(problem("click-test")).expert_reply()
