"""Models from one file format into another; what they compute does not change."""
