"""docs/tools.md: its tables are those of the settings, its configurations and its code work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from silva.config.sections import Section
from silva.tools import mcp, search
from silva.tools.choice import AnyTool
from silva.tools.settings import ToolSettings

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def section(title: str) -> str:
    return re.split(rf"^#+ {title}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]


def table(text: str, header: str) -> dict[str, str]:
    """First column (without backticks) -> second, of the first table with this header."""
    rows = text.split(f"| {header} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    return {row[0].strip().strip("`"): row[1].strip("` ") for row in cells}


TABLES = {
    "search": (table(section("search"), "key | default | meaning"), search.SearchSettings, {"type"}),
    "services": (table(section("Backends"), "key | default | meaning"), search.WebBackend, {"key_variable"}),
    "fetch": (table(section("fetch"), "key | default | meaning"), search.FetchSettings, set()),
    "mcp": (table(section("mcp"), "key | default | meaning"), mcp.McpSettings, {"type"}),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_key_is_listed_with_its_default(name) -> None:
    shown, settings, others = TABLES[name]
    assert set(shown) == set(settings.model_fields) - others
    for key, text in shown.items():
        default = settings.model_fields[key].default
        if isinstance(default, int | float):
            assert float(text.replace(",", "")) == default, key
        elif isinstance(default, str) and text and text != "none":  # an empty cell: said below the table
            assert text.strip('"') == default, key


def test_every_backend_is_listed_with_its_keys() -> None:
    rows = section("Backends").split("own keys |", 1)[1].split("\n\n")[0].splitlines()[2:]
    listed = {re.findall(r"`(\w+)`", row)[0]: row for row in rows}
    variants: list[type[Section]] = [
        search.Bm25Backend, search.SerperBackend, search.BrightDataBackend,
        search.SearxngBackend, search.RetrievalServerBackend,
    ]  # fmt: skip
    assert list(listed) == [variant.model_fields["type"].default for variant in variants]
    for row, variant in zip(listed.values(), variants, strict=True):
        own = set(variant.model_fields) - set(search.WebBackend.model_fields) - {"type"}
        shown = set(re.findall(r"`(\w+)`", row.rpartition(" | ")[2]))
        assert own - shown <= {"url"} and shown <= own
        key = variant.model_fields["key_variable"].default if "key_variable" in variant.model_fields else ""
        assert key in row


def test_the_shown_tables_are_settings() -> None:
    tools = TypeAdapter(AnyTool)
    found = []
    for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        for entry in (
            tomllib.loads(text)["environments"]
            if text.count("[[environments]]")
            else [{"tools": tomllib.loads(text.replace("environments.tools", "tools"))["tools"]}]
        ):
            for values in entry["tools"]:
                if isinstance(values.get("backend"), str):
                    values["backend"] = {"type": values["backend"]}  # as the configuration reads it
                values.get("backend", {}).setdefault("type", "bm25")
                made = tools.validate_python(values, strict=False)
                assert isinstance(made, ToolSettings)
                found.append(made.type)
    assert found == ["search"] * 5 + ["mcp"]


def test_the_shown_code_works() -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'silva[search]'")
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "\nassert " in code, "what it promises, it checks"
    exec(compile(code, "tools.md", "exec"), {})
