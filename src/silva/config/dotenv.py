"""`.env` files: secrets for the process, kept out of every configuration. Values are not interpolated."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from silva.errors import ConfigError


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
    from dotenv.parser import parse_stream  # takes 40 ms, and most folders have no such file

    found: dict[str, str] = {}
    for pair in parse_stream(io.StringIO(text)):
        source = pair.original.string
        blank = source[: len(source) - len(source.lstrip())].count("\n")
        where = f"{path}:{pair.original.line + blank}"
        key = re.match(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=", source)
        if pair.error and key:
            raise ConfigError(f"{where}: {key[1]}: the quote is not closed, or text follows it")
        if pair.error or (pair.key and not key):
            raise ConfigError(f"{where}: expected KEY=VALUE (letters, digits and _ in the key)")
        if pair.key:
            comment = re.match(r"[^=]*=\s*#", source)  # in KEY=#x too
            found[pair.key] = "" if comment else pair.value or ""
    for name, value in found.items():
        os.environ.setdefault(name, value)
    return found
