"""Tools: each is one file with its settings, whose `build()` makes a `silva.protocols.Toolset`."""

TOOLS: dict[str, str] = {
    "search": "silva.tools.search:SearchSettings",
}
"""Value of `type` in the configuration -> module and settings class."""
