"""What every placement does. A new one adds itself to the fixture `make`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.outside_parts import OtherPlacement

from silva.placement.settings import LocalPlacementSettings, ServicesPlacementSettings
from silva.protocols import Placement

Make = Callable[[], Placement]


KINDS = {
    "local": LocalPlacementSettings,
    "a process of services": ServicesPlacementSettings,
    "from outside": OtherPlacement,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    threads, made = torch.get_num_threads(), list[Placement]()

    def build() -> Placement:
        made.append(KINDS[request.param](device="cpu", threads=1).build())
        return made[-1]

    yield build
    for placement in made:
        placement.close()
    torch.set_num_threads(threads)


def test_its_device_is_one_of_torch(make: Make) -> None:
    assert torch.zeros(1, device=make().device).sum() == 0


def test_work_runs_where_parts_compute_and_is_waited_for(make: Make) -> None:
    placement = make()
    there = placement.compute.submit(threading.get_ident).result()
    assert placement.run(threading.get_ident) == there
    assert placement.run(lambda a, b=0: a - b, 7, b=2) == 5


def test_an_error_comes_back_as_it_is_and_the_next_job_runs(make: Make) -> None:
    placement, error = make(), KeyError("x")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        placement.run(fail)
    assert caught.value is error and placement.run(lambda: 1) == 1


def test_one_job_at_a_time_in_the_order_asked_for(make: Make) -> None:
    placement, running, order = make(), list[int](), list[int]()

    def job(number: int) -> int:
        running.append(number)
        assert len(running) == 1
        torch.rand(100, 100) @ torch.rand(100, 100)
        order.append(running.pop())
        return number

    async def ask() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(placement.compute, job, i) for i in range(20)))

    assert asyncio.run(ask()) == order == list(range(20))


def test_closing_ends_it_for_good_and_twice_is_fine(make: Make) -> None:
    placement = make()
    placement.close()
    placement.close(wait=False)
    with pytest.raises(RuntimeError):
        placement.run(lambda: 1)
