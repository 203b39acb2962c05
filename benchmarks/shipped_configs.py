"""What `silva import` makes of the configurations that other frameworks ship, read from their git folders.

    python benchmarks/shipped_configs.py GIT_FOLDER PATTERN... [--each]

Prints a row of Markdown for each file whose path fits a pattern (`--each`), and one for all of them: keys of
the file and of those that it names, keys that were carried over, notes for you to decide, keys that were not
carried over, those of them without any equal, and files whose result `silva rl` or `silva sft` would refuse.
A file that is no configuration of a run counts as not recognised.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from silva.commands.import_config import convert, problems
from silva.errors import SilvaError

SUFFIXES = (".toml", ".yaml", ".yml", ".sh")


def git(folder: str, *words: str) -> bytes:
    return subprocess.run(["git", "--git-dir", folder, *words], check=True, capture_output=True).stdout


def shipped(folder: str, patterns: list[str], into: Path) -> list[Path]:
    """The files that fit, and beside them those of their folders, which `defaults` may name."""
    names = [name for name in git(folder, "ls-tree", "-r", "--name-only", "HEAD").decode().splitlines()
             if name.endswith(SUFFIXES)]  # fmt: skip
    found = [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
    for name in names:
        if Path(name).parent in {Path(each).parent for each in found}:
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(git(folder, "show", f"HEAD:{name}"))
    return [into / name for name in found]


def row(path: Path) -> tuple[str, Counter[str]]:
    """Which framework it is of ("": of none), and the counts."""
    try:
        system, draft = convert([path])
    except SilvaError:
        return "", Counter(files=1, unknown=1)
    noted = {note.key for note in draft.notes}
    left = [key for key in draft.given if draft.used(key) and key not in noted]
    counts = Counter(
        files=1, keys=len(draft.given), carried=len(left),
        decide=sum(not note.dropped for note in draft.notes), dropped=sum(n.dropped for n in draft.notes),
        no_equal=sum(note.text == "no equal" for note in draft.notes),
        refused=int(bool(problems(draft.table(), draft.origins))),
    )  # fmt: skip
    return system, counts


def main() -> None:
    each = "--each" in sys.argv
    folder, *patterns = [word for word in sys.argv[1:] if word != "--each"]
    commit = git(folder, "rev-parse", "--short=8", "HEAD").decode().strip()
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for path in shipped(folder, patterns, Path(scratch)):
            system, counts = row(path)
            total += counts
            if each:
                print(f"| `{path.relative_to(scratch)}` | {shown(system or '-', counts)}")
    print(
        f"| {', '.join(f'`{each}`' for each in patterns)} at {commit} | {shown(str(total['files']), total)}"
    )


def shown(first: str, counts: Counter[str]) -> str:
    names = ("keys", "carried", "decide", "dropped", "no_equal", "refused", "unknown")
    return f"{first} | " + " | ".join(str(counts[name]) for name in names) + " |"


if __name__ == "__main__":
    main()
