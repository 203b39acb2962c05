"""Tests that are coroutines: they run in `run` of their module, or else of their folder's conftest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest


def in_loop(run: Callable[[Coroutine[Any, Any, None]], None]) -> Callable[[pytest.Function], bool | None]:
    """The hook `pytest_pyfunc_call` of a conftest."""

    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
        test = pyfuncitem.obj
        if not inspect.iscoroutinefunction(test):
            return None
        own = getattr(pyfuncitem.module, "run", run)
        own(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
        return True

    return pytest_pyfunc_call
