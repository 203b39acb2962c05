"""What the benchmarks share: rows of results, tables, the machine's speed, one seed of a configuration."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, whose MKL reads at its start what this sets)
import torch

from silva.compute import ComputeThread

if TYPE_CHECKING:
    from silva.evaluation.statistics import Estimate
    from silva.types import Trajectory

CONFIGS = Path(__file__).parents[1] / "configs"
SET_BY_SILVA = ("MKL_CBWR", "TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT")
Curve = Sequence[tuple[int, float]]  # (step, value)
Solved = Mapping[str, Sequence[float]]  # by task, the success of its episodes


@dataclass(frozen=True)
class Row:
    """One number.

    `against` names the peer, layout or limit it is compared with, `ratio` is ours over theirs (above 1 is
    better; against a limit: the share of it that is reached), `target` what is asked of the ratio, or of the
    value where nothing is compared; empty: nothing is asked.
    """

    case: str
    metric: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    target: str = ""


def peers_environment() -> dict[str, str]:
    """Without the variables that importing silva sets, which must not slow others down."""
    return {name: value for name, value in os.environ.items() if name not in SET_BY_SILVA}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options every benchmark has; its help is the module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the rows to this file")
    return made


def seeds_parser(doc: str | None, seeds: int, output_dir: str) -> argparse.ArgumentParser:
    """For benchmarks that train: several seeds of one configuration."""
    made = parser(doc)
    made.add_argument("--seeds", type=_seeds, default=range(seeds), metavar="N|A-B",
                      help=f"seeds 0 to N - 1, or A to B (default {seeds})")  # fmt: skip
    made.add_argument("--output-dir", default=output_dir, help=f"where the runs go (default {output_dir})")
    made.add_argument("--resume", action="store_true", help="go on with runs that are there already")
    return made


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def write(rows: Sequence[Row], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def results(rows: Sequence[Row]) -> str:
    """Their table, in Markdown."""
    lines = []
    for row in rows:
        value = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append([row.case, row.metric, f"{value} {row.unit}".strip(), row.against, ratio, row.target])
    return table(["case", "metric", "value", "against", "ratio", "target"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def gemm_rate(repeats: int = 20) -> float:
    """fp32 GFLOP/s of [512, 576] x [576, 1536], one layer of SmolLM2-135M on 512 tokens; the best repeat."""
    a, b = torch.rand(512, 576), torch.rand(576, 1536)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        best = min(best, (time.perf_counter() - began) / 10)
    return 2 * 512 * 576 * 1536 / best / 1e9


def machine() -> tuple[Row, str]:
    """The machine's speed, as a row and in words."""
    compute = ComputeThread()  # workers of this thread would stay in the way of a run's
    rate = compute.run(gemm_rate)
    compute.shutdown()
    kernels = torch.backends.cpu.get_cpu_capability()
    words = f"machine: {torch.get_num_threads()} threads, {kernels}, {rate:.0f} GFLOP/s (fp32 GEMM)"
    return Row("machine", "fp32 GEMM", rate, "GFLOP/s"), words


@dataclass(frozen=True)
class Learning:
    """One seed of a configuration: evaluations of success as in summary.json, `curve` is (step, success).

    `before` is the policy before RL, after a warm start where there is one. `baselines`: who else played the
    same tasks, "random" or the untrained "model". `solved` has the episodes behind all of them, by "before",
    "after" and baseline.
    """

    seed: int
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    baselines: Mapping[str, Mapping[str, Any]]
    solved: Mapping[str, Solved]
    seconds: float
    curve: Curve

    @property
    def apart(self) -> bool:
        """Whether the intervals before and after do not overlap, on the right side."""
        return self.after["ci_low"] > self.before["ci_high"]


def learn(
    config: Path, seed: int, output_dir: str, *, resume: bool, baselines: Sequence[str] = ()
) -> Learning:
    """Train with one seed, or with `resume` read a finished run; first let the baselines play."""
    # Here, because benchmarks that train nothing need less than these do (gpu.py: no more than torch).
    from silva.commands.evaluate import evaluate_config
    from silva.commands.train import train
    from silva.config.load import load
    from silva.evaluation.evaluator import records
    from silva.registries import REGISTRIES

    argv = [f"@{config}", f"--seed={seed}", f"--name=seed_{seed}", f"--output-dir={output_dir}"]
    resolved = load(argv, REGISTRIES)
    played = {who: evaluate_config(resolved.config, policy=who) for who in baselines}
    outcome = train(resolved, resume=resume, overwrite=not resume)
    before, after = (_success(outcome.summary[key]) for key in ("eval_before", "eval_after"))
    evaluated = list(held_out(outcome.directory).values())
    solved = {"before": evaluated[0], "after": evaluated[-1]} | {
        who: solved_in(found[0].episodes) for who, found in played.items()
    }
    curve = series(outcome.directory, f"eval/{after['environment']}/success")
    seconds = sum(outcome.summary["seconds"].values())
    scores = {who: _success(records(found)) for who, found in played.items()}
    return Learning(seed, before, after, scores, solved, seconds, curve)


def held_out(run: Path) -> dict[int, Solved]:
    """The evaluations of a run by step: success of the episodes that count."""
    from silva.storage.rollouts import read_rollouts, rollouts_in

    files = rollouts_in(run / "rollouts").items()
    played = {step: [row for row in read_rollouts(path) if row.status == "eval"] for step, path in files}
    return {step: solved_in((row.task, row.trajectory) for row in rows)
            for step, rows in played.items() if rows}  # fmt: skip


def solved_in(played: Iterable[tuple[str, Trajectory]]) -> Solved:
    """From (task, episode)."""
    from silva.evaluation.evaluator import success

    found: dict[str, list[float]] = {}
    for task, trajectory in played:
        if trajectory.has_result:
            found.setdefault(task, []).append(success(trajectory))
    return found


def mean(solved: Solved) -> float:
    return float(np.mean(list(itertools.chain(*solved.values()))))


def pooled(runs: Sequence[Solved]) -> Estimate:
    """Over the episodes of all seeds; those of one task resemble each other and are drawn together."""
    from silva.evaluation.statistics import estimate

    tasks = dict.fromkeys(task for run in runs for task in run)
    return estimate([np.array([value for run in runs for value in run.get(task, ())]) for task in tasks])


def series(run: Path, key: str) -> Curve:
    """(step, value) of a run's metrics, where a step has that key."""
    from silva.storage.metrics import read_metrics

    return [(row["step"], row[key]) for row in read_metrics(run / "metrics.jsonl") if key in row]


def interval(evaluation: Mapping[str, Any]) -> str:
    return "{mean:.1%} [{ci_low:.1%}, {ci_high:.1%}]".format(**evaluation)


def _success(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(e for e in evaluations if e["metric"] == "success")


@dataclass(frozen=True)
class Panel:
    """Curves of the seeds of one recipe; `top` is the highest value of the axis, a share where it is 1."""

    name: str
    curves: Sequence[Curve]
    top: float = 1.0


WIDE, HIGH, LEFT, ABOVE, BETWEEN, COLUMNS = 132, 84, 52, 26, 44, 5


def drawing(figures: Mapping[str, Sequence[Panel]]) -> str:
    """An SVG: under each heading its panels, the mean of the curves over a band from lowest to highest."""
    parts, y = [], 0
    for heading, panels in figures.items():
        parts.append(f'<text x="{LEFT}" y="{y + 22}" class="heading">{heading}</text>')
        y += 22 + ABOVE
        for i, one in enumerate(panels):
            row, column = divmod(i, COLUMNS)
            parts += panel(one, LEFT + column * (WIDE + 20), y + row * (HIGH + BETWEEN), labels=column == 0)
        y += -(-len(panels) // COLUMNS) * (HIGH + BETWEEN) - ABOVE + 8
    width = LEFT + min(COLUMNS, max(map(len, figures.values()))) * (WIDE + 20)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 8}" role="img">',
            f"<title>{'; '.join(figures)}: mean and range of the seeds</title>",
            "<style>text{font:11px sans-serif;fill:#444}.heading{font-size:14px;font-weight:bold}"
            ".grid{stroke:#ddd}.start{stroke:#999;stroke-dasharray:3 3}</style>",
            f'<rect width="{width}" height="{y + 8}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def panel(p: Panel, left: float, above: float, *, labels: bool) -> list[str]:
    """With `labels` the axis of values has some; the dashed line is the start."""
    at: dict[int, list[float]] = {}
    for step, value in itertools.chain(*p.curves):
        at.setdefault(step, []).append(value)
    steps, ends = sorted(at), (min(at), max(at))

    def height(value: float) -> float:
        return above + HIGH * (1 - value / p.top)

    def point(step: int, value: float) -> str:
        x = left + WIDE * (step - ends[0]) / max(ends[1] - ends[0], 1)
        return f"{x:.1f},{height(value):.1f}"

    low, high = ([point(step, pick(at[step])) for step in steps] for pick in (min, max))
    mean = [point(step, sum(at[step]) / len(at[step])) for step in steps]
    start = mean[0].partition(",")[2]
    ticks = [(value, f"{value:.0%}" if p.top == 1 else f"{value:.2f}") for value in (0, p.top / 2, p.top)]
    return [
        *(f'<path class="grid" d="M{left} {height(value):.1f}h{WIDE}"/>' for value, _ in ticks),
        *(f'<text x="{left - 6}" y="{height(value) + 4:.1f}" text-anchor="end">{text}</text>'
          for value, text in ticks if labels),
        *(f'<text x="{point(step, 0).partition(",")[0]}" y="{above + HIGH + 14}" text-anchor="middle">'
          f"{step}</text>" for step in ends),
        f'<text x="{left}" y="{above - 6}">{p.name}</text>',
        f'<path class="start" d="M{left} {start}h{WIDE}"/>',
        f'<polygon points="{" ".join([*low, *reversed(high)])}" fill="#2f7d4f" fill-opacity="0.2"/>',
        f'<polyline points="{" ".join(mean)}" fill="none" stroke="#2f7d4f" stroke-width="2"/>',
    ]  # fmt: skip
