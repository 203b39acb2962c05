"""The environment variables of processes that play episodes: those of a machine, and none that holds a key.

What a model writes goes through other people's code there. So a variable that is not known to be harmless is
left out, unless the settings name it: `variables` of an environment, `key_variable` of a tool or a judge.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

KEPT = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "VIRTUAL_ENV",
    "CONDA_PREFIX", "JAVA_HOME",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "NLTK_DATA", "ALFWORLD_DATA", "SILVA_CACHE",
    "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "MKL_CBWR", "TOKENIZERS_PARALLELISM",
}  # fmt: skip
KEPT_BEGIN = (
    "LC_", "XDG_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "CUDA_VISIBLE_",
)  # fmt: skip


def variables(given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """For a process in which the same can be imported as in this one.

    Args:
        given: more of them, whatever this process has.
    """
    kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(KEPT_BEGIN)}
    return {**kept, **given, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def named(settings: Any) -> dict[str, str]:
    """The variables that settings name, with what this process has under these names."""
    return {name: os.environ[name] for name in named_in(settings) if name in os.environ}


def named_in(settings: Any) -> Iterator[str]:
    """The variables that settings name, at any depth."""
    if isinstance(settings, BaseModel):
        for key, value in settings:
            if key == "variables":
                yield from value
            elif key == "key_variable" and value:
                yield value
            else:
                yield from named_in(value)
    elif isinstance(settings, dict):
        for value in settings.values():
            yield from named_in(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from named_in(value)
