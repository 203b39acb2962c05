"""A small model in a folder, for tests of what is read from one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tiny import TINY

from silva.models.loading import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loaded = load_model(TINY, seed=7)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
