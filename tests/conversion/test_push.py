"""What is sent to the hub, to a fake of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from silva.cli import main
from silva.conversion.push import PushError, push
from silva.errors import ConfigError


class FakeHub:
    calls: list[tuple[str, dict[str, Any]]]
    fault: Exception | None = None

    def create_repo(self, repo: str, **more: Any) -> Any:
        if self.fault:
            raise self.fault
        self.calls.append(("create_repo", {"repo": repo, **more}))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo}")

    def __getattr__(self, name: str) -> Any:
        return lambda **given: self.calls.append((name, given))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    FakeHub.calls, FakeHub.fault = [], None
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    return FakeHub


def test_a_folder_and_a_file_go_to_a_private_repository(hub: type[FakeHub], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert push(tmp_path, "me/model") == "https://huggingface.co/me/model"
    push(tmp_path / "m.gguf", "me/model")
    create = ("create_repo", {"repo": "me/model", "repo_type": "model", "private": True, "exist_ok": True})
    sent = [(name, {**given, "commit_message": None}) for name, given in hub.calls]
    about = {"repo_id": "me/model", "repo_type": "model", "commit_message": None}
    create = (create[0], {**create[1], "commit_message": None})
    assert sent == [
        create, ("upload_folder", {**about, "folder_path": tmp_path}),
        create, ("upload_file", {**about, "path_or_fileobj": tmp_path / "m.gguf", "path_in_repo": "m.gguf"}),
    ]  # fmt: skip


def test_what_the_hub_refuses_is_said(hub: type[FakeHub], tmp_path: Path) -> None:
    hub.fault = RuntimeError("401 Client Error")
    with pytest.raises(PushError, match=r"me/model: the hub did not take .*401 Client Error.*HF_TOKEN"):
        push(tmp_path, "me/model")
    hub.fault = huggingface_hub.errors.HFValidationError("Repo id must use alphanumeric chars")
    with pytest.raises(ConfigError, match=r"--push: got 'a b', expected owner/name"):
        push(tmp_path, "a b")


def test_the_command_sends_what_it_wrote(
    hub: type[FakeHub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "o.jsonl"
    rows.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    command = ["convert", str(rows), "--to", "trl", "--output", str(output), "--push", "me/sums"]
    assert main(command) == 0
    assert "pushed to https://huggingface.co/me/sums" in capsys.readouterr().out
    assert [(name, given["repo_type"]) for name, given in hub.calls] == [
        ("create_repo", "dataset"),
        ("upload_file", "dataset"),
    ]
