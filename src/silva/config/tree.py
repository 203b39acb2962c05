"""All layers of a configuration as one tree whose values know where they come from.

A layer is a list of settings, (path, node). Laid over the tree, tables merge key by key, and lists and
values replace what was there; a path like environments.0.size changes one element. A layer that changes
a section's `type` restarts that section: what lower layers said about it belongs to another variant and
is left behind, with a note. In place of a section that has types, a name is short for a table with only its
`type`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from silva.config import field_types
from silva.config.field_types import Key, dotted


@dataclass
class Node:
    """A value and its origin ("b.toml:12", "--seed", "SILVA_SEED"). Tables and lists hold nodes."""

    value: Any
    origin: str = ""


class Items(dict[int, Node]):
    """The elements of a list by number: a command line may give them in any order."""


@dataclass(frozen=True)
class Text:
    """A scalar from a command line or variable: `value` as JSON or TOML reads it, `text` as typed.
    A string field takes the text ("8"), any other the value (8). `bare`: a flag without a value."""

    text: str
    value: Any
    bare: bool = False


Layer = list[tuple[Key, Node]]


def nodes(value: Any, origin: Callable[[Key], str], path: Key = ()) -> Node:
    """Plain data as a tree of nodes."""
    if isinstance(value, dict):
        value = {key: nodes(item, origin, (*path, key)) for key, item in value.items()}
    elif isinstance(value, list):
        value = Items({i: nodes(item, origin, (*path, i)) for i, item in enumerate(value)})
    return Node(value, origin(path))


def walk(node: Node, path: Key = ()) -> Iterator[tuple[Key, Node]]:
    """Every node with its path."""
    yield path, node
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from walk(child, (*path, key))


def typed(value: Any) -> Any:
    """A scalar as it was written: the text of a command line, any other value as it is."""
    return value.text if isinstance(value, Text) else value


@dataclass
class Tree:
    """The layers laid over each other so far.

    `implied`: for each section that is a union, its default `type` and the keys of that variant.
    """

    implied: Mapping[Key, tuple[str | None, frozenset[str]]]
    root: Node = field(default_factory=lambda: Node({}))
    notes: list[str] = field(default_factory=list)

    def lay(self, layer: Layer) -> None:
        layer = [
            ((*path, "type"), node) if self._is_name(path, node) else (path, self._spelt_out(path, node))
            for path, node in layer
        ]
        for path, given in layer:  # first of all, as it must drop only what lower layers said
            if path[-1:] == ("type",):
                self._put(self.root, path[:-1], Node({"type": given}, given.origin), ())
        for path, given in layer:
            self._put(self.root, path, given, ())

    def _put(self, node: Node, path: Key, given: Node, here: Key) -> None:
        """Set what is at `path` below `node`, which is at `here`; make the tables and lists on the way."""
        if path:
            part, *rest = path
            table = type(node.value) is dict  # numbers fit lists and, as text, tables; names fit tables
            if not table and not (isinstance(part, int) and isinstance(node.value, Items)):
                node.value, node.origin = Items() if isinstance(part, int) else {}, given.origin
            elif table:
                part = str(part)
            child = node.value.setdefault(part, Node(None, given.origin))
            self._put(child, tuple(rest), given, (*here, part))
        elif type(node.value) is dict and type(given.value) is dict:
            self._restart(node, given, here)
            for key, child in given.value.items():
                self._put(node, (key,), child, here)
        else:
            node.value, node.origin = given.value, given.origin

    def _spelt_out(self, path: Key, node: Node) -> Node:
        """With tables in place of names."""
        if self._is_name(path, node):
            return Node({"type": node}, node.origin)
        if type(node.value) is not dict:
            return node
        return Node({k: self._spelt_out((*path, k), child) for k, child in node.value.items()}, node.origin)

    def _is_name(self, path: Key, node: Node) -> bool:
        """Whether it stands for a table with this `type`. "file.py:function" stands for one with more."""
        value = node.value.value if isinstance(node.value, Text) else node.value
        return path in self.implied and isinstance(value, str) and value != "null" and ":" not in value

    def _restart(self, node: Node, given: Node, here: Key) -> None:
        """Empty a section that becomes another variant. One without `type` counts as its default only if
        its keys fit that variant: otherwise it was written for the type yet to come."""
        if "type" not in given.value:
            return
        usual, keys = self.implied.get(here, (None, frozenset()))
        old = node.value.get("type", Node(usual if keys.issuperset(node.value) else None)).value
        new = given.value["type"]
        if old is None or typed(old) == typed(new.value):
            return
        dropped = [f"{key} ({child.origin})" for key, child in node.value.items() if key != "type"]
        if dropped:
            self.notes.append(
                f"{new.origin} changes {dotted(here)}.type, so the section restarts without "
                + ", ".join(dropped)
            )
        node.value, node.origin = {}, given.origin

    def _trail(self, path: Key) -> list[Node]:
        """The nodes on the way to `path`, from the root, as far as there are any."""
        found = [self.root]
        for part in path:
            inside = found[-1].value
            if not isinstance(inside, dict) or part not in inside:
                break
            found.append(inside[part])
        return found

    def at(self, path: Key) -> Node | None:
        trail = self._trail(path)
        return trail[-1] if len(trail) > len(path) else None

    def origin(self, path: Key) -> str:
        """Where the value at `path` comes from, or the nearest table around it; "" where nobody gave one."""
        return self._trail(path)[-1].origin


def implied_types(model: type[BaseModel]) -> dict[Key, tuple[str | None, frozenset[str]]]:
    """What `Tree.implied` says for this model; the type is None if it depends on the section around."""
    found: dict[Key, tuple[str | None, frozenset[str]]] = {}
    for path, item, _ in field_types.fields(model):
        usual = field_types.default_tag(item)
        for variant in field_types.sections(item):
            if usual is not None and field_types.tag(variant) == usual:
                known, _ = found.setdefault(path, (usual, frozenset(variant.model_fields)))
                if known != usual:
                    found[path] = (None, frozenset())
    return found
