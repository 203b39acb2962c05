"""Tools: each is one file with its settings, whose `build()` makes a `silva.protocols.Toolset`."""

TOOLS: dict[str, str] = {
    "calculator": "silva.tools.calculator:CalculatorSettings",
    "function": "silva.tools.fixed:FunctionSettings",
    "mcp": "silva.tools.mcp:McpSettings",
    "python": "silva.tools.python:PythonSettings",
    "search": "silva.tools.search:SearchSettings",
}
"""Value of `type` in the configuration -> module and settings class."""
