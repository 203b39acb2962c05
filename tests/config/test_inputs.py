"""The files that a configuration points at, and what changed in them."""

import json
from pathlib import Path

import pytest

from silva.config import inputs
from silva.config.diff import diff
from silva.config.inputs import input_files
from silva.registries import REGISTRIES


@pytest.fixture
def data(write, tmp_path, monkeypatch):
    """A configuration that points at one file of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "rows/a.jsonl", "rows/b.jsonl", "held/rows.csv", "reward.py", "env.py", "tool.py", "server.py",
        "corpus/x.txt", "corpus/deep/y.md", "model/config.json", "model/chat_template.jinja",
    ):  # fmt: skip
        write(name, name)
    for name in ("model/.git/HEAD", "corpus/__pycache__/z.pyc", "runs/r/log", "judge/judge.sqlite", "math/x"):
        write(name, name)
    folder = str(tmp_path)
    return {
        "name": "r",
        "output_dir": "runs",
        "model": {"type": "pretrained", "name": "model"},
        "environments": [
            {
                "type": "dataset", "name": "math",
                "path": f"{folder}/rows", "eval_path": f"{folder}/held/rows.csv",
                "rows": [{"prompt": "server.py"}], "prompt": "math",
                "reward": {"type": "function", "function": f"{folder}/reward.py:score", "cache": "judge"},
                "tools": [
                    {"type": "search", "corpus": "corpus"},
                    {"type": "mcp", "command": ["python", "server.py"]},
                    {"type": "function", "function": f"{folder}/tool.py:look"},
                ],
            },
            {"type": f"{folder}/env.py:Env"},
        ],
    }  # fmt: skip


def test_everything_that_is_read_has_a_digest_and_nothing_that_is_written(data, tmp_path):
    short = sorted(file.removeprefix(f"{tmp_path}/") for file in input_files(data))
    assert short == sorted([
        "rows/a.jsonl", "rows/b.jsonl", "held/rows.csv", "reward.py", "env.py", "tool.py", "server.py",
        "corpus/x.txt", "corpus/deep/y.md", "model/config.json", "model/chat_template.jinja",
    ])  # fmt: skip
    assert input_files({"output_dir": "runs", "x": [str(tmp_path)], "y": "/", "z": "no\0name"}) == {}


def test_what_a_python_file_imports_from_beside_it_is_read_too(write, tmp_path, monkeypatch):
    monkeypatch.chdir(write("here/lib/deep.py", "").parent.parent)
    file = write(
        "own/reward.py", "import json, parts\nfrom lib import deep\n\ndef f():\n    from .more import g\n"
    )
    write("own/parts.py", "import reward, more.least")
    write("own/more/__init__.py", "import broken")
    write("own/more/least.py", "")
    write("own/broken.py", "def (")
    write("own/other.py", "")
    found = input_files({"output_dir": "runs", "name": "r", "x": f"{file}:score"})
    assert sorted(name.removeprefix(f"{tmp_path}/") for name in found) == [
        "here/lib/deep.py", "own/broken.py", "own/more/__init__.py", "own/more/least.py", "own/parts.py",
        "own/reward.py",
    ]  # fmt: skip


def test_a_folder_below_a_hidden_one_is_read_and_the_run_s_own_is_not(write, tmp_path):
    """Models of the hub lie below ~/.cache."""
    file = write(".cache/model/config.json", "{}")
    write("runs/r/notes/a.txt", "a")
    data = {"output_dir": str(tmp_path / "runs"), "name": "r", "model": {"name": str(file.parent)}}
    assert [*input_files(data)] == [str(file)]
    notes = tmp_path / "runs/r/notes"
    assert input_files(
        {**data, "environments": [{"corpus": str(notes), "note": f"{notes}/a.txt"}]}
    ).keys() == {str(file)}


def test_a_file_that_nobody_may_read_is_no_reason_to_stop(write, tmp_path, monkeypatch):
    write("corpus/a.txt", "a")
    write("corpus/b.txt", "b")
    whole = inputs.hashlib.file_digest

    def refuse(content, kind):
        if content.name.endswith("b.txt"):
            raise PermissionError(13, "Permission denied")
        return whole(content, kind)

    monkeypatch.setattr(inputs.hashlib, "file_digest", refuse)
    found = input_files({"output_dir": "runs", "name": "r", "x": [str(tmp_path / "corpus/")]})
    assert [text[:7] for text in found.values()] == ["1 bytes", "not rea"]
    assert found[str(tmp_path / "corpus/b.txt")] == "not readable: Permission denied"


@pytest.mark.parametrize("whole", [1 << 30, 100])
def test_a_change_of_one_byte_is_seen(data, write, monkeypatch, whole):
    monkeypatch.setattr(inputs, "WHOLE", whole)
    monkeypatch.setattr(inputs, "BLOCK", 100)
    monkeypatch.setattr(inputs, "BLOCKS", 20)
    file = write("rows/a.jsonl", "x" * 1900)
    before = input_files(data)[str(file)]
    assert before.startswith("1900 bytes, sha256 ")
    for place in (0, 950, 1899):
        file.write_text("x" * place + "y" + "x" * (1899 - place))
        assert input_files(data)[str(file)] != before
    file.write_text("x" * 1900)
    assert input_files(data)[str(file)] == before


def test_two_runs_of_other_rows_differ(write, tmp_path):
    rows = write("rows.jsonl", '{"question": "1", "answer": "1"}\n')
    text = '[[environments]]\ntype = "dataset"\npath = "rows.jsonl"\nreward = "exact_match"\n'
    now = write("new.toml", text)
    write("old/config.toml", text.replace("rows.jsonl", str(rows)))
    write("old/config.json", json.dumps({inputs.FILES_KEY: {str(rows): "3 bytes, sha256 0"}}))
    found = {each.path: each for each in diff(tmp_path / "old", now, REGISTRIES)}
    assert (found[str(rows)].a, found[str(rows)].origin_a) == ("3 bytes, sha256 0", "file")
    assert found[str(rows)].b.startswith("33 bytes, sha256 ")


def test_of_a_run_only_the_weights_that_are_meant_count(write, tmp_path):
    """It goes on: its log, and checkpoints of other steps, change."""
    run = tmp_path / "run"
    of = "checkpoints/step_{}/trainer/weights.safetensors"
    for name in ("ledger.jsonl", "run.log", of.format(1), of.format(2), "weights/step_2/model.safetensors"):
        write(f"run/{name}", name)

    def found(name):
        files = input_files({"output_dir": "runs", "name": "r", "model": {"name": name}})
        return {str(Path(file).relative_to(run)) for file in files}

    first, second = {of.format(1)}, {of.format(2), "weights/step_2/model.safetensors"}
    assert found(f"{run}@step_1") == first and found(f"{run}@step_2") == second
    assert found(str(run)) == found(f"{run}@best") == first | second
