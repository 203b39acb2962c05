"""`.env` files: secrets for the process, kept out of every configuration.

Lines are KEY=VALUE, `export KEY=VALUE`, comments or blank. No interpolation, no values of several lines.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from silva.errors import ConfigError

_PAIR = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_PLAIN = re.compile(r"(.*?)(?:(?:^|\s+)#.*)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def load_dotenv(path: Path) -> dict[str, str]:
    """Read a `.env` file and set each variable that the process does not have yet.

    Returns:
        every pair of the file, also those the process had already; {} where there is no file.

    Raises:
        ConfigError: a line is no KEY=VALUE; its text is not shown, it may hold a secret.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            key, value = _parse(line.strip(), f"{path}:{number}")
            found[key] = value
    for key, value in found.items():
        os.environ.setdefault(key, value)
    return found


def _parse(line: str, where: str) -> tuple[str, str]:
    pair = _PAIR.fullmatch(line)
    if pair is None:
        raise ConfigError(f"{where}: expected KEY=VALUE (letters, digits and _ in the key)")
    key, rest = pair.groups()
    quoted = {'"': _DOUBLE, "'": _SINGLE}.get(rest[:1])
    match = (quoted or _PLAIN).fullmatch(rest)
    if match is None:
        raise ConfigError(f"{where}: {key}: the quote is not closed, or text follows it")
    if quoted is _DOUBLE:
        return key, re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), match[1])
    return key, match[1]
