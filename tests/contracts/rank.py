"""The process in which tests run: one alone, or one of the ranks that tests/forked_ranks.py has started.

Ranks run a file of tests together: each makes every call of a test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forked_ranks import DIVIDED, Starter, starting

from silva.trainer.settings import Parallel
from silva.trainer.sharding.ranks import mesh_of

WORLD = int(os.environ.get("WORLD_SIZE", "0"))
"""How many ranks; 0: this process is alone."""
PARALLEL = Parallel(**json.loads(os.environ.get(DIVIDED, "{}")))
"""How they divide a model."""
starts_ranks = pytest.mark.skipif(WORLD > 0, reason="starts ranks, of which this is one")
divided = pytest.mark.skipif(not WORLD, reason="runs in ranks that the last test starts")
PICKLED = ("send_object_list", "recv_object_list", "all_gather_object", "broadcast_object_list",
           "gather_object", "scatter_object_list")  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    if not WORLD:
        yield
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with pytest.MonkeyPatch.context() as patched:
        for name in PICKLED:
            patched.setattr(dist, name, _refused)
        yield
    dist.destroy_process_group()


def _refused(*given: Any, **named: Any) -> None:
    raise AssertionError("ranks send each other pickles")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One for all ranks."""
    return Path(mesh_of(Parallel(), "cpu").gather(str(tmp_path))[0])


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with starting() as found:
        yield found
