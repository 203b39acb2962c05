"""Does any request stop a server? schemathesis against the three that Silva has.

    make peers PEERS=schemathesis
    .venv/bin/python benchmarks/hostile.py --cases 200 --json hostile.json
    .venv/bin/python benchmarks/hostile.py --cases 50 --only trainer

All have a tiny model. Requests are made from the server's OpenAPI document, right and wrong ones. The
inference server has one; that of the trainer is made from the types that cross its border
(hostile_trainer.py), and a hook turns what is generated into calls (peers/trainer_calls.py). The trainer is
opened first, and its sessions are attacked before /open, which would end them. That of a Tinker server is
made of the bodies of its JSON routes, with a session, a model and a sampler that exist. Counted: kinds of
answers from 500 on, routes that answer without the key, and whether the server is well afterwards: the one
samples a token, the trainer is opened again and makes an update, the third makes a model. What the document
does not describe is not counted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import CONFIGS, Row, machine, parser, results, write
from hostile_tinker import tinker_document
from hostile_trainer import document
from served import Server, served

HERE = Path(__file__).parent
PEER = HERE.parent / ".peers/schemathesis/bin/schemathesis"
HOOK = HERE / "peers"
CHECKS = "not_a_server_error,ignored_auth"
CONFIG = CONFIGS / "smoke.toml"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=200, help="examples for each route (default 200)")
    options.add_argument("--only", choices=["inference", "trainer", "tinker"], help="one of them")
    given = options.parse_args()
    if not PEER.exists():
        raise SystemExit(f"{PEER} is missing: make peers PEERS=schemathesis")
    rows = [machine()[0]]
    for part, attack in (
        ("inference", attack_inference), ("trainer", attack_trainer), ("tinker", attack_tinker),
    ):  # fmt: skip
        if given.only in (None, part):
            rows += attack(given.cases)
    print(results(rows[1:]))
    write(rows, given.json)
    return 0


def attack_inference(cases: int) -> list[Row]:
    with served("inference", CONFIG) as server:
        report = attacked(f"{server.address}/openapi.json", server, cases)
        health = server.client.get("/health", timeout=60)
    return counted("silva inference", [report], health.status_code == 200, server)


def attack_trainer(cases: int) -> list[Row]:
    with served("trainer", CONFIG) as server:
        opened = server.opened()
        schema = server.folder / "openapi.json"
        schema.write_text(json.dumps(document(server.run, opened.session)))
        reports = [
            attacked(str(schema), server, cases, "--url", server.address, "--include-path-regex", path)
            for path in ("^/(sessions|alive)", "^/open")
        ]
        well = server.trains()
    return counted("silva trainer", reports, well, server)


def attack_tinker(cases: int) -> list[Row]:
    with served("serve tinker", CONFIG) as server:
        schema = server.folder / "openapi.json"
        key = {"x-api-key": server.key}

        def post(path: str, **body: Any) -> dict[str, Any]:
            answer = server.client.post(f"/api/v1/{path}", json=body, headers=key)
            answer.raise_for_status()
            return dict(answer.json())

        def model(session: str) -> str:
            lora = {"base_model": "tiny", "lora_config": {"rank": 4}}
            asked = post("create_model", session_id=session, model_seq_id=0, **lora)
            while "model_id" not in (found := post("retrieve_future", request_id=asked["request_id"])):
                time.sleep(0.1)
            return str(found["model_id"])

        session = post("create_session")["session_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        there = {
            "session_id": session,
            "model_id": model(session),
            "base_model": "tiny",
            "sampling_session_id": post("create_sampling_session", **sampler)["sampling_session_id"],
        }
        schema.write_text(json.dumps(tinker_document(there)))
        where = ("--url", server.address, "--header", f"X-API-Key: {server.key}")
        reports = [  # at last what ends the session
            attacked(str(schema), server, cases, *where, f"--{chosen}-path-regex", "/finish$")
            for chosen in ("exclude", "include")
        ]
        well = bool(model(post("create_session")["session_id"]))
    return counted("silva serve tinker", reports, well, server)


def counted(part: str, reports: Sequence[str], well: bool, server: Server) -> list[Row]:
    report = "\n".join(reports)
    print(report, file=sys.stderr)
    requests = sum(float(number) for number in re.findall(r"(\d+) generated", report))
    silent = sum(float(number) for number in re.findall(r"Network Error: (\d+)", report))
    return [
        Row(part, "requests", requests, ""),
        Row(part, "kinds of answers from 500 on", _found("Server error", report), "", target="0"),
        Row(
            part,
            "routes open without a key",
            _found("Authentication not enforced", report),
            "",
            target="0",
        ),
        Row(part, "requests without an answer", silent, "", target="0"),
        Row(part, "well afterwards", float(well), "", target="1"),
        Row(part, "exit code when told to end", float(server.ended), "", target="0"),
    ]


def attacked(schema: str, server: Server, cases: int, *options: str) -> str:
    """What schemathesis says."""
    done = subprocess.run(
        [PEER, "run", schema, "--header", f"Authorization: Bearer {server.key}",
         "--max-examples", str(cases), "--checks", CHECKS, "--no-color", "--seed", "0",
         "--continue-on-failure", "--request-timeout", "120", *options],
        capture_output=True, text=True, timeout=3000, cwd=server.folder,
        env=os.environ | {"PYTHONPATH": str(HOOK), "SCHEMATHESIS_HOOKS": "trainer_calls"},
    )  # fmt: skip
    return done.stdout + done.stderr


def _found(words: str, report: str) -> float:
    """As the summary counts them: "Server error: 2"."""
    return float(sum(int(number) for number in re.findall(rf"{words}[^:\n]*: (\d+)", report)))


if __name__ == "__main__":
    sys.exit(main())
