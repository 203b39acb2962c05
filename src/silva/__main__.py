"""The console command, also `python -m silva`: before anything else it says what ends it."""

import os
import sys

from silva import process, signals


def entry() -> None:
    """`cli.main`, and no waiting for the compute thread once the user wants out."""
    signals.end_at_once()
    process.report_exit()
    if process.tie_to_parent():
        signals.end_as_a_part()
    from silva.cli import main  # after them: these imports take the longest

    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # `main` has said so, or nobody reads on: what is left would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code == 130:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
