"""Models and samples of the trainers' tests."""

from tests.trainer.conftest import make_samples, tiny

__all__ = ["make_samples", "tiny"]
