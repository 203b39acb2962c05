"""Every TOML that is shipped loads, and says on top what it shows, costs and should come to."""

import re
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest

from silva.commands.checks import check
from silva.config.load import load
from silva.registries import REGISTRIES

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(
    path
    for path in [*ROOT.glob("configs/**/*.toml"), *ROOT.glob("examples/**/*.toml")]
    if path.name != "pyproject.toml"
)
BELOW = {"tinker.toml": "thoughts.toml", "aepo.toml": "maths.toml"}
"""Files that are laid over another one, and such a one."""
OF_THE_HUB = ("hotpotqa/hotpot_qa", "zai-org/LongBench-v2")


def test_there_are_some():
    names = {path.name for path in SHIPPED}
    assert {"quickstart.toml", "frozen_lake_tiny.toml", "smoke.toml", "rivers.toml"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_loads(path, tmp_path):
    under = BELOW.get(path.name)
    files = [f"@{path.with_name(under)}"] if under else []
    config = load([*files, f"@{path}"], REGISTRIES, env={}, cwd=tmp_path).config
    # The runs of two examples do not get into each other's way.
    assert under or config.name == path.stem
    # What the file asks for can be had: the world has that many held-out tasks, and some to train on.
    for world in config.environments:
        if getattr(world, "hub", "") or getattr(world, "path", "") in OF_THE_HUB:
            pytest.skip("its rows are on the hub")
        for package in world.packages:
            pytest.importorskip(package, reason=world.needs)
        tasks = world.taskset()
        assert len(tasks.tasks("eval")) >= min(config.eval.tasks, world.eval_size or 100)
        assert tasks.tasks("train")[0].split == "train"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_says_what_it_is(path):
    comment = "".join(takewhile(lambda line: line.startswith("#"), path.open()))
    told = [word for word in ("Shows:", "Costs:", "Expect:") if word in comment]
    assert told == ["Shows:", "Costs:", "Expect:"]


SNIPPETS = [
    text
    for page in (ROOT / "README.md", ROOT / "docs" / "algorithms.md")
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize("text", SNIPPETS, ids=lambda text: "-".join(re.findall("[a-z_]+", text)[:4]))
def test_what_the_pages_show_can_be_run(text, tmp_path):
    assert len(SNIPPETS) >= 5
    world = "" if "environments" in text else '\n[[environments]]\ntype = "bandit"\n'
    (tmp_path / "shown.toml").write_text(text + world)
    config = load([f"@{tmp_path / 'shown.toml'}"], REGISTRIES, env={}, cwd=tmp_path).config
    check(config)
    for key in ("clip_low", "kl_tau", "credit", "advantage"):
        if shown := re.findall(rf"\b{key} = ([^\s}}]+)", text):
            section = config.algorithm.loss if key in ("clip_low", "kl_tau") else config.algorithm
            assert getattr(section, key) == tomllib.loads(f"x = {shown[0]}")["x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("benchmarks/environments/**/*.toml")), ids=lambda path: path.stem
)
def test_the_environments_of_the_benchmarks_load(path, tmp_path):
    bare = path.stem in ("settings", "base")
    argv = [f"@{path}", "--environments.0.type=bandit"] if bare else [f"@{path}"]
    assert load(argv, REGISTRIES, env={}, cwd=tmp_path).config.placement.threads == 1
