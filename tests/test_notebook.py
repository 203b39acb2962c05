"""The notebook is executed as a reader would, cell after cell, in a real kernel."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_first_run_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    specs = tmp_path / "jupyter" / "kernels" / "python3"  # this interpreter, whatever kernels there are
    specs.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python", "language": "python"}
    (specs / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(specs.parents[1]))
    for name in ("agent", "notebook"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    folder = tmp_path / "notebook"
    notebook = nbformat.read(folder / "first_run.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, timeout=600).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    told = "".join(out.get("text", "") for out in outputs)
    before, after = (
        re.search(rf"eval_{when}: .*?% \[(.*?)%, (.*?)%\]", told) for when in ("before", "after")
    )
    assert before and after and float(before[2]) < float(after[1])
    assert any("step 16/16: " in out.get("data", {}).get("text/plain", "") for out in outputs)
    assert (folder / "runs" / "agent" / "report.html").is_file()
