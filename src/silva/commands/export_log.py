"""`silva eval export NAME --to inspect`: an evaluation in the format of another tool's viewer."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from silva.assembly import Assembly
from silva.commands.command import Given
from silva.commands.common import here
from silva.commands.kept import jobs_of_rows, kept
from silva.errors import ConfigError
from silva.evaluation.inspect_log import eval_file, file_name, log_of
from silva.evaluation.summary import evaluations_of, results
from silva.monitoring.printable import put
from silva.ports import FILES
from silva.storage.layout import Layout
from silva.storage.placed import writing

FORMATS = ("inspect",)


def run(given: Given) -> int:
    """Read what stands after the word `export`, and write the logs."""
    names, to = given.rest[1:], given.options.get("--to", "")
    if len(names) != 1 or names[0].startswith(("-", "@")):
        raise ConfigError(f"silva eval export: got {' '.join(names)!r}, expected the name of one evaluation")
    if to not in FORMATS:
        raise ConfigError(f"--to: got {to!r}, expected {', '.join(FORMATS)}")
    for path in export(names[0], Path(given.options["--output"]) if "--output" in given else None):
        put(f"{path}")
    return 0


def export(name: str, folder: Path | None = None) -> list[Path]:
    """Write a log for each environment and step; `inspect view --log-dir FOLDER` shows them.

    Args:
        folder: None: `inspect` in the folder of the evaluation.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    this = kept(name)
    folder = folder or this.path / "inspect"
    files = Layout(this.path)
    source = files.episodes if files.episodes.exists() else files.config_toml
    created = datetime.fromtimestamp(int(source.stat().st_mtime), UTC).isoformat()
    jobs = jobs_of_rows(this.rows, Assembly(here(this.config)).tasksets, this.tasks)
    pairs = list(zip(this.rows, jobs, strict=True))
    series = evaluations_of(this.rows, this.config)
    models = {step: this.models.get(step, "") for step in series}
    numbers, written = results(series, models), []
    logs = []
    for step, found in series.items():
        for each in found:
            label = each.environment
            those = [pair for pair in pairs if (pair[0].step, pair[0].environment) == (step, label)]
            rows = [row for row in numbers if (row["step"], row["environment"]) == (step, label)]
            logs.append(log_of(this.name, models[step] or this.name, label, those, rows, created=created))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for log in logs:
            written.append(folder / file_name(log))
            FILES.write_atomic(written[-1], eval_file(log))
    return written
