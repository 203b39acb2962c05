"""Imports go one way, and what help needs stays light. The allowed order is the data on top."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from silva.config import plugins
from silva.config.schema import UNIONS
from silva.registries import REGISTRIES

# Each row may import from the rows above it, never from its own row or below. Reasons for what is finer
# than the sentence in the design: storage writes through ports; tools and rewards run code in the sandbox;
# evaluation plays episodes, so it stands on rollouts; the loop evaluates while it trains, so it stands on
# evaluation; a plan refuses what a launch does.
ROWS = [
    ["errors", "signals", "aio"],
    ["types", "ports", "scratch", "thoughts", "routes"],
    ["compute", "wire"],
    ["protocols", "config"],
    ["storage", "sandbox"],
    ["algorithms", "rendering", "models", "monitoring"],
    ["actors", "data"],
    ["tools"],
    ["rewards"],
    ["environments", "engines", "rollouts", "trainer"],
    ["evaluation", "server", "conversion"],
    ["orchestrator", "placement", "synthesis", "viewer"],
    ["registries", "assembly", "process"],
    ["run", "seeds"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
# Besides the standard library: all that help may load.
LIGHT = {"pydantic", "pydantic_core", "typing_extensions"}
HEAVY = ("torch", "transformers", "gymnasium", "numpy", "pyarrow", "rich", "peft")

SOURCE = Path(__file__).parents[1] / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "silva").rglob("*.py"))
}


@cache
def imports(module: str) -> list[tuple[str, int, bool]]:
    """(what, line, whether it happens as the module loads) of all imports but those for type checkers."""
    found: list[tuple[str, int, bool]] = []
    tree = ast.parse(FILES[module].read_text())
    for node, top in walk(tree, True):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in FILES else node.module, node.lineno, top) for name in names]
    return found


def walk(node: ast.AST, top: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child, top
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(child, top and not inside)


def part(module: str) -> str:
    return module.split(".")[1]


def test_every_part_has_its_place():
    assert {part(module) for module in FILES if module != "silva"} == set(RANK)


def test_imports_go_one_way():
    wrong = [
        f"{module}:{line} imports {what}"
        for module in FILES
        if module != "silva"
        for what, line, _ in imports(module)
        if what.startswith("silva.") and part(what) != part(module) and RANK[part(what)] >= RANK[part(module)]
    ]
    assert wrong == []


def test_the_package_itself_imports_only_a_command_and_only_when_asked():
    assert {(what, top) for what, _, top in imports("silva") if what.startswith("silva")} <= {
        ("silva.commands.train", False)
    }


def targets() -> set[str]:
    """Modules that the registries name: of settings, or of settings and what they build."""
    tables = [getattr(REGISTRIES, table) for table in UNIONS.values()]
    return {target.partition(":")[0] for table in tables for target in table.values()}


@cache
def concrete() -> set[str]:
    """Modules that implement a replaceable part.

    A module counts if a registry names it, unless it holds settings alone. It also counts if the settings of
    a part import a class from it inside a function, or name it as a string."""
    found = {target for target in targets() if not target.endswith("settings")}
    for target in targets():
        for node, top in walk(ast.parse(FILES[target].read_text()), True):
            match node:
                case ast.ImportFrom(module=module, names=names) if not top and module in FILES:
                    built = any(alias.name[0].isupper() and not alias.name.isupper() for alias in names)
                    found |= {module} if built and part(module) == part(target) else set()
                case ast.Constant(value=str(text)) if ":" in text and text.partition(":")[0] in FILES:
                    found.add(text.partition(":")[0])
    return found


@pytest.mark.parametrize("module", sorted(concrete()))
def test_nobody_names_a_part_but_its_settings_and_parts_made_of_it(module):
    """What stands beside a part in a package of its own is as private; `doctor` says what this machine does
    to the local engine's bits."""
    package, parts = module.rpartition(".")[0], concrete()
    inside = f"{package}." if package.count(".") > 1 else module
    alone = sum(other.startswith(inside) for other in parts) == 1
    users = {
        user
        for user in FILES
        if not user.startswith(inside)
        for what, _, _ in imports(user)
        if what == module or (alone and what.startswith(inside))
    }
    assert users - targets() - parts <= {"silva.commands.doctor"}


FOREIGN = {"block.type", "part.type"}
"""Contents of other libraries that are told apart by their `type`; `device.type` is torch's."""


def test_what_a_part_can_do_is_never_read_from_the_name_of_its_type():
    """Settings say it (`EngineSettings`, `PlacementSettings`), and parts have capabilities."""
    wrong = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Compare(left=ast.Attribute(attr="type"), comparators=[found, *_]):
                    text = ast.unparse(node.left)
                    known = isinstance(found, ast.Attribute) and found.attr == "type"  # the same settings
                    if known or text in FOREIGN or text.endswith("device.type"):
                        continue
                case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="config"), *_]):
                    if part(module) in ("models", "conversion"):  # those of transformers
                        continue
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[ast.Attribute(value=ast.Name(id="config")), *_]
                ):
                    pass
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    if part(f"{module}.") == "config" or not re.search(r"\w+Settings\b", ast.unparse(kinds)):
                        continue
                case _:
                    continue
            wrong.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_no_module_imports_itself_in_a_circle():
    graph = {m: {what for what, _, top in imports(m) if top and what in FILES} for m in FILES}
    waiting = defaultdict(set, {m: set(needs) for m, needs in graph.items()})
    while ready := [m for m, needs in waiting.items() if not needs]:
        for module in ready:
            del waiting[module]
        for needs in waiting.values():
            needs.difference_update(ready)
    assert dict(waiting) == {}


def test_settings_and_configuration_load_only_pydantic():
    """Whatever loads as `silva --help` does: the standard library, pydantic, and modules alike."""
    light = {
        "silva.cli",
        "silva.commands.configured",
        "silva.registries",
        *targets(),
        *(m for m in FILES if part(m + ".") == "config"),
    }
    waiting, wrong = sorted(light), []
    while waiting:
        module = waiting.pop()
        for what, line, top in imports(module):
            if not top or what == "silva":
                continue
            if what in FILES:
                waiting += [what] if what not in light else []
                light.add(what)
            elif what.partition(".")[0] not in sys.stdlib_module_names | LIGHT:
                wrong.append(f"{module}:{line} imports {what} at its top")
    assert wrong == []


@pytest.mark.slow
def test_light_commands_and_what_starts_the_parts_of_a_run_load_nothing_heavy(tmp_path):
    code = f"""
import sys, contextlib, io
from silva.cli import main
from silva.placement.supervisor import Supervisor
async def run(self):
    return 0
Supervisor.run = run
services = "rl @{ROOT}/configs/smoke.toml --placement.type services"
for line in ("--help", "rl --help", "eval --help", "envs", "schema", services):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(line.split())
    print(code, line is services or len(out.getvalue()) > 100, [m for m in {HEAVY!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0 True []\n" * 6, "")


ROOT = SOURCE.parent
CODE = sorted(path for folder in ("src", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_from_silva_exists(path):
    """Also where it is imported late, or for type checkers only."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("silva"):
            continue
        known = defined(node.module) if node.module in FILES else None
        missing += [
            f"{node.lineno}: {node.module}.{alias.name}"
            for alias in node.names
            if known is None or (alias.name not in known and f"{node.module}.{alias.name}" not in FILES)
        ]
    assert missing == []


@cache
def defined(module):
    """Names that a module binds at its top level."""
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_installed_environments_are_no_part_of_silva():
    assert not {*plugins.entry_points()} & {*REGISTRIES.environments}
