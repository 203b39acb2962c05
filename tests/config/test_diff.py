import json

import pytest

from silva.config.diff import MAY_CHANGE, Difference, changed_keys, diff, format_diff, may_change
from silva.config.saved import to_toml
from silva.errors import ConfigError

TOY = '[[environments]]\ntype = "toy"\n'


@pytest.fixture
def runs(write, resolve, tmp_path):
    write("a.toml", TOY + "[trainer.optimizer]\nlr = 1e-4\n")
    write("b.toml", TOY + "size = 5\n[model]\ntype = 'tiny'\n")
    write("a/config.toml", to_toml(resolve("@ a.toml --name a")))
    write("b/config.toml", to_toml(resolve("@ b.toml --name b --algorithm.kl null")))
    return tmp_path / "a", tmp_path / "b"


def test_differences_with_origins(runs):
    found = {each.path: each for each in diff(*runs)}
    assert found["trainer.optimizer.lr"] == Difference(
        "trainer.optimizer.lr", 1e-4, "a.toml:4", 1e-5, "default"
    )
    assert found["environments.0.size"] == Difference("environments.0.size", 4, "default", 5, "b.toml:3")
    assert found["model.name"] == Difference("model.name", "SmolLM2-135M-Instruct", "default", None, "")
    assert found["algorithm.kl"] == Difference("algorithm.kl", 0.1, "default", "null", "--algorithm.kl")
    assert sorted(found) == [
        "algorithm.kl", "environments.0.size", "model.context", "model.heads", "model.kv_heads",
        "model.layers", "model.name", "model.type", "model.width", "name", "trainer.optimizer.lr",
    ]  # fmt: skip


def test_as_text_and_json(runs):
    found = [each for each in diff(*runs) if each.path in ("model.name", "name")]
    assert format_diff(found, "a", "long") == (
        'model.name\n  a     "SmolLM2-135M-Instruct"  (default)\n  long  not set\n'
        'name\n  a     "a"  (--name)\n  long  "b"  (--name)'
    )
    assert json.loads(format_diff(found, "a", "b", as_json=True))[1] == {
        "path": "name", "a": "a", "origin_a": "--name", "b": "b", "origin_b": "--name"
    }  # fmt: skip
    assert format_diff([], "a", "b") == "a and b have the same configuration."


def test_same_and_missing(runs, tmp_path):
    assert diff(runs[0], runs[0] / "config.toml") == []
    with pytest.raises(ConfigError) as caught:
        diff(runs[0], tmp_path / "none")
    assert (
        str(caught.value)
        == f"{tmp_path / 'none'} cannot be read: No such file or directory; expected a run's folder"
    )


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 2, "d": 2}}, ["a.b", "a.c", "a.d"]),
        ({"a": None}, {"a": {"b": 1}}, ["a"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a.1.b"]),
        ({"a": [{"b": 1}]}, {"a": []}, ["a"]),
    ],
)
def test_changed_keys(old, new, paths):
    assert changed_keys(old, new) == paths


def test_what_may_change_on_resume(write, resolve):
    write("a.toml", TOY)
    changes = (
        "--steps 7 --monitoring.terminal off --eval.every 3 --placement.threads 1 --trainer.optimizer.lr 1"
    )
    changed = changed_keys(
        resolve("@ a.toml").data, resolve(f"@ a.toml {changes} --environments.0.size 2").data
    )
    assert [path for path in changed if not may_change(path)] == [
        "environments.0.size",
        "trainer.optimizer.lr",
    ]
    assert not may_change("steps_more")


def test_keys_that_may_change_exist(write, resolve):
    write("a.toml", TOY)
    data = resolve("@ a.toml").data
    for path in MAY_CHANGE - {"engine.cached_sequences", "engine.prefill_tokens"}:  # of the real engine
        value = data
        for part in path.split("."):
            assert part in value, path
            value = value[part]
