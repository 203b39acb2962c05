"""Models and samples of the trainers' tests, learners and ranks."""

from tests.contracts.learners import make, ranks, rows
from tests.contracts.rank import folder, group, starter
from tests.trainer.conftest import make_samples, tiny

__all__ = ["folder", "group", "make", "make_samples", "ranks", "rows", "starter", "tiny"]
