"""Configuration: TOML files, command line and variables to one checked `RunConfig`.

load.py is the way in: tree.py merges what sources.py reads. sections.py and schema.py hold the keys,
explain.py words the errors, saved.py and diff.py are about what a run keeps. Nothing here imports torch.
"""
