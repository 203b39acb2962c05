"""Real rows beside the project, where there are any."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
