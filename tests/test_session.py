"""What is loaded, while a session is open."""

from __future__ import annotations

import gc
from pathlib import Path

from silva.config.load import load
from silva.registries import REGISTRIES
from silva.session import Session

CONFIG = Path(__file__).parents[1] / "configs" / "smoke.toml"


def test_garbage_collection_leaves_out_what_is_loaded_until_the_session_ends() -> None:
    session = Session(load(["@", str(CONFIG)], REGISTRIES).config)
    try:
        alive = {id(x) for x in gc.get_objects()}
        assert gc.get_freeze_count() > 10_000
        assert id(session.loaded.model.config.__dict__) not in alive
    finally:
        session.close()
    assert gc.get_freeze_count() == 0
