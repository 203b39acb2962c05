"""`silva view` over very many rollouts: how long a page takes, and how much memory the server has.

    python benchmarks/viewer.py [--rollouts 1000000] [--per-step 2000] [--folder DIR] [--browser]

writes step files of the run format (rows of 2,000 made-up dialogues in another order each step, rewards of
their own), starts the real command and asks it over HTTP, the first time and again. The first page includes
opening the files. Files that are there already are used. With --browser headless Chromium opens the list of
rollouts and types filters: seconds until the first row, the count or the word that there is none is drawn.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from browser import browser
from common import Row, parser, results
from common import write as write_rows

from silva.storage.layout import Layout
from silva.storage.metrics import append_metrics
from silva.storage.rollouts import ROW_GROUP, RolloutRow, encode_rollouts, rollouts_path
from silva.types import Message, Segment, ToolCall, Trajectory, Turn

SAID = (
    "the tool answers with a number and timeout of search page reads result value error because then find "
    "total sum list row city river bridge train north answer question second first check again"
)
WORDS = SAID.split()
FILTER = 'reward < 0.3 and tool_calls > 2 and "timeout of the search" in text'
RARE = 'reward < 0.3 and tool_calls > 2 and "does not occur anywhere" in text'
MANY = 'reward < 0.3 and "timeout" in text'
TARGETS = {
    "first page": 1.0,
    "a page of the filter": 2.0,
    "count of the filter": 2.0,
    "a filter that finds nothing": 2.0,
}


def template(rows: int, rng: np.random.Generator) -> pa.Table:
    """Rows of made-up dialogues with tool calls, 30 sampled tokens each and about 900 characters."""
    made = []
    for i in range(rows):
        calls = int(rng.integers(0, 6))
        turns = tuple(_turn(f"x{i}/t{k}", k, k < calls, rng) for k in range(calls + 1))
        reward = float(rng.random())
        trajectory = Trajectory(
            f"x{i}", turns, "terminated" if reward > 0.1 else "max_turns", {"success": reward}
        )
        made.append(
            RolloutRow(
                0, f"search/{i // 8}", "search", f"w{i // 8}", trajectory, "trained", advantage=reward - 0.5
            )
        )
    return pq.read_table(pa.BufferReader(encode_rollouts(made)))


def _turn(name: str, at: int, calls: bool, rng: np.random.Generator) -> Turn:
    text = " ".join(rng.choice(WORDS, 28))
    tokens = tuple(int(t) for t in rng.integers(0, 50000, 8))
    numbers = tuple(np.round(-rng.random(8), 2).tolist())
    call = (ToolCall("search", {"query": text[:40]}),) if calls else ()
    said = Message("assistant", text, tool_calls=call)
    shown = Message("tool" if at else "user", " ".join(rng.choice(WORDS, 20)))
    segment = Segment("policy", tokens, numbers, numbers, tuple(-n for n in numbers), (0,) * 8)
    return Turn(name, (Segment("environment", tokens[:4]), segment), (shown, said), fresh=at == 0)


def write(folder: Path, rollouts: int, per_step: int) -> None:
    """The run; steps that are there stay."""
    rng, run = np.random.default_rng(0), Layout(folder)
    run.rollouts.mkdir(parents=True, exist_ok=True)
    base = template(per_step, rng)
    for step in range(1, rollouts // per_step + 1):
        path = rollouts_path(run.rollouts, step)
        if path.exists():
            continue
        table = base.take(rng.permutation(per_step))
        rewards = rng.random(per_step)
        changed = {"step": pa.array([step] * per_step, pa.int64()), "reward_raw": pa.array(rewards),
                   "trajectory": pa.array([f"s{step}r{i}" for i in range(per_step)])}  # fmt: skip
        for name, values in changed.items():
            table = table.set_column(table.schema.get_field_index(name), name, values)
        pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP)
        append_metrics(run.metrics, step, {"reward/raw": float(rewards.mean())})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rollouts", type=int, default=1_000_000)
    options.add_argument("--per-step", type=int, default=2000)
    options.add_argument("--folder", type=Path)
    options.add_argument("--browser", action="store_true", help="in Chromium in place of HTTP")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        write(folder / "many", given.rollouts, given.per_step)
        size = sum(path.stat().st_size for path in (folder / "many" / "rollouts").iterdir()) / 2**20
        rows = [
            Row(f"{given.rollouts:,} rollouts", "on disk", size, "MiB"),
            *(seen if given.browser else measured)(folder, given.rollouts),
        ]
    print(results(rows))
    write_rows(rows, given.json)


@contextmanager
def viewing(folder: Path) -> Iterator[tuple[str, int]]:
    """The real command: its address and its process."""
    command = [sys.executable, "-m", "silva", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        while not (found := re.search(r"listening at (\S+)", server.stderr.readline())):
            if server.poll() is not None:
                raise RuntimeError("the viewer ended")
        yield found[1], server.pid
    finally:
        server.terminate()
        server.wait()


def measured(folder: Path, rollouts: int) -> list[Row]:
    """Seconds of each question, first and again, then the memory of the server."""
    run, case = f"{folder.name}/many", f"{rollouts:,} rollouts"
    asked = {
        "first page": ("rollouts", {}),
        "a page of the filter": ("rollouts", {"filter": FILTER}),
        "count of the filter": ("count", {"filter": FILTER}),
        "a filter that finds nothing": ("rollouts", {"filter": RARE}),
        "the highest rewards": ("rollouts", {"sort": "-reward"}),
        "the groups of a step": ("groups", {"step": "7"}),
        "one rollout": ("rollout", {"step": "7", "at": "1234"}),
    }
    rows = []
    with viewing(folder) as (address, server):
        for again in ("", ", again"):
            for name, (page, parameters) in asked.items():
                url = f"{address}/api/{page}?{urllib.parse.urlencode({'run': run, **parameters})}"
                start, spent = time.perf_counter(), processor(server)
                with urllib.request.urlopen(url) as answer:
                    json.load(answer)
                rows += timed(case, name + again, time.perf_counter() - start, processor(server) - spent)
        return [*rows, memory(case, server)]


def seen(folder: Path, rollouts: int) -> list[Row]:
    """The same in Chromium, from the address or the key Enter to what is drawn."""
    case, rows = f"{rollouts:,} rollouts, in Chromium", list[Row]()
    drawn = "document.querySelector('.list-row, .empty')"
    counted = "/[0-9] rollouts fit/.test(document.querySelector('main').innerText)"
    with (
        tempfile.TemporaryDirectory() as profile,
        viewing(folder) as (address, server),
        browser(Path(profile)) as page,
    ):

        def until(condition: str, before: str = "") -> None:
            look = f"const look = () => ({condition}) ? requestAnimationFrame(done) : setTimeout(look, 5)"
            page.run(f"new Promise(done => {{ {before} {look}; look(); }})")

        def note(name: str) -> None:
            rows.extend(timed(case, name, time.perf_counter() - start, processor(server) - spent))

        page.look(1440, 900)
        for again in ("", ", again"):
            page.open("about:blank")
            start, spent = time.perf_counter(), processor(server)
            page.open(f"{address}/#/rollouts?run={folder.name}/many")
            until(drawn)
            note(f"first page{again}")
            until(counted)
            for name, text in (("a page of the filter", FILTER), ("a filter that finds nothing", RARE),
                               ("a filter that many fit", MANY)):  # fmt: skip
                submit = (
                    f"const box = document.getElementById('filter'), old = {drawn}; box.value = {text!r};"
                    " box.dispatchEvent(new Event('input', {bubbles: true})); box.form.requestSubmit();"
                )
                start, spent = time.perf_counter(), processor(server)
                until(f"!old.isConnected && {drawn}", submit)
                note(name + again)
                until(counted)
                note(f"{name}, counted{again}")
        return [*rows, memory(case, server)]


def timed(case: str, name: str, seconds: float, busy: float) -> list[Row]:
    limit = TARGETS.get(name.removesuffix(", again"))
    return [
        Row(case, name, seconds, "s", target=f"< {limit:g} s" if limit else ""),
        Row(case, f"{name}, time of processors", busy, "s"),
    ]


def memory(case: str, server: int) -> Row:
    status = Path(f"/proc/{server}/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20  # type: ignore[index]
    return Row(case, "peak memory of the server", peak, "GiB", target="< 1 GiB")


def processor(process: int) -> float:
    """Seconds of all cores that a process has had."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
