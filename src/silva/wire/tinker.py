"""The Tinker service, asked through its official SDK: who is asked, and what its faults mean here.

the SDK itself                                  what comes through is
429, 5xx, 408: again, with pauses               401, 403                     ConfigError
402: a pause of up to an hour                   400, 404, 413, 422           Refused, at once
410 of a result: the request again              anything else                PartLost: the run goes on
                                                                             from its last checkpoint
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

from silva.errors import CapabilityError, ConfigError, EngineError, PartLost, one_line
from silva.ports import CLOCK
from silva.wire.transport import Refused

if TYPE_CHECKING:
    from tinker import ServiceClient

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
    with faults("reach the service"):
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


@contextmanager
def faults(doing: str) -> Iterator[None]:
    """What the SDK raises, as an error of Silva. `doing`: such as "sample"."""
    import tinker

    try:
        yield
    except tinker.APIStatusError as error:
        text = f"Tinker: HTTP {error.status_code}: {one_line(error.message, 500)} (asked to {doing})"
        if error.status_code in (401, 403):
            raise ConfigError(f"{text}; expected a key that may do this") from error
        if error.status_code in REFUSED:
            raise Refused(text, error.status_code) from error
        raise PartLost(text) from error
    except tinker.RequestFailedError as error:
        text = f"Tinker: {one_line(str(error), 500)} (asked to {doing})"
        if str(getattr(error.category, "value", error.category)) == "user":
            raise Refused(text, 400) from error
        raise PartLost(text) from error
    except tinker.TinkerError as error:
        raise PartLost(f"Tinker: {one_line(str(error), 500)} (asked to {doing})") from error
