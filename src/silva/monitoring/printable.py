"""Text on its way to a terminal: control characters could move the cursor, set the title or clear the screen.

Models, rows, tools and servers write what is shown, errors and logs included, so all of it goes through
`printable`. Only the standard library and errors are imported here, because `silva --help` comes this way.
"""

from __future__ import annotations

import sys

from silva.errors import OutputError


def printable(text: str) -> str:
    """Without control characters, tabs as spaces."""
    text = text.replace("\t", "    ")
    return "".join(
        c if c == "\n" or c.isprintable() or c == " " else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def put(text: object = "", *, error: bool = False) -> None:
    """`print`, to standard error if asked. Raises OutputError where standard output takes no more."""
    if error:
        print(printable(str(text)), file=sys.stderr, flush=True)
        return
    try:
        print(printable(str(text)))
    except OSError as fault:
        raise _told(fault) from fault


def flush() -> None:
    """What was put is out; errors as of `put`."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError as fault:
            raise _told(fault) from fault


def _told(fault: OSError) -> OSError:
    """Nobody reads on, which is no error, or an OutputError."""
    if isinstance(fault, BrokenPipeError):
        return fault
    return OutputError(f"standard output cannot be written: {fault.strerror or fault}")


def guard_logs() -> None:
    """Make what Python prints of warnings that are logged printable."""
    import logging

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record))

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Printable())
