"""Configuration: TOML files, command line and variables to one checked `RunConfig`.

load.py is the way in; sections.py and schema.py hold the keys; explain.py the errors; saved.py and
diff.py what a run keeps. Nothing here imports torch.
"""
