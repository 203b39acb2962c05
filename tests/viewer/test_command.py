"""`silva view`: what it refuses, what it finds by itself, and the folder that it exports."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.monitoring.fake_run import make_run

from silva.cli import main
from silva.viewer.export import key_of
from silva.viewer.routes import static_files

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such folder; expected a run's folder, or one with runs"),
        ([], "there is no folder runs or evals here"),
        (["--prot", "1"], "got '--prot 1', expected folders of runs"),
        ([".", "--port", "x"], "--port: got 'x', expected a number"),
        ([".", "--port", "70000"], "port: got 70000"),
        ([".", "--port", "1", "--unix", "s"], "--port and --unix: got both, expected one"),
        ([".", "--export", "full"], "--export full: there is something already"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["view", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_export_holds_every_page_that_its_pages_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "a", steps=4)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--export", "shared"]) == 0
    said = capsys.readouterr().err
    index = (tmp_path / "shared" / "data" / "index.js").read_text()
    files = json.loads(index.removeprefix("globalThis.silvaExport=").rstrip(";\n"))["files"]
    assert f"{len(files)} pages of 1 run; open shared/index.html" in said
    for name in ("run", "steps", "curves", "outcomes", "all"):
        assert key_of(name, {"run": ["runs/a"]}) in files
    page = (tmp_path / "shared" / "index.html").read_text()
    assert "module" not in page and "unsafe" not in page
    for number in files.values():  # what a model wrote is data inside a script: it cannot end it
        text = (tmp_path / "shared" / "data" / f"{number}.js").read_text()
        assert text.startswith("silvaData(") and not re.search("[<>&]", text)


@pytest.mark.slow
def test_a_process_answers_with_its_first_page_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "silva", "view", "runs"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = re.search(r"0 runs: listening at (http://127\.0\.0\.1:\d+)", server.stderr.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[1]}/", timeout=60) as answer:
                assert answer.read() == static_files()["index.html"]
            with urllib.request.urlopen(f"{found[1]}/api/runs", timeout=60) as answer:
                assert json.load(answer) == {"runs": []}
            server.send_signal(signal.SIGINT)
            assert "stopped" in server.stderr.readline() and server.wait(60) == 0
        finally:
            server.kill()


def test_the_front_end_is_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs pip install hatchling")
    packed = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    served = [path for path in (ROOT / "src/silva/viewer/static").rglob("*") if path.is_file()]
    assert {path.relative_to(ROOT / "src").as_posix() for path in served} <= packed
    assert {f"silva/monitoring/template/{name}" for name in ("look.css", "figures.js")} <= packed
    assert {"app.js", "style.css", "index.html", "vendor/LICENSES.txt", "vendor/uplot.js"} < {*static_files()}
