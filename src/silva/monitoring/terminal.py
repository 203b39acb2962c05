"""What a person sees while a run goes on: a live view in a terminal, plain lines in a file or pipe.

Both read one `Progress`, which the monitor keeps. Nothing here measures or writes files. Names and
messages are shown as plain text: markup and control characters in them (model output) have no effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from silva.monitoring.printable import printable
from silva.ports import CLOCK
from silva.storage.metrics import EVAL_DETAILS

Mode = Literal["auto", "live", "plain", "off"]
STYLES = {"info": "", "result": "bold", "warning": "yellow", "error": "bold red"}
QUIET_STAGE = 30.0  # seconds a stage may take before plain output says so


@dataclass
class Progress:
    """The state of a run as far as a person wants to know it. `clock` gives seconds."""

    name: str
    total_steps: int
    step: int = 0
    stage: str = "start"
    done: int = 0
    total: int = 0
    waiting_for: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    evals: dict[str, float] = field(default_factory=dict)
    eval_step: int = 0
    messages: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=5))
    clock: Callable[[], float] = CLOCK.monotonic

    def __post_init__(self) -> None:
        self.started = self.stage_started = self.clock()
        self._marks = deque([(self.step, self.started)], maxlen=20)  # when each of the last steps ended

    def set_stage(self, name: str, done: int, total: int, waiting_for: str) -> None:
        if name != self.stage:
            self.stage_started = self.clock()
        self.stage, self.done, self.total, self.waiting_for = name, done, total, waiting_for

    def set_step(self, step: int, metrics: Mapping[str, float]) -> None:
        evals = {key: value for key, value in metrics.items() if key.startswith("eval/")}
        if evals:
            self.evals, self.eval_step = evals, step
        if len(evals) < len(metrics):
            self.metrics = {key: value for key, value in metrics.items() if key not in evals}
        if step == self.step:  # the evaluation before the first step: what it took says nothing of steps
            self._marks.clear()
        self.step = max(step, self.step)
        self._marks.append((self.step, self.clock()))

    def seconds_left(self) -> float | None:
        """From the mean time of the last steps of this process; None before its first one."""
        (first, begun), (last, ended) = self._marks[0], self._marks[-1]
        if last == first:
            return None
        left = (ended - begun) / (last - first) * (self.total_steps - last)
        return max(0.0, left - (self.clock() - ended))

    def successes(self) -> list[tuple[str, float]]:
        """(environment, share of episodes solved) in training."""
        return [
            (k.removeprefix("success/"), v)
            for k, v in sorted(self.metrics.items())
            if k.startswith("success/")
        ]

    def eval_texts(self) -> list[str]:
        """One text per environment: name, mean and 95 % interval."""
        keys = [k for k in sorted(self.evals) if not k.endswith(EVAL_DETAILS)]
        measured = {k.rpartition("/")[0] for k in keys}
        lost = {k.rpartition("/")[0]: n for k, n in sorted(self.evals.items()) if k.endswith("/left_out")}
        return [
            *(_eval_text(key, self.evals) for key in keys),
            *(f"{environment.removeprefix('eval/')} no result, all {n:.0f} episodes left out"
              for environment, n in lost.items() if environment not in measured),
        ]  # fmt: skip


class Terminal:
    """What the monitor calls, under its lock. This one shows nothing; files are written all the same."""

    def start(self) -> None: ...
    def stage(self) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def message(self, text: str, level: str) -> None: ...
    def close(self) -> None: ...


def make_terminal(mode: Mode, progress: Progress, console: Console | None = None) -> Terminal:
    """`auto` is live where the console is a terminal and plain where it is a file or a pipe."""
    console = console or Console()
    if mode == "off":
        return Terminal()
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveTerminal(progress, console)
    return PlainTerminal(progress, console)


class PlainTerminal(Terminal):
    """One line per step and per evaluation, messages, and a sign of life from stages that take long."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._last = progress.clock()

    def start(self) -> None:
        p = self._progress
        begun = f", resumed after step {p.step}" if p.step else ""
        steps = f": {p.total_steps} steps" if p.total_steps else ""
        self._print(f"{p.name}{steps}{begun}")

    def stage(self) -> None:
        if self._progress.clock() - self._last >= QUIET_STAGE:
            self._print("  " + stage_text(self._progress))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        p = self._progress
        if any(not key.startswith(("eval/", "perf/")) for key in metrics):
            self._print(f"step {step}/{p.total_steps}: " + ", ".join(_step_parts(p)))
        if any(key.startswith("eval/") for key in metrics):
            self._print(f"eval at step {step}: " + ", ".join(p.eval_texts()))

    def message(self, text: str, level: str) -> None:
        self._print(_labelled(text, level))

    def _print(self, text: str) -> None:
        self._last = self._progress.clock()
        self._console.print(Text(printable(text)), soft_wrap=True)


class LiveTerminal(Terminal):
    """A panel that redraws itself; results, warnings and errors stay above it, whole."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._ended = False
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4,
                          redirect_stdout=False, redirect_stderr=False)  # fmt: skip

    def start(self) -> None:
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.refresh()

    def message(self, text: str, level: str) -> None:
        if level != "info":
            words = Text(_labelled(printable(text), level), style=STYLES.get(level, ""))
            self._console.print(words, soft_wrap=True)

    def close(self) -> None:
        self._ended = True
        self._live.stop()

    def render(self) -> RenderableType:
        p = self._progress
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(p.total_steps, 1), completed=p.step, complete_style="green", style="dim")
        left = p.seconds_left()
        left_text = duration(p.clock() - p.started) + ("" if left is None else f", {duration(left)} left")
        head.add_row(Text(f"step {p.step}/{p.total_steps}", style="bold"), bar, Text(left_text))
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column()
        if not self._ended:
            facts.add_row("now", Text(printable(stage_text(p))))
        for label, value in _facts(p):
            facts.add_row(label, value)
        parts: list[RenderableType] = [head, Text(), facts]
        news = [(level, text) for level, text in p.messages if level != "result"]
        if news:
            parts.append(Text())
            parts += [Text(_first_line(text), style=STYLES.get(level, "")) for level, text in news]
        title = Text(printable(p.name), style="bold green")
        return Panel(Group(*parts), title=title, title_align="left", border_style="green")


def _facts(p: Progress) -> Iterator[tuple[str, Text]]:
    reward = _number(p.metrics, "reward/raw")
    if reward:
        shaped = _number(p.metrics, "reward/shaped")
        yield "reward", Text.assemble((reward, "bold"), f" raw, {shaped} shaped" if shaped else " raw")
    if p.successes():
        yield "success", Text(printable(", ".join(f"{name} {value:.1%}" for name, value in p.successes())))
    if p.evals:
        texts = ", ".join(p.eval_texts())
        yield "held-out", Text.assemble((printable(texts), "bold"), (f" at step {p.eval_step}", "dim"))
    speed = p.metrics.get("perf/tokens_per_second")
    if speed is not None:
        yield "speed", Text(f"{speed:,.0f} tokens/s")


def _step_parts(p: Progress) -> Iterator[str]:
    m = p.metrics
    reward, shaped = _number(m, "reward/raw"), _number(m, "reward/shaped")
    if reward:
        yield f"reward {reward}" + (f" (shaped {shaped})" if shaped else "")
    yield from (f"{name} success {value:.1%}" for name, value in p.successes())
    for key, label in (("train/loss", "loss"), ("train/grad_norm", "gradient")):
        if key in m:
            yield f"{label} {m[key]:.3g}"
    failed = m.get("trajectories/failed", 0)
    if failed:
        yield f"{failed:.0f} of {m.get('trajectories/played', 0):.0f} episodes failed"
    if "perf/tokens_per_second" in m:
        yield f"{m['perf/tokens_per_second']:,.0f} tokens/s"
    left = p.seconds_left()
    if left is not None:
        yield f"{duration(left)} left"


def stage_text(p: Progress) -> str:
    """Such as "rollout 12/64, waiting for frozen_lake, 35s"."""
    return f"{doing(p)}, {duration(p.clock() - p.stage_started)}"


def doing(p: Progress) -> str:
    """`stage_text` without how long."""
    waiting = f", waiting for {p.waiting_for}" if p.waiting_for else ""
    return p.stage + (f" {p.done}/{p.total}" if p.total else "") + waiting


def duration(seconds: float) -> str:
    """Such as 42s, 3m 07s, 2h 05m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _labelled(text: str, level: str) -> str:
    return text if level in ("info", "result") else f"{level}: {text}"


def _first_line(text: str) -> str:
    first, *rest = printable(text).strip().split("\n")
    return first + (" …" if rest else "")


def _number(metrics: Mapping[str, float], key: str) -> str:
    return f"{metrics[key]:.3f}" if key in metrics else ""


def _eval_text(key: str, evals: Mapping[str, float]) -> str:
    name = key.removeprefix("eval/").replace("/", " ")
    share = any(word in key for word in ("success", "pass@", "accuracy"))
    form = ".1%" if share else ".3f"
    low, high = evals.get(key + "_ci_low"), evals.get(key + "_ci_high")
    interval = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    left_out = evals.get(key.rpartition("/")[0] + "/left_out")
    if left_out:
        low, high = evals.get(key + "_bound_low"), evals.get(key + "_bound_high")
        bounds = "" if low is None or high is None else f": {low:{form}} to {high:{form}} with them"
        interval += f" ({left_out:.0f} episodes left out{bounds})"
    return f"{name} {evals[key]:{form}}{interval}"
