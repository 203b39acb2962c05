"""Who asks: an API key is a tenant. Only its digest is stored or shown."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.types import Scope

from silva.errors import ConfigError
from silva.wire.guard import HttpError

HEADER = b"x-api-key"
FORM = re.compile(r"tml-[!-~]{1,252}")


class ApiKeys:
    """What lets requests through the guard.

    Args:
        keys: those that are known; none: every key of the right form is a tenant, for a server that only this
            machine can reach. A page in a browser cannot send one: the header is not a simple one.

    Raises:
        ConfigError: a key that the SDK would not send.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if any(not FORM.fullmatch(key) for key in keys):
            raise ConfigError(
                "API keys: got one of another form, expected keys such as tml-2f7a, comma between"
            )
        self._keys = [key.encode() for key in keys]

    def __call__(self, scope: Scope) -> None:
        """Raises HttpError without a key that is known."""
        key = _key(scope)
        known = not self._keys or any([hmac.compare_digest(key, each) for each in self._keys])
        if not FORM.fullmatch(key.decode("latin-1")) or not known:
            raise HttpError(401, "a key is needed: X-API-Key: tml-KEY (TINKER_API_KEY)")


def owner(scope: Scope) -> str:
    """The tenant of a request."""
    return hashlib.sha256(_key(scope)).hexdigest()[:32]


def _key(scope: Scope) -> bytes:
    found = [value for name, value in scope["headers"] if name == HEADER]
    return found[0] if len(found) == 1 else b""
