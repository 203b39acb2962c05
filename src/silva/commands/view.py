"""`silva view`: a local page of runs, live, or as a folder that opens from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from silva import signals
from silva.commands.command import Given
from silva.commands.common import say, served
from silva.errors import CapabilityError, ConfigError, SilvaError
from silva.storage.layout import Layout, steps_in

FOLDERS = ("runs", "evals")  # that are looked at if none is named


def run(given: Given) -> int:
    if any(each.startswith("-") for each in given.rest):
        raise ConfigError(f"silva view: got {' '.join(given.rest)!r}, expected folders of runs")
    folders = [Path(each).expanduser() for each in given.rest] or [
        Path(f) for f in FOLDERS if Path(f).is_dir()
    ]
    if not folders:
        raise ConfigError(
            "silva view: there is no folder runs or evals here; name a run's folder, or one with runs"
        )
    try:
        from silva.registries import REGISTRIES
        from silva.viewer.catalogue import Catalogue
        from silva.viewer.export import export
        from silva.viewer.pages import Pages
        from silva.viewer.routes import app_of
        from silva.wire.guard import Guard
        from silva.wire.listening import Bind, check_bind
    except ModuleNotFoundError as error:
        raise CapabilityError(f'silva view needs {error.name}: pip install "silva[view]"') from error
    catalogue = Catalogue(folders)
    count = len(catalogue.runs())
    found = f"{count} run{'' if count == 1 else 's'}"
    pages = Pages(catalogue, REGISTRIES, decode_of)
    if "--export" in given:
        target = Path(given.options["--export"]).expanduser()
        say(f"view: {export(pages, catalogue, target)} pages of {found}; open {target / 'index.html'}")
        return 0
    if "--port" in given and "--unix" in given:
        raise ConfigError("--port and --unix: got both, expected one")
    port = given.options.get("--port", "0")
    if not port.isdecimal():
        raise ConfigError(f"--port: got {port!r}, expected a number")
    bind = Bind("127.0.0.1", int(port), unix=given.options.get("--unix", ""))
    check_bind(bind, "")
    signals.be_caught()
    return served(Guard(app_of(pages), bind, key="", log=say), bind, f"view: {found}")


def decode_of(layout: Layout) -> Callable[[Sequence[int]], str] | None:
    """What turns tokens of a run into text: the tokenizer beside its weights, or that of its model; None if
    neither is on this machine."""
    exported = [folder / "tokenizer.json" for folder in steps_in(layout.weights).values()]
    for path in [path for path in exported if path.is_file()][-1:]:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            say(f"view: {path}: no tokenizer ({error}); tokens are shown as numbers")
            return None
        return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
    try:
        from silva.config.load import load
        from silva.models.loading import load_tokenizer
        from silva.registries import REGISTRIES

        settings = load([f"@{layout.config_toml}"], REGISTRIES, env={}).config.model
        loaded = load_tokenizer(settings)
    except (SilvaError, OSError) as error:
        say(f"view: {layout.path.name}: {error}; tokens are shown as numbers")
        return None
    return lambda tokens: str(loaded.decode(list(tokens)))
