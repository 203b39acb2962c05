"""Rows to train on, made from episodes: what is kept of them, and how they are written."""
