"""Runs code that nobody trusts."""
