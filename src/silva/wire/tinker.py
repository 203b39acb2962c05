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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from silva.errors import CapabilityError, ConfigError, PartLost, one_line
from silva.wire.transport import Refused

if TYPE_CHECKING:
    from tinker import ServiceClient

REFUSED = (400, 404, 413, 422)


def service(url: str, key: str) -> ServiceClient:
    """A client; nothing is asked yet.

    Args:
        url: "" is TINKER_BASE_URL, or else the service of Thinking Machines.

    Raises:
        CapabilityError: the SDK is not installed.
    """
    if importlib.util.find_spec("tinker") is None:
        raise CapabilityError("type = \"tinker\" needs the package tinker: pip install 'silva[tinker]'")
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # of the SDK to its makers; read when it is imported
    import tinker

    with faults("reach the service"):
        return tinker.ServiceClient(base_url=url or None, api_key=key)


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
