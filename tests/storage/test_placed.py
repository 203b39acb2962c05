"""Outputs of commands where the disk does not take them: one clear error, nothing left, nothing lost."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.models.test_sources import save

from silva.cli import main
from silva.config.sections import TinyModel
from silva.errors import RunFolderError
from silva.ports import FILES
from silva.storage.placed import placed, writing

MODEL = TinyModel(layers=1, width=16, heads=2, kv_heads=1, context=64)


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"question {n}", "completion": "a" * 40}) for n in range(400)]
    Path("rows.jsonl").write_text("\n".join(rows))
    save(Path("run"), MODEL, 1)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "output"),
    [(["rows.jsonl", "--to", "messages"], "out.jsonl"), (["run", "--to", "hf"], "out")],
)
def test_a_full_disk_is_said_and_what_was_there_stays(
    sources: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], output: str
) -> None:
    command = ["convert", *arguments, "--output", output]
    assert main(command) == 0
    before = {path: path.read_bytes() for path in sources.rglob("*") if path.is_file()}
    with small_disk(4096):
        assert main([*command, "--overwrite"]) == 2
    assert f"silva: {output} cannot be written: File too large; choose another" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in sources.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("arguments", [["rows.jsonl", "--to", "messages"], ["run", "--to", "hf"]])
def test_a_place_that_is_none_is_said(
    sources: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["convert", *arguments, "--output", "rows.jsonl/in/out.jsonl"]) == 2
    assert "silva: rows.jsonl/in/out.jsonl cannot be written: Not a directory" in capsys.readouterr().err


def test_what_else_fails_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), writing(tmp_path / "out"):
        (tmp_path / "elsewhere" / "gone").read_bytes()
    with pytest.raises(ValueError, match="wrong"), writing(tmp_path / "out"):
        raise ValueError("wrong")
    (tmp_path / "out").write_text("there")
    with (
        pytest.raises(RunFolderError, match="exists already"),
        writing(tmp_path / "out"),
        placed(tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize("after", ["out[1]", "another"])
@pytest.mark.parametrize("moment", ["written", "aside", "replaced"])
def test_what_a_killed_process_left_is_removed_and_what_was_there_is_put_back(
    tmp_path: Path, moment: str, after: str
) -> None:
    """Killed while it wrote, and after each of the two renames that replace a folder. The next output beside
    it tidies up, whatever its name; a folder that only looks alike stays."""
    path, other = tmp_path / "out[1]", tmp_path / ".out[1]2.silva-x"
    path.mkdir()
    (path / "weights").write_text("old")
    other.mkdir()
    code = """if 1:
        import os, signal, sys
        from pathlib import Path
        from silva.ports import FILES
        from silva.storage.placed import placed
        def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
        with placed(Path(sys.argv[1]), overwrite=True) as new:
            new.mkdir()
            (new / "weights").write_text("new")
            if sys.argv[2] == "written": killed()
            rename = FILES.rename
            def then(*of):
                rename(*of)
                if sys.argv[2] == "aside" or of[1] == Path(sys.argv[1]): killed()
            FILES.rename = then
    """
    assert subprocess.run([sys.executable, "-c", code, path, moment]).returncode == -signal.SIGKILL
    assert path.exists() == (moment != "aside") and len([*tmp_path.glob(".out?1?.*")]) == 1
    with pytest.raises(RunFolderError, match="exists already"):
        with placed(tmp_path / after) as next_one:
            next_one.write_text("next")
        with placed(tmp_path / after):
            pass
    assert (path / "weights").read_text() == ("new" if moment == "replaced" else "old")
    assert {*tmp_path.iterdir()} == {other, path, tmp_path / after}


def test_one_that_works_on_the_same_output_is_left_alone(tmp_path: Path) -> None:
    with placed(tmp_path / "out") as first:
        first.write_text("first")
        with placed(tmp_path / "out") as second:
            second.write_text("second")
            assert first.exists()
        (tmp_path / "out").unlink()
    assert (tmp_path / "out").read_text() == "first"


def test_what_others_wrote_in_the_meantime_stays(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="exists already"), placed(tmp_path / "out") as mine:
        mine.write_text("mine")
        (tmp_path / "out").write_text("theirs")
    assert (tmp_path / "out").read_text() == "theirs" and len([*tmp_path.iterdir()]) == 1


def test_a_folder_whose_successor_cannot_take_its_place_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "out", FILES.rename
    path.mkdir()
    (path / "weights").write_text("old")

    def refused(source: Path, target: Path) -> None:
        if source.name == "out" and target == path:
            raise OSError(28, "No space left on device")
        rename(source, target)

    with pytest.raises(OSError, match="No space"), placed(path, overwrite=True) as new:
        new.mkdir()
        monkeypatch.setattr(FILES, "rename", refused)
    assert (path / "weights").read_text() == "old" and [*tmp_path.iterdir()] == [path]
