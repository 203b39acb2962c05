"""Kill `silva synth` at random times, give the same command again, and compare with one that was left alone.

    python benchmarks/syntheses.py --kills 20 --seed 0

It does what evaluations.py does, to the same worlds; the rows must not differ either.
"""

from __future__ import annotations

import sys

import evaluations

if __name__ == "__main__":
    sys.exit(evaluations.main(__doc__, "synth"))
