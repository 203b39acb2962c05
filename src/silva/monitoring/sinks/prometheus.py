"""The newest numbers of a run behind one address that Prometheus reads: GET /metrics, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from silva.monitoring.exposition import CONTENT_TYPE, sample
from silva.monitoring.sinks.outlet import Tracked
from silva.storage.rollouts import RolloutRow

READING = 10.0  # seconds that a client has for its request


class Prometheus:
    """A `Sink`. Each number is a series of the gauge silva_metric, with the labels run and metric."""

    def __init__(self, host: str, port: int, run: Tracked) -> None:
        """Raises OSError if the address is taken."""
        self._run, self._numbers, self._step, self._warnings = run, dict[str, float](), 0, 0
        self._lock = threading.Lock()
        text = self.text

        class Handler(BaseHTTPRequestHandler):
            timeout = READING

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Who asked is no news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="silva-prometheus", daemon=True).start()
        run.say(f"Prometheus reads the numbers of this run at http://{host}:{self.port}/metrics")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step = step
            self._numbers |= metrics

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """It shows numbers only."""

    def message(self, level: str, text: str) -> None:
        with self._lock:
            self._warnings += level in ("warning", "error")

    def text(self) -> str:
        """What a reader gets now."""
        run = ("run", self._run.name)
        with self._lock:
            lines = [
                "# TYPE silva_step gauge", sample("silva_step", self._step, [run]),
                "# TYPE silva_warnings_total counter", sample("silva_warnings_total", self._warnings, [run]),
                "# TYPE silva_metric gauge",
            ]  # fmt: skip
            lines += [
                sample("silva_metric", value, [run, ("metric", key)])
                for key, value in sorted(self._numbers.items())
            ]
        return "\n".join(lines) + "\n"

    def close(self, finished: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
