from __future__ import annotations

import io

from rich.console import Console

from silva.monitoring.terminal import (
    LiveTerminal,
    PlainTerminal,
    Progress,
    Terminal,
    duration,
    make_terminal,
)

EVAL = {"eval/lake/success": 0.43, "eval/lake/success_ci_low": 0.351, "eval/lake/success_ci_high": 0.512}
STEP = {"reward/raw": 0.3125, "reward/shaped": 0.28, "success/lake": 0.42, "train/loss": 0.0123,
        "train/grad_norm": 0.5, "perf/tokens_per_second": 1812.4}  # fmt: skip


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(step: int = 0) -> tuple[io.StringIO, Time, Progress, PlainTerminal]:
    out, clock = io.StringIO(), Time()
    progress = Progress("walk", 40, step=step, clock=clock)
    terminal = make_terminal("auto", progress, Console(file=out, width=80))
    assert isinstance(terminal, PlainTerminal)
    return out, clock, progress, terminal


def test_plain_prints_one_line_per_step_and_per_eval() -> None:
    out, clock, progress, terminal = plain(step=2)
    terminal.start()
    for done in range(50):
        progress.set_stage("rollout", done, 64, "lake")
        terminal.stage()
    clock.now = 20.0
    progress.set_step(4, STEP)
    terminal.step(4, STEP)
    progress.set_step(4, EVAL)
    terminal.step(4, EVAL)
    assert out.getvalue() == (
        "walk: 40 steps, resumed after step 2\n"
        "step 4/40: reward 0.312 (shaped 0.280), lake success 42.0%, loss 0.0123, gradient 0.5, "
        "1,812 tokens/s, 6m 00s left\n"
        "eval at step 4: lake success 43.0% [35.1%, 51.2%]\n"
    )


def test_an_evaluation_says_what_was_left_out_and_what_that_could_change() -> None:
    out, _, progress, terminal = plain()
    lost = {"eval/lake/left_out": 3, "eval/lake/success_bound_low": 0.4, "eval/lake/success_bound_high": 0.6}
    numbers = EVAL | lost | {"eval/lake/reward": 0.5, "eval/sea/left_out": 8}
    progress.set_step(4, numbers)
    terminal.step(4, numbers)
    assert out.getvalue() == (
        "eval at step 4: lake reward 0.500 (3 episodes left out), lake success 43.0% [35.1%, 51.2%] "
        "(3 episodes left out: 40.0% to 60.0% with them), sea no result, all 8 episodes left out\n"
    )


def test_plain_gives_a_sign_of_life_from_a_long_stage_only() -> None:
    out, clock, progress, terminal = plain()
    for second in range(0, 70, 5):
        clock.now = float(second)
        progress.set_stage("rollout", second, 64, "lake")
        terminal.stage()
    assert out.getvalue() == (
        "  rollout 30/64, waiting for lake, 30s\n"
        "  rollout 60/64, waiting for lake, 1m 00s\n"
    )  # fmt: skip


def test_live_shows_stage_numbers_interval_and_messages() -> None:
    out, clock = io.StringIO(), Time()
    progress = Progress("walk", 40, clock=clock)
    console = Console(file=out, width=100, force_terminal=True)
    terminal = make_terminal("auto", progress, console)
    assert isinstance(terminal, LiveTerminal)
    progress.set_step(0, EVAL)
    clock.now = 10.0
    progress.set_step(1, STEP)
    progress.set_stage("rollout", 12, 64, "lake")
    clock.now = 13.0
    progress.messages.append(("info", "checkpoint written\nsecond line"))
    record = Console(file=io.StringIO(), width=100, record=True)
    record.print(terminal.render())
    text = record.export_text()
    for expected in (
        "─ walk ─",
        "step 1/40",
        "13s, 6m 27s left",
        "rollout 12/64, waiting for lake, 3s",
        "0.312 raw, 0.280 shaped",
        "lake 42.0%",
        "lake success 43.0% [35.1%, 51.2%] at step 0",
        "1,812 tokens/s",
        "checkpoint written …",
    ):
        assert expected in text
    assert "second line" not in text


def test_live_keeps_warnings_above_the_view() -> None:
    out = io.StringIO()
    terminal = LiveTerminal(Progress("walk", 4), Console(file=out, width=60, force_terminal=True))
    terminal.start()
    terminal.message("only in the panel", "info")
    terminal.message("2 episodes failed", "warning")
    terminal.close()
    assert "warning: 2 episodes failed" in out.getvalue()
    assert "only in the panel" not in out.getvalue()


def test_nothing_is_cut_at_80_columns() -> None:
    """Lines in the panel wrap; a result stays above it, and the last frame waits for nothing."""
    out = io.StringIO()
    terminal = LiveTerminal(Progress("walk", 4), Console(file=out, width=80, force_terminal=True))
    result = (
        "held-out success, frozen_lake: 38.0% [29.1%, 47.8%] of 100 before, 27.0% [19.3%, 36.4%] of 100 after"
    )
    news = " ".join(f"word{i}" for i in range(40))
    terminal.start()
    terminal._progress.messages += [("info", news), ("result", result)]
    terminal.message(result, "result")
    terminal.close()
    assert result in out.getvalue()
    record = Console(file=io.StringIO(), width=80, record=True)
    record.print(terminal.render())
    text = record.export_text()
    assert " ".join(text.replace("│", " ").split()).count(news) == 1
    assert "…" not in text and "now" not in text and "held-out" not in text


def test_markup_and_control_characters_have_no_effect() -> None:
    out = io.StringIO()
    terminal = PlainTerminal(Progress("walk", 4), Console(file=out, width=60, force_terminal=True))
    terminal.message("[red]x[/red] \x1b]0;owned\x07 [link=file:///]y[/link]", "info")
    assert out.getvalue() == "[red]x[/red] \ufffd]0;owned\ufffd [link=file:///]y[/link]\n"


def test_off_is_silent_even_in_a_terminal() -> None:
    out = io.StringIO()
    terminal = make_terminal("off", Progress("walk", 4), Console(file=out, force_terminal=True))
    assert type(terminal) is Terminal
    terminal.start()
    terminal.message("hello", "error")
    assert out.getvalue() == ""


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 59.4, 60, 187, 3599.6, 7500)] == [
        "0s", "59s", "1m 00s", "3m 07s", "1h 00m", "2h 05m"]  # fmt: skip
