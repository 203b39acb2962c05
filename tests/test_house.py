"""How large Silva is: numbers that may only fall, so that what is added replaces something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from silva.config.schema_json import json_schema
from silva.registries import REGISTRIES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "silva"


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def longest() -> int:
    return max(len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py"))


def most_files() -> int:
    """Python files of the largest room, a part or a package of a part, worlds and adapters apart."""
    rooms = [folder for folder in (SOURCE, *SOURCE.rglob("*/")) if folder.name not in ("worlds", "foreign")]
    return max(len(list(folder.glob("*.py"))) for folder in rooms if folder != SOURCE)


def keys() -> int:
    """Keys of a run's file outside `environments`, of all variants."""
    schema = json_schema(REGISTRIES)
    waiting = [value for name, value in schema["properties"].items() if name != "environments"]
    count, seen = len(schema["properties"]), set[str]()
    while waiting:
        for name in set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(waiting.pop()))) - seen:
            seen.add(name)
            count += len(schema["$defs"][name].get("properties", {}))
            waiting.append(schema["$defs"][name])
    return count


SIZES = {
    "lines of src/silva": (lambda: lines(SOURCE), 86_872),
    "lines of tests": (lambda: lines(ROOT / "tests"), 85_723),
    "lines of the longest file of src/silva": (longest, 404),
    "files of the largest room of src/silva": (most_files, 34),
    "files of src/silva/orchestrator": (lambda: len(list((SOURCE / "orchestrator").glob("*.py"))), 20),
    "keys of the configuration outside environments": (keys, 1333),
}


@pytest.mark.parametrize("name", SIZES)
def test_nothing_grows(name: str) -> None:
    measure, most = SIZES[name]
    found = measure()
    assert found <= most, (
        f"{name}: got {found}, expected at most {most}. What people read stays small: remove as much as is "
        "added. If it is worth its size, raise the number in SIZES in tests/test_house.py and say why in the "
        "commit; if it has become smaller, lower it."
    )


def test_modules_are_named_after_what_they_do() -> None:
    """`service` says that something is served, not what."""
    assert [str(path) for path in SOURCE.rglob("service*.py")] == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    """So that a name in a message, a page or a search leads to one place."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
