"""Which walls this machine can build, and the command line that starts a template within them."""

from __future__ import annotations

import functools
import logging
import marshal
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silva.errors import ConfigError
from silva.sandbox import cgroups, filters
from silva.sandbox.settings import SandboxSettings

NOBODY = 65534
MIB = 1 << 20
HERE = Path(__file__).parent
FILES_PER_MIB = 256  # of /tmp: each needs memory that its size does not count
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
LANDLOCK_CREATE = 444
INSIDE = ("running.py", "inside.py", "template.py")  # modules of the interpreter within, in this order
LOADER = """
import marshal, sys
for name, code in marshal.loads(bytes.fromhex(sys.argv.pop(1))):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Walls:
    """What was found to work, by who builds the outer ones. `why` says in words what is missing; empty:
    nothing."""

    kind: str  # bubblewrap | userns | none
    as_nobody: bool = False  # the process is started as the user nobody, as this one is root
    why: str = ""

    def __str__(self) -> str:
        parts = {"bubblewrap": "bubblewrap", "userns": "a user namespace", "none": "no walls at all"}
        layers = [parts[self.kind]]
        if self.kind != "none":
            layers += ["seccomp"] if filters.known() else []
            layers += [f"Landlock (version {landlock_version()})"] if landlock_version() else []
            layers += ["cgroups"] if cgroups.parents() else []
            layers += ["as nobody"] if self.as_nobody else ["as root"] if os.geteuid() == 0 else []
        return ", ".join(layers) + (f" ({self.why})" if self.why else "")


def chosen(settings: SandboxSettings) -> Walls:
    """The walls that the settings ask for, if they work here; the log says once which they are.

    Raises:
        ConfigError: those asked for do not work here, or with `auto` none do.
    """
    walls = _chosen(settings.sandbox, settings.packages)
    if isinstance(walls, str):
        raise ConfigError(walls)
    return walls


@functools.cache
def _chosen(kind: str, packages: bool = True) -> Walls | str:
    if kind == "none":
        walls = Walls("none", why='sandbox = "none"')
        logging.getLogger(__name__).warning("code of the model runs without a sandbox, as %s", _user())
        return walls
    tried: list[str] = []
    as_root = os.geteuid() == 0 and shutil.which("setpriv")
    for each in ("bubblewrap", "userns") if kind == "auto" else (kind,):
        for as_nobody in (True, False) if as_root else (False,):
            # Only other kinds: a start as nobody fails where nobody cannot read the Python installation.
            others = [line for line in tried if not line.startswith(each)]
            walls = Walls(each, as_nobody, "; ".join(others))
            problem = _problem(walls, packages)
            if not problem:
                logging.getLogger(__name__).info("code of the model runs in a sandbox: %s", walls)
                return walls
            tried.append(f"{each}{' as nobody' if as_nobody else ''}: {problem}")
    return (
        f"no sandbox works here ({'; '.join(tried)}). Install bubblewrap (apt-get install bubblewrap), or "
        'set sandbox = "none" to run code of the model without any wall'
    )


def describe() -> str:
    """For `silva doctor`: the walls that `auto` takes here, or why there are none."""
    return str(_chosen("auto"))


def command(walls: Walls, packages: bool, ready: Sequence[str] = ()) -> list[str]:
    """The command line of a template (template.py) within the outer walls; its standard input is a socket."""
    python, prefix = _python(walls.as_nobody)
    visible = _visible(prefix, packages)
    told = {"ready": list(ready), "walls": walls.kind != "none", "paths": _packages() if packages else [],
            "binds": visible if walls.kind == "userns" else []}  # fmt: skip
    # Not -I: it ignores PYTHONHASHSEED, and sets would print in another order in each sandbox.
    interpreter = [python, "-P", "-s", "-S", "-c", LOADER, _compiled(), marshal.dumps(told).hex()]
    setpriv = shutil.which("setpriv") or "setpriv"
    drop = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--"]
    around = _bubblewrap(visible) if walls.kind == "bubblewrap" else []
    return [*(drop if walls.as_nobody else []), *around, *interpreter]


def _bubblewrap(visible: list[str]) -> list[str]:
    binds = [part for path in visible for part in ("--ro-bind", path, path)]
    links = [part for name in ("bin", "sbin", "lib", "lib64") if Path(f"/{name}").is_symlink()
             for part in ("--symlink", f"usr/{name}", f"/{name}")]  # fmt: skip
    devices = [part for name in ("null", "zero", "full", "random", "urandom")
               for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]  # fmt: skip
    links += [part for number, name in enumerate(("stdin", "stdout", "stderr"))
              for part in ("--symlink", f"/proc/self/fd/{number}", f"/dev/{name}")]  # fmt: skip
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all", "--unshare-user", "--cap-drop", "ALL",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--new-session",
        "--tmpfs", "/tmp",  # before what may be bound within it
        *binds, *links, "--proc", "/proc", *devices, "--symlink", "/tmp", "/dev/shm",
        "--remount-ro", "/", "--chdir", "/tmp", "--",
    ]  # fmt: skip


def told(walls: Walls, settings: SandboxSettings) -> bytes:
    """What a template is told of one sandbox."""
    memory, files = settings.memory_mb * MIB, settings.file_mb * MIB
    limits = {
        "RLIMIT_CPU": [settings.cpu_seconds, settings.cpu_seconds + 1], "RLIMIT_AS": [memory, memory],
        "RLIMIT_FSIZE": [files, files], "RLIMIT_NPROC": [settings.processes, settings.processes],
        "RLIMIT_NOFILE": [256, 256], "RLIMIT_CORE": [0, 0], "RLIMIT_MEMLOCK": [0, 0],
        "RLIMIT_MSGQUEUE": [0, 0],
    }  # fmt: skip
    if walls.kind == "none":
        del limits["RLIMIT_NPROC"]  # all that this user runs would count
    about: dict[str, Any] = {
        "walls": walls.kind != "none", "keep_state": settings.keep_state, "seconds": settings.seconds,
        "size": files, "files": settings.file_mb * FILES_PER_MIB, "limits": limits, "writable": ["/tmp"],
    }  # fmt: skip
    if walls.kind != "none":
        about |= {
            "landlock": landlock_version(), "seccomp_call": SECCOMP_CALL[platform.machine()],
            "denied": filters.denied(), "notify": filters.network(notify=True),
            "refuse": filters.network(notify=False),
        }  # fmt: skip
    return marshal.dumps(about)


def _visible(prefix: str, packages: bool) -> list[str]:
    """Folders of the host that are shown, read-only."""
    usual = [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if Path(path).exists()]
    usual = [path for path in usual if not Path(path).is_symlink()] + ["/etc/ld.so.cache"]
    homes = [prefix, *(_packages() if packages else [])]
    outside = [path for path in homes if not Path(path).is_relative_to("/usr")]
    return [*usual, *dict.fromkeys(outside)]


@functools.cache
def _packages() -> list[str]:
    """Folders of installed packages."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [path for path in dict.fromkeys(found) if Path(path).is_dir()]


@functools.cache
def _python(as_nobody: bool) -> tuple[str, str]:
    """The interpreter itself, not the link to it in a virtual environment, and where it is installed. Where
    nobody cannot read it, as in the home folder of root, the system's own of the same version does."""
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    systems = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if as_nobody and not _is_open(Path(own)) and Path(systems).exists():
        return systems, "/usr"
    return own, sys.base_prefix


def _is_open(path: Path) -> bool:
    """Whether every user can get to it."""
    return all(each.stat().st_mode & 0o1 for each in (path, *path.parents))


@functools.cache
def _source(name: str) -> str:
    return (HERE / name).read_text()


@functools.cache
def _compiled() -> str:
    """Bytecode is the same in all releases of a minor version, which `_python` keeps to."""
    modules = [(f"silva.sandbox.{name[:-3]}", compile(_source(name), name, "exec")) for name in INSIDE]
    return marshal.dumps(modules).hex()


@functools.cache
def landlock_version() -> int:
    """0: the kernel has none."""
    import ctypes

    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, 0, 1))


def _problem(walls: Walls, packages: bool = True) -> str:
    """Why these walls do not work here; empty: they do."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not filters.known():
        return f"no filter of system calls for {platform.machine()}"
    if walls.kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if os.geteuid() == 0 and not walls.as_nobody and not landlock_version():
        return "started as root it needs Landlock, which this kernel does not have"
    from silva.sandbox.process import works  # it builds on this module

    return works(walls, packages)


def _user() -> str:
    try:
        return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"user {os.geteuid()}"
