from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from silva.errors import RecordError
from silva.storage.plain import read_plain
from silva.storage.summary import write_summary

EVALUATION = {
    "environment": "hanoi",
    "metric": "success",
    "mean": 0.5,
    "ci_low": 0.4,
    "ci_high": 0.6,
    "n": 128,
    "left_out": 2,
    "bound_low": 0.49,
    "bound_high": 0.51,
}
DATA = {
    "eval_before": [EVALUATION], "eval_after": [EVALUATION | {"mean": float("nan")}], "steps": 4,
    "steps_trained": 3, "tokens_generated": np.int64(100), "tokens_in_rows": 90, "tokens_trained": 40,
    "seconds": {"train": 1.5},
    "peak_memory_bytes": 10, "seed": 1, "model": "tiny", "version": "0.1.0", "extra": (1, 2),
}  # fmt: skip


def test_summary_is_plain_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, DATA)
    expected = DATA | {"tokens_generated": 100, "extra": [1, 2], "eval_after": [EVALUATION | {"mean": None}]}
    assert json.loads(path.read_text()) == read_plain(path) == expected


def test_all_missing_keys_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    data = {key: value for key, value in DATA.items() if key not in ("seed", "model")}
    data["eval_after"] = [{"environment": "hanoi", "metric": "success", "mean": 1.0, "n": 3}]
    with pytest.raises(
        RecordError,
        match=r"missing 'seed' .*missing 'model' .*eval_after\[0\] lacks ci_low, ci_high, left_out",
    ):
        write_summary(tmp_path / "summary.json", data)
    assert list(tmp_path.iterdir()) == []
