#!/usr/bin/env python3
"""Stands in for `docker`: a container is a folder, and paths in commands and scripts are led into it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path(os.environ["DOCKER_STUB"])
INSIDE = re.compile(r"(?<![\w.])/(tests|logs|app)\b")


def led(text: str, root: Path) -> str:
    return INSIDE.sub(lambda found: f"{root}/{found[1]}", text)


def copied(source: Path, target: Path, root: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    for file in [target] if target.is_file() else target.rglob("*.sh"):
        file.write_text(led(file.read_text(), root))


verb, *rest = sys.argv[1:]
with (HOME / "calls.jsonl").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\n")
if verb == os.environ.get("DOCKER_STUB_FAULT"):
    sys.exit("the daemon is away")
if verb == "build":
    print("sha256:0")
elif verb == "run":
    root = Path(tempfile.mkdtemp(prefix="box", dir=HOME))
    (root / "app").mkdir()
    print(root.name)
elif verb == "exec":
    variables = {}
    while rest[0] == "--env":
        name, _, value = rest[1].partition("=")
        variables[name] = value
        rest = rest[2:]
    root = HOME / rest[0]
    *limit, command = rest[1:]
    done = subprocess.run([*limit, led(command, root)], cwd=root / "app", env={**os.environ, **variables})
    sys.exit(done.returncode)
elif verb == "cp":
    box, _, target = rest[1].partition(":")
    copied(Path(rest[0]), Path(led(target, HOME / box)), HOME / box)
elif verb == "rm":
    shutil.rmtree(HOME / rest[-1])
