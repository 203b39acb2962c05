"""Tools a model may call: `function.tool` makes one from a Python function."""
