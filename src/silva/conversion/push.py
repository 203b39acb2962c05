"""What was converted, to a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from silva.errors import ConfigError, SilvaError, one_line

MESSAGE = "Upload by silva convert"


class PushError(SilvaError, ConnectionError):
    """The hub did not take it; what was converted is here."""


def push(path: Path, repo: str, *, data: bool = False) -> str:
    """Upload a folder's content or a file, and return the address; a repository that is made is private.

    Args:
        data: it is a repository of a data set.

    Raises:
        ConfigError: no repository can have this name.
        PushError: the hub refuses (no token, no right), or it cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api, kind = HfApi(), "dataset" if data else "model"
    try:
        made = api.create_repo(repo, repo_type=kind, private=True, exist_ok=True)
        if path.is_dir():
            api.upload_folder(repo_id=made.repo_id, repo_type=kind, folder_path=path, commit_message=MESSAGE)
        else:
            api.upload_file(repo_id=made.repo_id, repo_type=kind, path_or_fileobj=path,
                            path_in_repo=path.name, commit_message=MESSAGE)  # fmt: skip
    except HFValidationError as error:
        raise ConfigError(
            f"--push: got {repo!r}, expected owner/name ({one_line(str(error), 200)})"
        ) from error
    except Exception as error:  # of the hub's HTTP library, whichever that is
        raise PushError(
            f"{repo}: the hub did not take {path} ({one_line(str(error), 300) or type(error).__name__}). It "
            "needs HF_TOKEN with the right to write. What was converted stays here; "
            f"huggingface-cli upload {repo} {path} sends it"
        ) from error
    return str(made)
