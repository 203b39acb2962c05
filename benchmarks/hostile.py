"""Does any request stop the inference server? schemathesis against `silva inference` with a tiny model.

    make peers PEERS=schemathesis
    .venv/bin/python benchmarks/hostile.py --cases 200 --json hostile.json

Requests are made from the server's OpenAPI document, right and wrong ones. Counted: answers from 500 on,
routes that answer without the key, and whether the server is healthy afterwards. Answers that the document
does not describe are shown, and count as nothing here.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
from common import CONFIGS, Row, machine, parser, results, write

PEER = Path(__file__).parents[1] / ".peers/schemathesis/bin/schemathesis"
CHECKS = "not_a_server_error,ignored_auth"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=200, help="examples for each route (default 200)")
    given = options.parse_args()
    if not PEER.exists():
        raise SystemExit(f"{PEER} is missing: make peers PEERS=schemathesis")
    key = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "silva", "inference", f"@{CONFIGS / 'smoke.toml'}", "--port", "0"],
            env=os.environ | {"SILVA_API_KEY": key}, cwd=folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "listening at" in line)
            address = line.rpartition(" ")[2].strip()
            report = attacked(address, key, given.cases)
            headers = {"authorization": f"Bearer {key}"}
            health = httpx2.get(f"{address}/health", headers=headers, timeout=60)
        finally:
            server.terminate()
            ended = server.wait(30)
    print(report, file=sys.stderr)
    counted, silent = (re.search(words, report) for words in (r"(\d+) generated", r"Network Error: (\d+)"))
    rows = [
        machine()[0],
        Row("silva inference", "requests", float(counted[1]) if counted else float("nan"), ""),
        Row("silva inference", "answers from 500 on", _found("Server error", report), "", target="0"),
        Row("silva inference", "routes open without a key", _found("ignore", report), "", target="0"),
        Row(
            "silva inference",
            "requests without an answer",
            float(silent[1]) if silent else 0.0,
            "",
            target="0",
        ),
        Row("silva inference", "healthy afterwards", float(health.status_code == 200), "", target="1"),
        Row("silva inference", "exit code when told to end", float(ended), "", target="0"),
    ]
    print(results(rows[1:]))
    write(rows, given.json)
    return 0


def attacked(address: str, key: str, cases: int) -> str:
    """What schemathesis says."""
    done = subprocess.run(
        [PEER, "run", f"{address}/openapi.json", "--header", f"Authorization: Bearer {key}",
         "--max-examples", str(cases), "--checks", CHECKS, "--no-color", "--seed", "0",
         "--continue-on-failure", "--request-timeout", "120"],
        capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    return done.stdout + done.stderr


def _found(words: str, report: str) -> float:
    return float(len(re.findall(f"- {words}", report, re.IGNORECASE)))


if __name__ == "__main__":
    sys.exit(main())
