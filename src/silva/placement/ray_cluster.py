"""A Ray cluster, of our own or a given one, and the token that opens it.

Whoever has the token may run code there, so nobody else can read it. Not here: what runs there (ray.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silva.errors import CapabilityError, ConfigError, SilvaError
from silva.placement.carrier import MODE, TOKEN, TOKEN_PATH, words
from silva.scratch import private_folder

if TYPE_CHECKING:
    from silva.placement.settings import RayPlacementSettings

STORE = 256 << 20  # bytes of the object store of our own cluster: what does not fit goes to the disk
OWN_CLUSTER = {  # no idle workers; none gives way to, or is killed for the memory of, whatever else runs
    "enable_worker_prestart": False, "prestart_worker_first_driver": False, "worker_niceness": 0,
    "memory_monitor_refresh_ms": 0,
}  # fmt: skip
LONGEST_FOLDER = 40  # bytes: 65 come after it in the path of a socket, which has at most 107
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0, as is usual there: all ports of Ray on loopback
Say = Callable[[str], None]


def join(address: str) -> None:
    """Make this process one of the cluster's, once."""
    import ray

    if not ray.is_initialized():
        _init(address=address)


@contextlib.contextmanager
def cluster(settings: RayPlacementSettings, say: Say, cpus: float = 0.0) -> Iterator[str]:
    """The address of the cluster, which this process belongs to until the end of the block.

    Call it on the main thread: a new cluster dies with the thread that started it.

    Args:
        cpus: a new one has so many at least: its parts share this machine's, as those of services do.

    Raises:
        CapabilityError: Ray is not installed.
        ConfigError: there is no such cluster, or everybody may use it.
    """
    if importlib.util.find_spec("ray") is None:
        raise CapabilityError("placement.type = \"ray\" needs the package ray: pip install 'silva[ray]'")
    options: dict[str, Any] = {}
    if settings.working_dir:
        if not Path(settings.working_dir).is_dir():
            raise ConfigError(f"placement.working_dir = {settings.working_dir!r}: no such folder")
        options["runtime_env"] = {"working_dir": settings.working_dir}
    with contextlib.ExitStack() as stack:
        if settings.address:
            _use_token(settings.address, say)
            options["address"] = settings.address
        else:
            # Everybody may write to the folder that Ray is given: it lies in one that nobody else can enter.
            folder = stack.enter_context(private_folder("ray", longest=LONGEST_FOLDER))
            _make_token(folder / "token")
            os.environ[LOOPBACK] = "0"
            options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE,
                        "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
                        "_temp_dir": str(folder / "r"), "_system_config": OWN_CLUSTER}  # fmt: skip
        import ray

        stack.callback(ray.shutdown)
        yield _init(**options)


def _init(**options: Any) -> str:
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        found = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if options["address"] == "local":
            raise SilvaError(f"Ray did not start here: {words(error)}") from error
        raise ConfigError(
            f"placement.address = {options['address']!r}: {words(error)}; expected a running cluster whose "
            f"token this process has ({TOKEN_PATH}, or ~/.ray/auth_token)"
        ) from error
    finally:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, before)
    return str(found.address_info["gcs_address"])


def _make_token(path: Path) -> None:
    """Ray's own file could be read by everybody on the machine."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.pop(TOKEN, None)
    os.environ.update({MODE: "token", TOKEN_PATH: str(path)})


def _use_token(address: str, say: Say) -> None:
    """Ray asks for a token, and nobody else can read the file that it makes.

    Raises:
        ConfigError: there is no token.
    """
    if os.environ.get(MODE):
        return
    file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if not os.environ.get(TOKEN) and not file.is_file():
        raise ConfigError(
            f"placement.address = {address!r}: got no token for it, expected {TOKEN_PATH} or {file}. Without "
            f"one everybody who reaches the cluster can run code there; {MODE}=disabled allows that"
        )
    if not os.environ.get(TOKEN_PATH) and file.is_file() and file.stat().st_mode & 0o077:
        file.chmod(0o600)
        say(f"{file} could be read by others: its mode is 600 now")
    os.environ[MODE] = "token"
