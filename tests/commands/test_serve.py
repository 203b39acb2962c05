"""What `silva inference` serves, and `silva eval` plays, by the command line alone."""

from pathlib import Path

import pytest

from silva.cli import main
from silva.commands import evaluate, serve_tinker
from silva.commands import serve as services

RUN = 'seed = 7\nmodel = {type = "tiny", layers = 1}\nenvironments = [{type = "frozen_lake", size = 3}]\n'


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(configuration, --weights) of each command, which does nothing else."""
    found = []
    monkeypatch.chdir(tmp_path)
    weights = Path("runs/lake/weights/step_5")
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    Path("runs/lake/config.toml").write_text(RUN)

    def serve(resolved, given):
        found.append((resolved.config, given.get("--weights")))
        return 0

    def play(asked):
        found.append((asked.config, str(asked.run)))
        return {}

    monkeypatch.setattr(services, "serve_inference", serve)
    monkeypatch.setattr(evaluate, "evaluate", play)
    return found


def test_a_model_is_served_without_an_environment(served):
    Path("infer.toml").write_text('model = {type = "tiny"}')
    assert main(["inference", "@", "infer.toml", "--seed", "3"]) == 0
    assert main(["inference"]) == 0
    (tiny, _), (packaged, _) = served
    assert (tiny.model.type, tiny.seed, packaged.model.name) == ("tiny", 3, "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("command", ["inference", "eval"])
def test_the_weights_of_a_run_bring_its_configuration(served, command):
    main([command, "--weights", "runs/lake"])
    Path("own.toml").write_text('environments = [{type = "bandit"}]')
    main([command, "@", "own.toml", "--weights", "runs/lake"])
    (of_run, weights), (own, _) = served
    assert (of_run.seed, of_run.environments[0].size, weights) == (7, 3, "runs/lake")
    assert (own.seed, own.environments[0].type) == (0, "bandit")
    assert main([command, "--weights", "runs/none"]) == 2


def test_a_run_is_served_by_its_name(served):
    main(["inference"])
    ((config, _),) = served
    assert services.served_name(config, "runs/lake") == "lake"
    assert services.served_name(config, "runs/lake@step_5") == "lake@step_5"
    assert services.served_name(config, None) == "SmolLM2-135M-Instruct"


def test_a_name_like_the_packaged_model_s_is_answered(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--environments.0.type=bandit", "--model.name", "SmolLM2-135M-instruct"]) != 0
    assert "did you mean SmolLM2-135M-Instruct?" in capsys.readouterr().err


@pytest.fixture
def tinker(tmp_path, monkeypatch):
    """(configuration, options) of each `silva serve tinker`, which does nothing else."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_tinker, "serve_tinker", lambda *given: found.append(given) or 0)
    return found


def test_a_state_that_is_no_folder_is_told(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["serve", "tinker", "--model.type", "tiny", "--state", str(tmp_path / "file")]) == 2
    assert "--state: " in capsys.readouterr().err


def test_a_base_model_is_served_to_tinker_by_its_name_alone(tinker):
    Path("infer.toml").write_text('model = {name = "a", dtype = "bfloat16"}')
    assert main(["serve", "tinker", "--model", "b", "--port", "80", "--state", "here"]) == 0
    assert main(["serve", "tinker", "@", "infer.toml", "--engine.max_concurrent", "3"]) == 0
    assert main(["serve", "tinker"]) == 0
    (named, options), (written, _), (packaged, _) = tinker
    assert (named.model.name, options.options["--port"], options.options["--state"]) == ("b", "80", "here")
    assert (written.model.name, written.model.dtype, written.engine.max_concurrent) == ("a", "bfloat16", 3)
    assert packaged.model.name == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ([], "", "expected tinker"),
        (["openai"], "", "got 'openai', expected tinker"),
        (["tinker", "--host", "0.0.0.0"], "", "without a key"),
        (["tinker", "--host", "0.0.0.0"], "secret", "keys such as tml-"),
        (["tinker", "--model.lora.rank", "4"], "tml-a,tml-b", "gives every run its own adapters"),
        (["tinker", "--trainer.type", "tinker"], "", 'got "tinker", expected "local"'),
        (
            ["tinker", "--trainer.ranks", "2"],
            "",
            "dp_replicate = 2, or engine.type",
        ),
        (
            ["tinker", "--trainer.ranks", "2", "--trainer.parallel.tp", "2"],
            "",
            "parallel.tp: ranks",
        ),
    ],
)
def test_what_is_no_tinker_server_is_refused(arguments, key, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SILVA_API_KEY", key)
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err
