"""`report.html`: a whole run in one file, built from what the run's directory holds and nothing else.

The page needs no network: style and script are inside, curves are SVG drawn by the script. What a model
wrote is hostile text: it travels as JSON in which `<`, `>` and `&` are escaped, the script shows it as
text nodes only, and the page's content security policy runs no script but the one whose hash it names.

Any of config.toml, metrics.jsonl, rollouts/, run.log and summary.json may be missing; the page shows the
rest.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.monitoring.report_forests import sample_forests
from silva.monitoring.report_lengths import lengths
from silva.monitoring.report_rollouts import sample_rollouts
from silva.monitoring.run_log import Log, read_log
from silva.ports import FILES
from silva.storage.layout import Layout
from silva.storage.metrics import BOUNDS, EVAL_DETAILS, read_metrics
from silva.storage.plain import read_plain
from silva.storage.summary import finite

Decode = Callable[[Sequence[int]], str]
Row = Mapping[str, Any]
MAX_POINTS = 1500  # of one curve; longer runs show means of neighbouring steps

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Held-out success (95 % interval)", ("eval/*/success",)),
    ("Held-out reward (95 % interval)", ("eval/*/reward",)),
    ("Held-out episodes left out", ("eval/*/left_out",)),
    ("Held-out loss in nats a token (95 % interval)", ("eval/*/nll",)),
    ("Reward", ("reward/raw", "reward/shaped")),
    ("Raw reward by environment", ("reward/*/raw",)),
    ("Success in training", ("success/",)),
    ("Loss", ("train/loss",)),
    ("Entropy (nats per token)", ("train/entropy",)),
    ("Gradient norm", ("train/grad_norm",)),
    ("Response tokens per rollout", ("rollout/response_tokens",)),
    ("Turns per rollout", ("rollout/turns",)),
    ("Seconds by phase", ("perf/seconds/",)),
    ("Groups", ("groups/",)),
    ("Tokens per second", ("perf/tokens_per_second",)),
    ("Model FLOPs utilisation of training (MFU)", ("perf/mfu",)),
    ("Tokens of a request in a step of the engine", ("perf/drafts/tokens_per_step",)),
    ("Share of reply tokens that another reply had computed", ("perf/shared_tokens",)),
)
"""Title and the metrics shown together: a key, all keys under a prefix/, or one * for an environment."""


def write_report(directory: Path, decode: Decode | None = None) -> Path:
    """Write `directory/report.html` (atomic) and return its path.

    `decode` turns token ids into text; with it rollouts can be seen token by token, coloured by
    log-probability or entropy. Raises OSError where the file cannot be written.
    """
    path = Layout(directory).report
    FILES.write_atomic(path, page(report_data(directory, decode)).encode())
    return path


def report_data(directory: Path, decode: Decode | None = None) -> dict[str, Any]:
    """Everything the page shows, as plain JSON; `problems` names files that could not be read."""
    problems: list[str] = []
    run = Layout(directory)
    return {
        **overview(directory, problems),
        "rollouts": sample_rollouts(run, decode, problems),
        "forests": sample_forests(run.rollouts, problems),
    }


def overview(directory: Path, problems: list[str]) -> dict[str, Any]:
    """What the page shows of a run besides rollouts; files that cannot be read are named in `problems`."""
    run = Layout(directory)
    metrics = _read(run.metrics, read_metrics, problems) or []
    summary = _read(run.summary, read_plain, problems)
    config = _read(run.config_toml, lambda p: p.read_text("utf-8", "replace"), problems) or ""
    settings = _read(run.config_toml, lambda _: tomllib.loads(config), problems) or {}
    log = _read(run.log, read_log, problems)
    headline, evaluation = _headline(metrics, summary, settings), run.episodes.exists()
    return {
        "name": directory.resolve().name if evaluation else settings.get("name") or directory.resolve().name,
        "evaluation": evaluation,
        "headline": {**headline, "facts": [*headline["facts"], *_circumstances(log)]},
        "warnings": log.warnings if log else [],
        "charts": charts(metrics),
        "lengths": lengths(summary) if evaluation and summary else None,
        "samples": (summary or {}).get("samples_per_task"),
        "config": [config_line(line) for line in config.splitlines()],
        "problems": problems,
    }


def page(data: Mapping[str, Any], template: str = "report") -> str:
    """A template with its style, script and data filled in."""
    folder = resources.files("silva.monitoring") / "template"
    script = "".join((folder / f"{name}.js").read_text("utf-8") for name in ("common", "figures", template))
    script = re.sub(r"^export ", "", script, flags=re.MULTILINE)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(str(data["name"])),
        "STYLE": "".join((folder / f"{name}.css").read_text("utf-8") for name in ("look", "report")),
        "SCRIPT": script,
        "SCRIPT_HASH": f"sha256-{digest}",
        "DATA": embed(data),
    }
    whole = "".join((folder / f"{name}.html").read_text("utf-8") for name in ("head", template))
    pieces = whole.split("%%")  # text, name, text, name, ..., text
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def embed(data: Any) -> str:
    """JSON that is safe inside a <script> element: it holds no character that HTML gives a meaning."""
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(path: Path, reader: Callable[[Path], Any], problems: list[str]) -> Any:
    """What `reader` makes of a file; None and a line in `problems` (once) where it is damaged."""
    if not path.exists():
        return None
    try:
        return reader(path)
    except RecordError as error:  # names the file
        problems.append(str(error))
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return None


def _headline(metrics: Sequence[Row], summary: Row | None, settings: Row) -> dict[str, Any]:
    """Evaluations before and after, and facts as (label, value, kind) in reading order.

    Without a summary they are those of the metrics and the configuration.
    """
    known: Row
    if summary is None:
        rows = [row for row in metrics if evaluations(row)]
        before, after = (evaluations(rows[0]), evaluations(rows[-1])) if rows else ([], [])
        model, steps = settings.get("model", {}), max((row["step"] for row in metrics), default=0)
        name = model.get("name") or model.get("type")
        known = {"model": name, "steps": steps, "seed": settings.get("seed")}
    else:
        known, before, after = summary, summary.get("eval_before") or [], summary.get("eval_after") or []
        if found := summary.get("results"):  # of an evaluation alone, perhaps of several models
            steps = sorted({row["step"] for row in found})
            before, after = ([row for row in found if row["step"] == step] for step in (steps[0], steps[-1]))
            before = before if len(steps) > 1 else []
            known = {**summary, "model": ", ".join(summary["models"].values())}
    seconds = known.get("seconds")
    facts = [
        ("model", known.get("model"), "text"),
        ("steps", known.get("steps"), "count"),
        ("time", seconds.get("total", math.fsum(seconds.values())) if seconds else None, "seconds"),
        ("tokens generated", known.get("tokens_generated"), "count"),
        ("tokens in rows", known.get("tokens_in_rows"), "count"),
        ("tokens trained (with a loss)", known.get("tokens_trained"), "count"),
        ("peak memory", known.get("peak_memory_bytes"), "bytes"),
        ("seed", known.get("seed"), "text"),
    ]
    shown = [fact for fact in facts if fact[1] is not None]
    return {"finished": summary is not None, "before": before, "after": after, "facts": shown}


def _circumstances(log: Log | None) -> list[tuple[str, str, str]]:
    if log is None:
        return []
    when = [("began", log.began), ("last message", log.ended)]
    return [(label, value, "text") for label, value in (*when, *log.started.items())]


def evaluations(row: Row) -> list[dict[str, Any]]:
    found = []
    for key, value in row.items():
        if key.startswith("eval/") and not key.endswith(EVAL_DETAILS) and value is not None:
            environment, _, metric = key.removeprefix("eval/").rpartition("/")
            found.append(
                {
                    "environment": environment,
                    "metric": metric,
                    "mean": value,
                    "ci_low": row.get(key + "_ci_low"),
                    "ci_high": row.get(key + "_ci_high"),
                    "left_out": row.get(f"eval/{environment}/left_out", 0),
                    "bound_low": row.get(key + "_bound_low"),
                    "bound_high": row.get(key + "_bound_high"),
                    "step": row["step"],
                }
            )
    return found


def charts(metrics: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts of CHARTS that have data, then one for every other metric (marked `more`)."""
    keys = sorted({key for row in metrics for key in row if key not in ("step", "nonfinite")})
    bounds = {key for key in keys if key.endswith(BOUNDS)}
    left = [key for key in keys if key not in bounds]
    charts: list[dict[str, Any]] = []
    for title, patterns in CHARTS:
        shown = [key for key in left if any(_matches(key, pattern) for pattern in patterns)]
        left = [key for key in left if key not in shown]
        charts.append({"title": title, "more": False, "series": _series(metrics, shown, patterns, bounds)})
    charts += [{"title": k, "more": True, "series": _series(metrics, [k], (k,), bounds)} for k in left]
    return [chart for chart in charts if any(series["x"] for series in chart["series"])]


def _matches(key: str, pattern: str) -> bool:
    if "*" in pattern:
        start, end = pattern.split("*")
        return key.startswith(start) and key.endswith(end) and len(key) > len(start) + len(end)
    return key.startswith(pattern) if pattern.endswith("/") else key == pattern


def _series(
    metrics: Sequence[Row], keys: Sequence[str], patterns: Sequence[str], bounds: set[str]
) -> list[dict]:
    result = []
    for key in keys:
        rows = [row for row in metrics if row.get(key) is not None]
        pattern = next(p for p in patterns if _matches(key, p))
        start, _, end = pattern.partition("*")
        name = key.rsplit("/", 1)[-1] if pattern == key else key.removeprefix(start).removesuffix(end)
        x, y = [row["step"] for row in rows], [row[key] for row in rows]
        series: dict[str, Any] = {"name": name}
        if key + "_ci_low" in bounds and key + "_ci_high" in bounds:  # evaluations: few, every point counts
            series |= {"x": x, "y": y, "every": 1}
            series["low"] = [row.get(key + "_ci_low") for row in rows]
            series["high"] = [row.get(key + "_ci_high") for row in rows]
        else:
            series |= _thin(x, y)
        result.append(series)
    return result


def _thin(x: Sequence[int], y: Sequence[float]) -> dict[str, Any]:
    """At most MAX_POINTS points; where there are more, each is the mean of `every` neighbours."""
    every = max(1, math.ceil(len(x) / MAX_POINTS))
    starts = range(0, len(x), every)
    means = [math.fsum(y[i : i + every]) / len(y[i : i + every]) for i in starts] if every > 1 else list(y)
    return {"x": [x[min(i + every, len(x)) - 1] for i in starts], "y": means, "every": every}


def config_line(line: str) -> tuple[str, str]:
    """(setting, origin): the comment at the end of a line says where its value came from."""
    quote = ""
    for index, char in enumerate(line):
        if quote:
            backslashes = index - len(line[:index].rstrip("\\"))
            if char == quote and not (quote == '"' and backslashes % 2):
                quote = ""
        elif char in "\"'":
            quote = char
        elif char == "#":
            return line[:index].rstrip(), line[index + 1 :].strip()
    return line.rstrip(), ""
