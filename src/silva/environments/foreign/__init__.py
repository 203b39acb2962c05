"""Environments of other libraries: each module is one library, with its settings.

A library is imported when its environment is first needed; a missing one is an error with the line that
installs it. docs/foreign_environments.md lists what each needs.
"""
