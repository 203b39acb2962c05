"""What a command does to garbage collection."""

from __future__ import annotations

import gc
import weakref

import pytest

from silva import process


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_what_is_in_use_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that nobody refers to any more are found after a while, and at the end."""
    seconds = [0.0]
    monkeypatch.setattr(process, "gc", gc)  # tests of whole runs go without
    monkeypatch.setattr(process.time, "monotonic", lambda: seconds[0])
    usual = gc.get_threshold()
    with process.loaded():
        assert gc.get_threshold() == (*usual[:2], process.SELDOM) != usual
        rings = [Ring() for _ in range(1000)]
        assert sum(isinstance(each, Ring) for each in gc.get_objects()) == 1000
        gc.collect()
        assert not any(isinstance(each, Ring) for each in gc.get_objects())  # it stays out from now on
        found = [weakref.ref(ring) for ring in rings]
        rings.clear()
        gc.collect()
        assert all(ref() is not None for ref in found)
        seconds[0] = 2 * process.LOOK_AGAIN
        gc.collect()
        assert not any(ref() is not None for ref in found)
        last = weakref.ref(Ring())  # too young to have been seen
        kept = Ring()
        gc.collect()
        late = weakref.ref(kept)
        del kept
    assert gc.get_threshold() == usual
    gc.collect()
    assert last() is None and late() is None
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as the other tests have it
