"""On a clock that jumps."""

from tests.coroutines import in_loop
from tests.engines.http_park import run

pytest_pyfunc_call = in_loop(run)
