"""Models of the Hugging Face hub: one question before the download.

transformers does the download. Without a network it tries every file for half a minute.
"""

from __future__ import annotations

import os
from typing import Any

from silva.errors import ModelError

TIMEOUT = 5.0  # seconds for the hub to answer


def options(name: str, revision: str | None) -> dict[str, Any]:
    """Arguments for `from_pretrained`: to use only its cache, if the hub cannot be reached.

    Raises:
        ModelError: the hub has no such model, or it cannot be reached and the cache is empty.
    """
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    here = f"model.name = {name!r}: there is no such folder here"
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        if constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set"
        else:
            HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
            return {}
    except errors.HFValidationError:
        raise ModelError(f"{here}, and a hub id is of the form organisation/name") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"model.revision = {revision!r}: the hub's {name} has no such revision") from None
    except errors.RepositoryNotFoundError:
        private = "" if os.environ.get("HF_TOKEN") else "; a private one needs HF_TOKEN in the environment"
        raise ModelError(f"{here}, and no such model on the hub{private}") from None
    except errors.HfHubHTTPError:  # the hub answers, so that trying again may help
        return {}
    except Exception as error:  # of the hub's HTTP library, whichever that is
        reason = str(error) or type(error).__name__
    if cached:
        return {"local_files_only": True}
    raise ModelError(
        f"{here}, and {constants.ENDPOINT} cannot be asked for it ({reason}). Name a folder or a GGUF file, "
        "or connect to the network"
    )
