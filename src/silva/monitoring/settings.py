"""`[monitoring]`: what a run shows and writes of itself."""

from __future__ import annotations

from typing import Any, Literal

from silva.config.schema import union
from silva.config.sections import Above0, Natural, Section
from silva.monitoring.sinks import SINKS

AnySink: Any = union(SINKS)


class Monitoring(Section):
    terminal: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` redraws a box, `plain` writes lines; `auto`: live where a terminal is."""
    tensorboard: bool = True
    """Write event files to tensorboard/, where TensorBoard is installed."""
    sinks: tuple[AnySink, ...] = ()
    """Where else the numbers go (`type`: wandb, mlflow, trackio, prometheus, jsonl); none can stop a run."""
    rollouts: bool = True
    """Write every rollout to rollouts/step_N.parquet."""
    report: bool = True
    """Write report.html."""
    collapse_every: Natural = 0
    """Steps between diagnoses of whether replies still depend on their prompts (RAGEN-2); 0: never."""
    trace: bool = False
    """Write trace.json (`silva rl`): when loop, trainer and engine were busy; ui.perfetto.dev shows it."""
    stall_after: Above0 = 120.0
    """Seconds without any progress after which stacks are printed."""
