"""What the page of an evaluation shows of turns, tool calls and tokens: means, and success against them.

From `episodes` of its summary.json (evaluation/summary.py). Not here: how it is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTS: Mapping[str, str] = {
    "turns": "turns",
    "tool_calls": "tool calls",
    "response_tokens": "tokens of replies",
    "tokens": "all tokens",
}
"""Numbers of an episode, as people call them."""
PARTS: Mapping[str, str] = {"all": "all", "solved": "solved", "unsolved": "not solved"}
ENDINGS: Mapping[str, str] = {
    "terminated": "by the environment",
    "truncated": "cut short by the environment",
    "max_turns": "at the limit of turns",
    "max_tokens": "at the limit of tokens",
    "context_overflow": "with a prompt too long for a reply",
    "timeout": "out of time",
    "error": "with an error",
}


def lengths(summary: Mapping[str, Any]) -> dict[str, Any]:
    """`head` and `rows` of the table of means, and `charts`. Of a series, the charts have the first step and
    the last one."""
    found = summary.get("episodes", [])
    steps = sorted({each["step"] for each in found})
    rows, names = list[list[Any]](), {}
    for each in found:
        several = f" at step {each['step']}" if len(steps) > 1 else ""
        name = names[each["environment"], each["step"]] = f"{each['environment']}{several}"
        for part, means in each["means"].items():
            if means["count"]:
                rows.append([name, PARTS[part], means["count"], *(means[count] for count in COUNTS)])
        against = each["reward_against"]
        if any(value is not None for value in against.values()):
            rows.append([name, "correlation with reward", None, *(against[count] for count in COUNTS)])
    ends = [each for each in found if each["step"] in (steps[0], steps[-1])]
    charts = [
        _chart(label, count, [each for each in ends if each["environment"] == label])
        for label in dict.fromkeys(each["environment"] for each in found)
        for count in COUNTS
    ]
    return {
        "head": ["environment", "episodes", "number", *COUNTS.values()],
        "rows": rows,
        "ended": [f"{names[each['environment'], each['step']]} ended {_endings(each)}" for each in found],
        "charts": [chart for chart in charts if chart["series"]],
    }


def _endings(each: Mapping[str, Any]) -> str:
    how = [(count, ENDINGS.get(why, why)) for why, count in each["stop_reasons"].items()]
    return ", ".join(f"{words} ({count:,})" for count, words in sorted(how, reverse=True))


def _chart(label: str, count: str, ends: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one environment, a series for each step."""
    series, metric = [], ""
    for each in ends:
        groups = each.get("by_count", {}).get(count, [])  # a summary of an earlier version has none
        if groups:
            metric = groups[0]["metric"]
            series.append({
                "name": f"step {each['step']}", "every": 1, "x": [group["at"] for group in groups],
                "y": [group["mean"] for group in groups], "low": [group["ci_low"] for group in groups],
                "high": [group["ci_high"] for group in groups],
                "about": [_about(group, COUNTS[count]) for group in groups],
            })  # fmt: skip
    return {"title": f"{label}, {metric} against {COUNTS[count]}", "unit": COUNTS[count], "series": series}


def _about(group: Mapping[str, Any], words: str) -> str:
    ends = f"{group['from']:,g}" + (f" to {group['to']:,g}" if group["to"] > group["from"] else "")
    return f"{group['count']:,} episodes of {ends} {words}"
