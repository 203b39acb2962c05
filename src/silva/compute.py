"""The one thread that computes.

torch gives each thread that computes a team of OpenMP workers of its own. Once there are more workers than
cores, all of them fall asleep after every operation, and waking them takes longer than most operations of a
small model (sampling took 1.6 to 1.9 times as long). So the model is loaded, sampled from and trained on one
thread with a team, and the thread that made it computes alone from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def set_threads(count: int) -> None:
    """Workers for torch's operations in this thread.

    MKL's first vector function in a worker may run before the worker knows how exact it has to be (seen:
    tanh off by 9e-5 in one process of 30). So the first ones are thrown away.
    """
    torch.set_num_threads(count)
    for function in (torch.tanh, torch.exp, torch.log):
        function(torch.ones(1 << 15))  # MKL shares out what torch finds too little to


class ComputeThread(ThreadPoolExecutor):
    """An executor of one thread, with `threads` workers for torch (0: as many as the caller has now).

    Make it before anything else computes: a team that the calling thread has already stays in the way.
    `shutdown` gives the caller its workers back.
    """

    def __init__(self, threads: int = 0) -> None:
        self._callers = torch.get_num_threads()
        super().__init__(
            1,
            thread_name_prefix="compute",
            initializer=set_threads,
            initargs=(threads or self._callers,),
        )
        self.submit(torch.get_num_threads).result()  # it has its team before the caller loses its own
        torch.set_num_threads(1)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it there, wait, and return what it returns."""
        return self.submit(function, *args, **kwargs).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        torch.set_num_threads(self._callers)
