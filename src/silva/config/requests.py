"""The keys of whatever asks a service that others run: a chat API, a judge, a search service."""

from __future__ import annotations

from silva.config.sections import Above0, Natural, Positive, Section
from silva.wire.requests import Limits


class RequestSettings(Section):
    """How requests are sent, and which key they carry."""

    key_variable: str = ""
    """Environment variable (or line of .env) that holds the key; "" for a service without keys."""
    timeout: Above0 = 120.0
    """Seconds that one request may take."""
    retries: Natural = 5
    """How often a request is tried again after a fault that may pass."""
    max_wait: Above0 = 60.0
    """Longest pause in seconds before a request is tried again. If the service asks for more, it fails."""
    max_concurrent: Positive = 16
    """Requests at once."""
    requests_per_minute: Natural = 0
    """Requests started in a minute by one process, evenly spaced; 0: no limit."""

    @property
    def limits(self) -> Limits:
        return Limits(self.retries, self.max_wait, self.max_concurrent, self.requests_per_minute)
