"""The seeds that `--seeds` names, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands.conftest import PARITY

from silva.cli import main
from silva.commands.outcome import RunOutcome
from silva.commands.seeds import report, seeds_of
from silva.errors import ConfigError


def test_seeds_are_named_by_numbers_and_ranges() -> None:
    assert seeds_of("0-3") == [0, 1, 2, 3]
    assert seeds_of("0,3,7") == [0, 3, 7]
    assert seeds_of("5, 1-2") == [5, 1, 2]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "got ''"), ("a", "got 'a'"), ("3-", "got '3-'"), ("-1", "got '-1'"), ("4-2", "ends before"),
        ("1,0-2", "got 1 twice"), ("1.5", "got '1.5'"), ("7,0-999999999", "got 1,000,000,001"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_seeds_is_told(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="--seeds") as told:
        seeds_of(text)
    assert why in str(told.value)


LORA = ("--model.type", "pretrained", "--model.name", "SmolLM2-135M-Instruct", "--model.lora.rank", "4")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "model.lora: got none with --seeds"),
        (("--model.lora.rank", "4"), 'model.type = "tiny" with --seeds'),
        ((*LORA, "--placement.type", "services"), 'placement.type = "services" with --seeds'),
        ((*LORA, "--monitoring.terminal", "live"), 'monitoring.terminal = "live" with --seeds'),
        (("--seed", "3"), "--seeds and --seed: got both"),
        (("--dry-run",), "--seeds and --dry-run: got both"),
    ],
)
def test_what_seeds_cannot_share_is_refused_before_anything_is_read(
    options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "\n".join(line for line in PARITY.splitlines() if options[:2] != LORA[:2] or "model" not in line)
    )
    arguments = ["rl", f"@{file}", "--output_dir", str(tmp_path / "runs"), *options, "--seeds", "0-1"]
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_summary_of_another_run_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as that of `--seed 0` alone, under the same name."""
    (tmp_path / "run.toml").write_text("\n".join(line for line in PARITY.splitlines() if "model" not in line))
    (tmp_path / "runs/mine").mkdir(parents=True)
    for name in ("ledger.jsonl", "summary.json"):
        (tmp_path / "runs/mine" / name).write_text("{}")
    given = ["--output_dir", str(tmp_path / "runs"), "--name", "mine", "--seeds", "0-1"]
    assert main(["rl", f"@{tmp_path / 'run.toml'}", *LORA, *given]) == 2
    assert "runs/mine holds a run already" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "runs/mine").iterdir()) == [
        "ledger.jsonl",
        "summary.json",
    ]


def test_runs_that_go_on_are_found_by_the_name_in_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SILVA_NAME", "mine")
    assert main(["rl", "--seeds", "0-1", "--resume"]) == 2
    assert "there is no run in runs/mine/seed_0" in capsys.readouterr().err


def test_the_report_over_seeds_has_the_mean_and_student_s_interval(tmp_path: Path) -> None:
    done = {}
    for seed, after in ((0, 0.25), (3, 0.5), (4, 0.75)):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        rows = [{"step": 0, "eval/lake/reward": 0.5}, {"step": 1, "eval/lake/reward": after}]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "config.toml").write_text(f"seed = {seed}\n")
        told = {"model": "tiny", "steps": 1, "tokens_generated": 8, "tokens_trained": 8}
        done[seed] = RunOutcome(folder, told, None, None)
    report(tmp_path, done, ["7"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    (before,), (after,) = summary["eval_before"], summary["eval_after"]
    assert (before["mean"], before["ci_low"], before["ci_high"]) == (0.5, None, None)  # all equal
    half = 4.302652729911275 * 0.25 / 3**0.5  # Student's t with two degrees of freedom, 97.5 %
    assert (after["mean"], after["ci_low"], after["ci_high"]) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    page = (tmp_path / "report.html").read_text()
    assert f"{0.5 - half:.3f}" in page and f"{0.5 + half:.3f}" in page and "seeds 7" in page
