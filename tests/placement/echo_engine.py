"""An engine whose server is a program of others: it says what it was asked, and ends when told to."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Literal

from silva.config.parts import EngineSettings

SERVER = """
import http.server, os, sys
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"{self.path} {self.headers['authorization'] == 'Bearer ' + os.environ['ECHO_KEY']}".encode()
        self.send_response(418)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.wfile.flush()
        if self.path == "/end":
            os._exit(0)
    def log_message(self, *args):
        print("asked", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Echo).serve_forever()
"""


class EchoEngine(EngineSettings):
    launched: ClassVar[bool] = True
    type: Literal["echo"] = "echo"

    def command(
        self, model: str, host: str, port: int, key: str, **needs: Any
    ) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", SERVER, host, str(port)], {"ECHO_KEY": key}
