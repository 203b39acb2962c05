"""One thread computes: its workers are its own, and the caller has none until it ends."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_that_wait_leave_their_core_soon_unless_the_user_has_chosen(chosen, spins) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    code = "import silva, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run([sys.executable, "-c", code], env=env | chosen, capture_output=True, check=True)
    assert found.stdout.decode().strip() == spins
