"""Sockets are real, and so is the clock."""

from tests.coroutines import in_loop
from tests.server.running import run

pytest_pyfunc_call = in_loop(run)
