import json

import pytest

from silva.config.diff import (
    MAY_CHANGE,
    ConfigDifference,
    changed_keys,
    diff,
    forbidden_changes,
    format_diff,
    may_change,
)
from silva.config.load import load
from silva.config.saved import to_toml
from silva.config.schema import import_settings
from silva.errors import ConfigError
from silva.registries import REGISTRIES

TOY = '[[environments]]\ntype = "toy"\n'


@pytest.fixture
def runs(write, resolve, tmp_path):
    write("a.toml", TOY + "[trainer.optimizer]\nlr = 1e-4\n")
    write("b.toml", TOY + "size = 5\n[model]\ntype = 'tiny'\n")
    write("a/config.toml", to_toml(resolve("@ a.toml --name a")))
    write("b/config.toml", to_toml(resolve("@ b.toml --name b --algorithm.kl null")))
    return tmp_path / "a", tmp_path / "b"


def test_differences_with_origins(runs, registries):
    found = {each.path: each for each in diff(*runs, registries)}
    assert found["trainer.optimizer.lr"] == ConfigDifference(
        "trainer.optimizer.lr", 1e-4, "a.toml:4", 1e-5, "default"
    )
    assert found["environments.0.size"] == ConfigDifference(
        "environments.0.size", 4, "default", 5, "b.toml:3"
    )
    assert found["model.name"] == ConfigDifference("model.name", "SmolLM2-135M-Instruct", "default", None, "")
    assert found["algorithm.kl"] == ConfigDifference("algorithm.kl", 0.1, "default", "null", "--algorithm.kl")
    assert sorted(found) == [
        "algorithm.kl", "environments.0.size", "model.context", "model.heads", "model.kv_heads",
        "model.layers", "model.name", "model.type", "model.width", "name", "trainer.optimizer.lr",
    ]  # fmt: skip


def test_a_file_is_resolved_and_names_its_lines(runs, write, registries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SILVA_SEED", "9")  # says nothing about the file
    write("base.toml", "seed = 3\n" + TOY)
    write("c.toml", 'extends = "base.toml"\n[trainer.optimizer]\nlr = 1e-3\n[model]\nlora = {rank = 4}\n')
    found = {each.path: each for each in diff(tmp_path / "c.toml", runs[0], registries)}
    assert found.pop("trainer.optimizer.lr") == ConfigDifference(
        "trainer.optimizer.lr", 1e-3, "c.toml:3", 1e-4, "a.toml:4"
    )
    assert found.pop("seed") == ConfigDifference("seed", 3, "base.toml:1", 0, "default")
    assert found.pop("name") == ConfigDifference("name", "run", "default", "a", "--name")
    assert found.pop("model.lora.rank") == ConfigDifference("model.lora.rank", 4, "c.toml:5", None, "")
    assert sorted(found) == ["model.lora.alpha", "model.lora.dropout", "model.lora.targets"]
    files = diff(tmp_path / "c.toml", tmp_path / "a.toml", registries)
    assert [each.origin_a for each in files if each.path == "seed"] == ["base.toml:1"]
    write("saved/config.toml", (runs[0] / "config.toml").read_text())
    write("saved/config.json", "{}")
    assert diff(runs[0], tmp_path / "saved" / "config.toml", registries) == []  # of a run: as it is


def test_as_text_and_json(runs, registries):
    found = [each for each in diff(*runs, registries) if each.path in ("model.name", "name")]
    assert format_diff(found, "a", "long") == (
        'model.name\n  a     "SmolLM2-135M-Instruct"  (default)\n  long  not set\n'
        'name\n  a     "a"  (--name)\n  long  "b"  (--name)'
    )
    assert json.loads(format_diff(found, "a", "b", as_json=True))[1] == {
        "path": "name", "a": "a", "origin_a": "--name", "b": "b", "origin_b": "--name"
    }  # fmt: skip
    assert format_diff([], "a", "b") == "a and b have the same configuration."


def test_same_and_missing(runs, registries, tmp_path):
    assert diff(runs[0], runs[0] / "config.toml", registries) == []
    with pytest.raises(ConfigError) as caught:
        diff(runs[0], tmp_path / "none", registries)
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


def data(words):
    return load([*words.split(), "--environments.0.type=bandit"], REGISTRIES, env={}).data


HTTP = "--engine.type http --engine.urls "
VLLM = "--placement.type services --engine.type vllm "


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "--placement.type services --placement.servers 2 --placement.patience 9"),
        ("--placement.type services --placement.trainer unix:/a", "--placement.type local"),
        ("", "--placement.type services --trainer.ranks 4 --trainer.parallel.ep 2 --trainer.parallel.cp 2"),
        (
            '--placement.type services --placement.trainer http://a:1 --placement.inference ["http://a:2"]',
            "--placement.type services --placement.trainer http://b:1 --placement.key_variable OTHER "
            '--placement.inference ["unix:/b","unix:/c"]',
        ),
        (f'{HTTP} ["http://a:1"]', f'{HTTP} ["http://b:1","unix:/b"] --engine.timeout 9 --engine.retries 1'),
        (VLLM, f"{VLLM} --engine.python /b/python --engine.tensor_parallel 2 --engine.gpu_memory 0.5"),
    ],
)
def test_a_resumed_run_may_be_elsewhere(old, new):
    before, after = data(old), data(new)
    assert changed_keys(before, after) and forbidden_changes(before, after) == {}


def test_a_resumed_run_keeps_its_model_wherever_it_is():
    before, after = (data(f'{HTTP} ["http://a:1"] --engine.model {model}') for model in "ab")
    assert [*forbidden_changes(before, after)] == ["engine.model"]


def test_a_key_that_is_newer_than_the_run_may_have_its_default():
    """In a list of tables, in a section and as a whole section; but nobody may have set it."""
    old = {"environments": [{"type": "a"}], "engine": {"type": "local"}, "algorithm": {}}
    new = {
        "environments": [{"type": "a", "echo": 0.0}],
        "engine": {"type": "local", "drafts": "off", "more": 1},
        "algorithm": {},
        "data": {"mix": 0.0},
    }
    assert forbidden_changes(old, new) == {}
    given = ("environments.0.echo", "engine.more", "data.mix")
    assert [*forbidden_changes(old, new, given)] == ["data", "engine.more", "environments.0.echo"]
    assert [*forbidden_changes(new, old)] == ["data", "engine.more", "environments.0.echo"]  # it had them


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", None),
        ("--trainer.optimizer.warmup 3 --warm_start.optimizer.schedule cosine", None),
        (
            "--trainer.optimizer.schedule cosine",
            'trainer.optimizer.schedule = "cosine" ends with the last step',
        ),
        ("--trainer.critic.optimizer.schedule linear", None),  # there is no critic
        (
            "--trainer.critic.optimizer.schedule linear --algorithm.type ppo",
            'trainer.critic.optimizer.schedule = "linear" ends with the last step',
        ),
    ],
)
def test_steps_may_change_unless_a_schedule_depends_on_them(given, why):
    begun, more = data(given), data(f"{given} --steps 7")
    found = forbidden_changes(begun, more)
    assert list(found) == (["steps"] if why else [])
    assert why is None or found["steps"].startswith(why)
    assert forbidden_changes(begun, begun) == {}


def test_keys_that_may_change_exist(write, resolve):
    """In the default configuration, or in that of another engine."""
    write("a.toml", TOY)
    data = resolve("@ a.toml").data
    engines = map(import_settings, REGISTRIES.engines.values())
    elsewhere = {f"engine.{key}" for engine in engines for key in engine.model_fields} | {
        "rollout.max_failed"
    }
    for path in MAY_CHANGE - elsewhere:
        value = data
        for part in path.split("."):
            assert part in value, path
            value = value[part]
