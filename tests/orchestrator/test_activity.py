"""What is said of faults and of environments that block: once a kind, with the traceback in run.log."""

from __future__ import annotations

from silva.orchestrator.activity import MOST_KINDS, Activity


class Said:
    def __init__(self):
        self.shown, self.logged, self.stages = [], [], []

    def message(self, text, level):
        self.shown.append((level, text))

    def log(self, text, level):
        self.logged.append(text)

    def stage(self, *what):
        self.stages.append(what)


def test_the_first_fault_of_each_kind_is_shown_and_its_traceback_logged():
    activity = Activity(said := Said())
    for number in range(3):
        activity.fault("lake", f"step: ValueError: row {number} (lake.py:4)", f"Traceback {number}")
    activity.fault("sea", "step: ValueError: row 9 (lake.py:4)", "Traceback 9")
    activity.fault("lake", "prompt of 30 tokens", "")
    assert said.shown == [
        ("warning", "lake: an episode failed: step: ValueError: row 0 (lake.py:4) (traceback in run.log)"),
        ("warning", "sea: an episode failed: step: ValueError: row 9 (lake.py:4) (traceback in run.log)"),
        ("warning", "lake: an episode failed: prompt of 30 tokens"),
    ]
    assert said.logged == [
        "lake: the first fault of its kind:\nTraceback 0",
        "sea: the first fault of its kind:\nTraceback 9",
    ]


def test_errors_that_never_repeat_do_not_fill_the_terminal():
    activity = Activity(said := Said())
    for number in range(100):
        activity.fault("lake", f"no key k{number}", "trace")
    assert len(said.shown) == MOST_KINDS + 1 and len(said.logged) == MOST_KINDS
    assert said.shown[-1] == ("warning", "further kinds of errors are only counted")


def test_an_environment_that_blocks_is_named_once_with_what_to_do():
    activity = Activity(said := Said())
    for seconds in (0.25, 0.5, 0.25, 5.0):
        activity.blocked("lake", "step", seconds)
    activity.blocked("sea", "reset", 0.5)
    ((level, text),) = said.shown
    assert level == "warning" and text.startswith("lake: step blocks the event loop, 0.5 s at a time")
    assert "asyncio.to_thread" in text
    activity.blocked("sea", "reset", 5.0)
    assert [text.partition(",")[0] for _, text in said.shown[1:]] == ["sea: reset blocks the event loop"]


def test_whom_episodes_wait_for_is_a_heartbeat():
    activity = Activity(said := Said())
    activity.groups(1, 4)
    activity.turn("a", "engine")
    activity.turn("b", "lake")
    activity.turn("c", "engine")
    activity.turn("b", None)
    assert said.stages[-2:] == [
        ("rollout", 1, 4, "2 engine, 1 lake"), ("rollout", 1, 4, "2 engine")]  # fmt: skip
