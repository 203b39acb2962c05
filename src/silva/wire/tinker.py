"""The Tinker service, asked through its official SDK: who is asked, and what its faults mean here.

the SDK itself                         what comes through is
429, 5xx, 408: again, with pauses      401, 403                  ConfigError
402: a pause of up to an hour          400, 413, 422             Refused, at once
410 of a sample: the request again     404                       Refused; Gone, if it was made by this run
                                       410                       Gone: a lost part
                                       anything else             PartLost
A lost part is a run that goes on from its last checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from silva.errors import CapabilityError, ConfigError, EngineError, PartLost, SilvaError, one_line
from silva.ports import CLOCK
from silva.wire.transport import Refused

if TYPE_CHECKING:
    from tinker import ServiceClient, TinkerError

PATIENCE = 10.0  # seconds
REFUSED = (400, 404, 413, 422)


def service(url: str, key: str) -> ServiceClient:
    """A client of a service that answers. It blocks, and the SDK alone would for minutes if nobody answers.

    Args:
        url: "" is TINKER_BASE_URL, or else the service of Thinking Machines.

    Raises:
        CapabilityError: the SDK is not installed.
        ConfigError: the SDK would not send the key.
        EngineError: nobody answers at the address.
    """
    if importlib.util.find_spec("tinker") is None:
        raise CapabilityError("type = \"tinker\" needs the package tinker: pip install 'silva[tinker]'")
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # of the SDK to its makers; read when it is imported
    import tinker

    if key and not key.startswith(("tml-", "eyJ")):
        raise ConfigError("engine.key_variable: got a key of another form, expected one such as tml-2f7a")
    if address := url or os.environ.get("TINKER_BASE_URL", ""):
        _wait_for(address)
    with faults("reach the service", own=False):
        return tinker.ServiceClient(base_url=url or None, api_key=key)


def _wait_for(address: str) -> None:
    end = CLOCK.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{address.rstrip('/')}/api/v1/healthz", timeout=PATIENCE):
                return
        except urllib.error.HTTPError:  # an answer
            return
        except (OSError, ValueError) as error:
            if CLOCK.monotonic() > end or isinstance(error, ValueError):
                raise EngineError(
                    f"engine.url: got no answer from {address} ({one_line(str(error), 200)}), expected a "
                    "Tinker service"
                ) from error
            time.sleep(1)


class Gone(PartLost):
    """A session, a run or a sampler, which was made by this run, is not at the service any more."""


@contextmanager
def faults(doing: str, *, own: bool = True) -> Iterator[None]:
    """What the SDK raises, as an error of Silva.

    Args:
        doing: such as "sample".
        own: what is asked for was made by this run; false: somebody has named it.
    """
    import tinker

    try:
        yield
    except SilvaError:
        raise
    except Exception as error:
        fault = _cause(error)
        if fault is None:
            raise
        asked = f"(asked to {doing})"
        if isinstance(fault, tinker.APIStatusError):
            status = fault.status_code
            text = f"Tinker: HTTP {status}: {one_line(fault.message, 500)} {asked}"
            if status in (401, 403):
                raise ConfigError(f"{text}; expected a key that may do this") from error
            if status == 410 or (status == 404 and own):
                raise Gone(text) from error
            if status in REFUSED:
                raise Refused(text, status) from error
            raise PartLost(text) from error
        text = f"Tinker: {one_line(str(fault), 500)} {asked}"
        if getattr(getattr(fault, "category", None), "value", None) == "user":  # a RequestFailedError
            raise Refused(text, 400) from error
        raise PartLost(text) from error


def _cause(error: BaseException | None) -> TinkerError | None:
    """The error of the SDK that this one is, or comes from: of a result it may be a ValueError."""
    from tinker import TinkerError

    while error is not None and not isinstance(error, TinkerError):
        error = error.__cause__
    return error
