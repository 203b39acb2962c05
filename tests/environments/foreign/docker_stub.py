#!/usr/bin/env python3
"""Stands in for `docker`: a container is a folder, and paths in commands and scripts are led into it.

DOCKER_STUB_FAULT is a verb that fails, DOCKER_STUB_LATE a command that takes too long, DOCKER_STUB_RM what a
failing `rm` says. DOCKER_STUB_KILLS is a point at which who called dies of SIGKILL.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ["DOCKER_STUB"])
INSIDE = re.compile(r"(?<![\w.])/(tests|logs|app)\b")


def led(text: str, root: Path) -> str:
    return INSIDE.sub(lambda found: f"{root}/{found[1]}", text)


def copied(source: Path, target: Path, root: Path) -> None:
    """All at once, so that no part of it is left or comes back if the container is removed meanwhile."""
    prepared = HOME / f"copy-{os.getpid()}"
    if source.is_dir():
        shutil.copytree(source, prepared)
    else:
        shutil.copy(source, prepared)
    for file in [prepared] if prepared.is_file() else prepared.rglob("*.sh"):
        file.write_text(led(file.read_text(), root))
    prepared.rename(target)


def removed(root: Path) -> None:
    """All at once, whatever other stubs write in it."""
    gone = HOME / f"gone-{os.getpid()}"
    root.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def point(name: str) -> None:
    if name == os.environ.get("DOCKER_STUB_KILLS"):
        os.kill(os.getppid(), signal.SIGKILL)


running = (HOME / "running").open("a")
fcntl.flock(running, fcntl.LOCK_SH)  # who gets it exclusively knows that no stub runs any more
verb, *rest = sys.argv[1:]
with (HOME / "calls.jsonl").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\n")
if verb == os.environ.get("DOCKER_STUB_FAULT"):
    sys.exit("the daemon is away")
if verb == "build":
    print("sha256:0")
elif verb == "run":
    point("before run")
    root = HOME / rest[rest.index("--name") + 1]
    (root / "app").mkdir(parents=True)
    (root / "owner").write_text(rest[rest.index("--label") + 1].partition("=")[2])
    point("in run")
    subprocess.run(rest[-3:])  # whatever its exit status: --rm
    if root.exists():
        removed(root)
elif verb == "ps":
    for root in HOME.glob("silva-*"):
        print(root.name, (root / "owner").read_text())
elif verb == "exec":
    variables = {}
    while rest[0] == "--env":
        name, _, value = rest[1].partition("=")
        variables[name] = value
        rest = rest[2:]
    root = HOME / rest[0]
    *limit, command = rest[1:]
    point("exec")
    done = subprocess.run([*limit, led(command, root)], cwd=root / "app", env={**os.environ, **variables})
    sys.exit(124 if command == os.environ.get("DOCKER_STUB_LATE") else done.returncode)
elif verb == "cp":
    point("cp")
    box, _, target = rest[1].partition(":")
    copied(Path(rest[0]), Path(led(target, HOME / box)), HOME / box)
elif verb == "rm":
    point("rm")
    if said := os.environ.get("DOCKER_STUB_RM"):
        sys.exit(said)
    for name in rest[1:]:
        if not (HOME / name).exists():
            sys.exit(f"Error response from daemon: No such container: {name}")
        removed(HOME / name)
