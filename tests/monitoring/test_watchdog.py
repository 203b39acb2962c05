from __future__ import annotations

import asyncio
import threading

from silva.monitoring.watchdog import Watchdog, stacks


def test_reports_at_doubling_intervals_until_the_next_beat() -> None:
    now, reports = [0.0], []
    watchdog = Watchdog(10.0, lambda silence, computed, stacks: reports.append(silence), clock=lambda: now[0])
    watchdog.beat()
    for second in range(1, 61):
        now[0] = float(second)
        watchdog.check()
    assert reports == [10.0, 20.0, 40.0]
    watchdog.beat()
    for second in range(61, 75):
        now[0] = float(second)
        watchdog.check()
    assert reports == [10.0, 20.0, 40.0, 10.0]


def test_the_thread_reports_a_real_stall_and_ends() -> None:
    reported = threading.Event()
    watchdog = Watchdog(0.02, lambda silence, computed, stacks: reported.set())
    watchdog.start()
    assert reported.wait(timeout=10)
    watchdog.stop()
    assert "silva-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_who_computes_is_told_from_who_waits(monkeypatch) -> None:
    now, computed, reports = [0.0], [5.0], []
    monkeypatch.setattr("silva.monitoring.watchdog.time.process_time", lambda: computed[0])
    watchdog = Watchdog(10.0, lambda silence, spent, stacks: reports.append((silence, spent)), lambda: now[0])
    watchdog.beat()
    now[0], computed[0] = 10.0, 12.5
    watchdog.check()
    now[0] = 20.0
    watchdog.check()
    watchdog.beat()
    watchdog.check()
    now[0] = 30.0
    watchdog.check()
    assert reports == [(10.0, 7.5), (20.0, 7.5), (10.0, 0.0)]


def test_stacks_name_the_thread_and_the_function_it_stands_in() -> None:
    release, standing = threading.Event(), threading.Event()

    def stuck_in_a_lock() -> None:
        standing.set()
        release.wait()

    thread = threading.Thread(target=stuck_in_a_lock, name="worker-7")
    thread.start()
    standing.wait()
    text = stacks()
    release.set()
    thread.join()
    assert "thread worker-7" in text
    assert "stuck_in_a_lock" in text


def test_stacks_show_where_tasks_wait_and_group_equal_ones() -> None:
    async def innermost() -> None:
        await asyncio.get_running_loop().create_future()

    async def episode() -> None:
        await innermost()

    async def main() -> str:
        tasks = [asyncio.create_task(episode(), name=f"episode-{i}") for i in range(3)]
        await asyncio.sleep(0)
        text = await asyncio.to_thread(stacks, asyncio.get_running_loop())
        for task in tasks:
            task.cancel()
        return text

    text = asyncio.run(main())
    assert "asyncio task episode-0 and 2 more at the same place" in text
    assert text.count("in innermost") == 1
    assert text.count("in episode") == 1
