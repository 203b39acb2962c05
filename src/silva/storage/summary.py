"""`summary.json`: what a finished run comes to, in one small file with fixed keys; plain.py reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.ports import FILES

SUMMARY_KEYS: Mapping[str, str] = {
    "eval_before": "held-out results before training: list of evaluations (EVALUATION_KEYS)",
    "eval_after": "held-out results after training: list of evaluations (EVALUATION_KEYS)",
    "steps": "training steps done, those before a resume included",
    "steps_trained": "those in which some token had an advantage other than 0",
    "tokens_generated": "tokens sampled by the policy",
    "tokens_in_rows": "tokens the trainer ran forward and backward, prompts and observations included",
    "tokens_trained": "those of them with a loss",
    "seconds": "wall-clock seconds by phase: {phase: seconds}",
    "peak_memory_bytes": "highest resident (CPU) or allocated (GPU) memory of the process",
    "seed": "the run's seed",
    "model": "name of the model trained",
    "version": "version of Silva",
}
"""What a summary must hold; more keys are welcome."""

EVALUATION_KEYS: Mapping[str, str] = {
    "environment": "name of the environment",
    "metric": "what was measured, such as success or pass@4",
    "mean": "its mean over the held-out tasks; null if every episode is left out",
    "ci_low": "lower end of the 95 % interval; null where all rewards are equal",
    "ci_high": "upper end of the 95 % interval; null where all rewards are equal",
    "n": "tasks measured",
    "left_out": "episodes of the environment that gave no usable result; they enter no mean",
    "bound_low": "the mean if all of them had failed; null for a reward",
    "bound_high": "the mean if all of them had been solved; null for a reward",
}


def write_summary(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` to `path` (sorted, atomic; NaN and infinities as null).

    Raises RecordError that names every missing key and every evaluation that lacks one.
    """
    problems = [f"missing {key!r} ({meaning})" for key, meaning in SUMMARY_KEYS.items() if key not in data]
    for name in ("eval_before", "eval_after"):
        for index, evaluation in enumerate(data.get(name, ())):
            missing = [key for key in EVALUATION_KEYS if key not in evaluation]
            if missing:
                problems.append(f"{name}[{index}] lacks {', '.join(missing)}")
    if "seconds" in data and not isinstance(data["seconds"], Mapping):
        problems.append(f"seconds: got {data['seconds']!r}, expected a table of seconds by phase")
    if problems:
        raise RecordError("summary.json: " + "; ".join(problems))
    text = json.dumps(finite(data), indent=2, sort_keys=True, allow_nan=False)
    FILES.write_atomic(path, (text + "\n").encode())


def finite(value: Any) -> Any:
    """The same JSON value with null for every number that is not finite (JSON has no NaN)."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return finite(value.item())
    return value
