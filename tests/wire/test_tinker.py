"""What the SDK of the Tinker service raises: refused, a key that may not, or a part that is lost."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("tinker", reason="needs tinker: pip install tinker")

import tinker
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from silva.errors import ConfigError, NonFiniteError, PartLost
from silva.wire.tinker import Gone, faults
from silva.wire.transport import Refused

EXPECTED = {
    400: Refused, 401: ConfigError, 402: PartLost, 403: ConfigError, 404: Gone, 409: PartLost, 410: Gone,
    413: Refused, 422: Refused, 429: PartLost, 500: PartLost, 503: PartLost,
}  # fmt: skip


def answered(status: int) -> Exception:
    request = httpx.Request("POST", "http://here/api/v1/optim_step")
    return tinker.APIStatusError("words\nof it", response=httpx.Response(status, request=request), body=None)


def raised(error: Exception, cause: Exception | None = None, *, own: bool = True) -> Exception:
    with pytest.raises(Exception) as found, faults("step", own=own):
        raise error from cause
    return found.value


@pytest.mark.parametrize("status", EXPECTED)
def test_each_status_says_whether_the_run_can_go_on(status: int) -> None:
    found = raised(answered(status))
    assert type(found) is EXPECTED[status]
    assert f"HTTP {status}: words of it (asked to step)" in str(found)
    assert getattr(found, "status", status) == status


@pytest.mark.parametrize("status", EXPECTED)
def test_of_what_somebody_named_a_404_is_a_refusal(status: int) -> None:
    assert type(raised(answered(status), own=False)) is (Refused if status == 404 else EXPECTED[status])


@pytest.mark.parametrize("status", EXPECTED)
def test_results_raise_errors_that_are_none_of_the_sdk_s_own(status: int) -> None:
    """ValueError, RetryableException and RuntimeError, each from the status."""
    for error in (
        ValueError("Error retrieving result"),
        RetryableException("expired"),
        RuntimeError("poisoned"),
    ):
        assert type(raised(error, answered(status))) is EXPECTED[status]


def test_a_result_that_failed_says_whose_fault_it_was() -> None:
    for category, expected in (("User", Refused), ("Server", PartLost), ("Unknown", PartLost)):
        error = tinker.RequestFailedError("no", request_id="a", category=RequestErrorCategory[category])
        assert type(raised(error)) is expected
    assert type(raised(tinker.APIConnectionError(request=httpx.Request("GET", "http://here")))) is PartLost


@pytest.mark.parametrize("error", [ValueError("of our own"), NonFiniteError("a loss"), KeyError("x")])
def test_what_is_none_of_the_service_s_faults_stays_as_it_is(error: Exception) -> None:
    assert raised(error) is error
