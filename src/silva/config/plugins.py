"""Parts from outside Silva: in a Python file, in a package, or (environments) behind an entry point.

Loading one runs its code, as importing any module does.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from silva.config.sections import Section
from silva.config.sources import near_file
from silva.errors import ConfigError

ENTRY_POINTS = "silva.environments"


def find_settings(name: str, base: type[Section], *, installed: bool = False) -> type[Section] | None:
    """The settings class that `type = name` means; None where `name` is no part from outside.

    Args:
        name: "/path/to/file.py:Class", "package.module:Class" or, of `installed` ones, an entry point.
        base: what the class must derive from (EnvironmentSettings, say).

    Raises:
        ConfigError: the file, module or class is missing, is of another kind, or raised on import.
    """
    target = name if ":" in name else entry_points().get(name) if installed else None
    if target is None:
        return None

    def fits(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, base) and value is not base

    found: type[Section] = load_object(target, fits, f"subclass of {base.__name__}")
    return found


def is_loaded(target: str) -> bool:
    """Whether the file or module of "file.py:name" or "package.module:name" has been imported as it is."""
    place = target.rpartition(":")[0]
    try:
        return (_module_name(Path(place)) if place.endswith(".py") else place) in sys.modules
    except OSError:
        return False


def load_object(target: str, fits: Callable[[Any], bool], kind: str) -> Any:
    """What "/path/to/file.py:name" or "package.module:name" names.

    Args:
        fits: whether an object will do; `kind` says in words what would.

    Raises:
        ConfigError: the file, module or name is missing, is of another kind, or raised on import.
    """
    place, _, attribute = target.rpartition(":")
    modules = [] if place.endswith(".py") else place.split(".")
    if not all(part.isidentifier() for part in [*modules, attribute]):
        raise ConfigError('expected "file.py:name" or "package.module:name"')
    module = _module(place)
    found = getattr(module, attribute, None)
    if found is None:
        names = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
        there = f"; it defines {', '.join(names)}" if names else ""
        raise ConfigError(f"{place} has no {attribute}{there}")
    if not fits(found):
        raise ConfigError(f"{attribute} in {place} is not a {kind}: it is a {type(found).__name__}")
    return found


def names_in(file: str, fits: Callable[[Any], bool]) -> list[str]:
    """Names of the classes and functions that a Python file defines and that will do, in its order.

    Raises:
        ConfigError: there is no such file, or it raised on import.
    """
    module = _module(file)
    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    return [name for name, value in own.items() if fits(value)]


def entry_points() -> dict[str, str]:
    """Environments that installed packages offer: name -> "module:Class"."""
    from importlib import metadata  # slow to import, and rarely needed

    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}


def _module(place: str) -> ModuleType:
    try:
        return _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not place.endswith(".py") and f"{place}.".startswith(f"{missing}."):
            raise ConfigError(f"there is no module {place} (it must be installed)") from None
        raise ConfigError(_raised(place, error)) from error


def _file(path: Path) -> ModuleType:
    try:
        name = _module_name(path)
    except FileNotFoundError:
        near = near_file(path)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}") from None
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIs(name, str(path.absolute())))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class _AsItIs(SourceFileLoader):
    """Without cached bytecode: Python takes it for that of any file of the same size and second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _module_name(path: Path) -> str:
    """A changed file is a new module; an unchanged one is imported once."""
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    return f"silva_own_{path.stem}_{digest}"


def _raised(place: str, error: BaseException) -> str:
    """What a person needs of the traceback: the last line in their own file, and the error."""
    if isinstance(error, SyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == place]
        line = own[-1] if own else None
    at = f" (line {line})" if line else ""
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{place} could not be imported{at}: {type(error).__name__}: {words}"
