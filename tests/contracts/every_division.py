"""The tests of test_learners.py in every way to divide a model among 2 and 4 ranks, in models of one type.

    python -m tests.contracts.every_division --dtype float32              half an hour of two cores
    python -m tests.contracts.every_division --only tp pp --tests scores

What goes together is what silva/trainer/sharding/combinations.py lets through. CI runs fewer ways, in float64
and some of the tests in float32.

Exit code 1 if a test fails in any of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.forked_ranks import starting

from silva.errors import CapabilityError
from silva.trainer.settings import Parallel
from silva.trainer.sharding import combinations

TYPES = ("float32", "float64")
TESTS = "an_update or scores or saved or restarts or weights_are_those or skipped"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contracts.every_division", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dtype", choices=TYPES, default=TYPES[0])
    parser.add_argument("--tests", default=TESTS, help="which, as pytest's -k")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="ways with one of these")
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--offload", action="store_true", help="each way with `offload`, not without")
    given = parser.parse_args()
    os.environ["SILVA_TEST_DTYPE"] = given.dtype
    others = " or ".join(["bfloat16", *(each for each in TYPES if each != given.dtype)])
    failed, file = 0, str(Path(__file__).with_name("test_learners.py"))
    with starting() as starter, tempfile.TemporaryDirectory(prefix="silva-ways-") as folder:
        for number, (size, way) in enumerate(ways(given.ranks, given.offload)):
            name = f"{size} ranks: {', '.join(f'{key} {value}' for key, value in way.items()) or 'dp_shard'}"
            if not any(text in name for text in given.only):
                continue
            began, path = time.monotonic(), Path(folder, f"{number}")
            path.mkdir()
            try:
                starter.check(size, way, file, f"({given.tests}) and not ({missing(way)} or {others})", path)
                words = (path / "0.log").read_text().splitlines()[-1].strip("= ")
            except AssertionError as error:
                failed, words = failed + 1, f"FAILED\n{error}"
            print(f"{given.dtype}, {name}: {words} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(failed > 0)


def ways(sizes: Sequence[int], offload: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """All that go together and that the heads of the models allow, without what is as by default."""
    numbers = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4))
    for size, (copies, cp, tp, pp, ep) in itertools.product(sizes, numbers):
        sized = {"dp_replicate": copies, "cp": cp, "tp": tp, "pp": pp, "ep": ep, "offload": offload}
        styles = ("all_gather", "ulysses")[: 1 if cp == 1 or (cp == 4 and ep > 1) else 2]
        for style, schedule in itertools.product(styles, ("1f1b", "interleaved_1f1b")[:pp]):
            parallel = Parallel.model_validate(sized | {"cp_style": style, "pp_schedule": schedule})
            with suppress(CapabilityError):
                parallel.shape(size)
                combinations.refuse(parallel)
                yield size, parallel.model_dump(exclude_defaults=True)


def missing(way: dict[str, Any]) -> str:
    """The tests that a way has not, as pytest's -k: without a critic, walks, replay or copies, or of models
    that it cannot divide."""
    stages = "pp" in way
    found = ["processes", *["15-True or 40"] * stages, *["untied or qwen3"] * ("ep" in way)]
    found += ["leaves_nothing"] * (stages or "dp_replicate" not in way)
    heads = (way.get("cp"), way.get("cp_style")) == (4, "ulysses")  # the model that replays has two
    return " or ".join([*found, *["replayed"] * (stages or "tp" in way or heads)])


if __name__ == "__main__":
    sys.exit(main())
