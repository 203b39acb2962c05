"""A saved configuration loads back to the same one, and keeps where values came from."""

import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.config.saved import load_saved, saved_values, to_toml, toml
from silva.errors import ConfigError


def test_values_with_their_origins(write, resolve):
    write(
        "a.toml",
        '[[environments]]\ntype = "toy"\nsize = 3\n[[environments]]\ntype = "grid"\nprices = {"a b" = 1}\n',
    )
    resolved = resolve(
        "@ a.toml --algorithm.kl null --algorithm.label null", SILVA_TRAINER__OPTIMIZER__LR="1e-4"
    )
    lines = to_toml(resolved).splitlines()
    for line in (
        'name = "run"',
        "size = 3  # a.toml:3",
        "shape = [4, 4]",
        "[environments.prices]",
        '"a b" = 1.0  # a.toml:6',
        'kl = "null"  # --algorithm.kl',
        'label = "null"  # --algorithm.label',
        "lr = 0.0001  # SILVA_TRAINER__OPTIMIZER__LR",
        "eps = 1e-8",
    ):
        assert line in lines
    assert not any(line.startswith(("revision", "lora", "[warm_start", "[model.lora")) for line in lines)


def test_the_configuration_of_a_run_serves_to_resume_it(write, resolve, registries, tmp_path):
    """By name alone; what the run got from elsewhere keeps its origin, and the command line lies over it."""
    write("a.toml", '[[environments]]\ntype = "toy"\nsize = 3\n')
    before = resolve("@ a.toml --name mine --seed 4")
    write("runs/mine/config.toml", to_toml(before))

    def saved(line, **env):
        return load_saved(line.split(), registries, env=env, cwd=tmp_path)

    again = saved("--name mine --steps 7")
    assert again.data == before.data | {"steps": 7}
    assert again.provenance == {
        "name": "--name", "seed": "--seed", "steps": "--steps", "environments.0.type": "a.toml:2",
        "environments.0.size": "a.toml:3",
    }  # fmt: skip
    write("elsewhere/run/config.toml", to_toml(before))
    assert saved("--output_dir elsewhere").data["environments"] == before.data["environments"]
    assert saved("", SILVA_NAME="mine").data == before.data
    assert saved("@ a.toml --name mine") is None  # it brings its own
    assert saved("--name other --environments.0.type toy") is None
    with pytest.raises(ConfigError) as caught:
        saved("--name other")
    assert str(caught.value) == (
        "--resume: there is no run in runs/other; name one with --name and --output_dir, or give a "
        "configuration as @ FILE.toml"
    )


def test_round_trip(write, resolve, tmp_path):
    write(
        "maze.py",
        "from silva.environments.settings import EnvironmentSettings\n"
        "class Maze(EnvironmentSettings):\n"
        "    start: tuple[tuple[int, float | None], ...] = ()\n",
    )
    write(
        "a.toml",
        """name = 'a "quoted" name # x'
[rendering]
system = 'back \\ slash'
[model]
type = "tiny"
lora = {rank = 3}
[[environments]]
type = "maze.py:Maze"
start = [[1, 1e300], [2, "null"], [3, 1e-7]]
[[environments]]
type = "grid"
name = "g"
prices = {"a.b" = 1, "" = 2.5}
[rollout.sampling]
stop = ["\\n", "\\u0000\\u007f", "é"]
[algorithm]
label = "null"
[warm_start]
""",
    )
    first = resolve("@ a.toml --algorithm.kl null --trainer.optimizer.max-grad-norm null")
    assert first.config.environments[0].start == ((1, 1e300), (2, None), (3, 1e-7))
    (tmp_path / "saved").mkdir()
    write("saved/config.toml", to_toml(first))
    second = resolve("@ saved/config.toml")
    assert second.data == first.data
    assert second.config == first.config
    write("saved/config.toml", toml(saved_values(first.config), {}))
    assert resolve("@ saved/config.toml").data == first.data


KEYS = st.text("ab.\"' \n", max_size=3)
VALUES = st.recursive(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans(),
              st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_any_value_reads_back(value):
    read = tomllib.loads(toml({"value": value}, {}))["value"]
    assert read == value
    assert type(read) is type(value)
