"""One thread computes: its workers are its own, and the caller has none until it ends."""

from __future__ import annotations

import threading

import pytest
import torch

from silva.compute import ComputeThread


@pytest.fixture(autouse=True)
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "got"), [(0, 3), (2, 2)])
def test_the_workers_move_to_the_compute_thread_and_back(asked: int, got: int) -> None:
    with ComputeThread(asked) as compute:
        assert compute.run(torch.get_num_threads) == got
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_work_runs_there_and_errors_come_back() -> None:
    with ComputeThread() as compute:
        assert compute.run(threading.current_thread) is compute.submit(threading.current_thread).result()
        assert compute.run(threading.current_thread) is not threading.main_thread()
        with pytest.raises(ZeroDivisionError):
            compute.run(lambda: 1 // 0)
        assert compute.run(pow, 2, 3) == 8
