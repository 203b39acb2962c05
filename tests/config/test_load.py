"""Files, command line and variables to one configuration: syntax, precedence, provenance."""

from pathlib import Path

import numpy as np
import pytest
from config_test_worlds import Grpo, Linear

from silva.config.load import load
from silva.config.sections import Lora, TinyModel
from silva.errors import ConfigError

TOY = '[[environments]]\ntype = "toy"\n'


def test_defaults(write, resolve):
    write("a.toml", TOY)
    resolved = resolve("@ a.toml")
    config = resolved.config
    assert (config.name, config.seed, config.output_dir, config.steps) == ("run", 0, "runs", 100)
    assert config.environments[0].label == "toy"
    # The usual entry of a registry, though it is not the first.
    assert config.rollout == Linear()
    assert config.algorithm == Grpo()
    assert config.engine.type == "local"
    assert config.warm_start is None
    assert resolved.provenance == {"environments.0.type": "a.toml:2"}


def test_precedence_and_provenance(write, resolve):
    write("base.toml", "seed = 1\nsteps = 1\n[trainer.optimizer]\nlr = 1\nbetas = [0.5, 0.6]\n" + TOY)
    write("a.toml", 'extends = "base.toml"\nseed = 2\n')
    write("b.toml", "[trainer]\noptimizer.lr = 3\n[eval]\nevery = 4\n")
    resolved = resolve(
        ["@", "a.toml", "@b.toml", "--eval.every=5"],
        SILVA_SEED="9",
        SILVA_EVAL__TASKS="7",
        SILVA_TRAINER__OPTIMIZER__WARMUP="6",
    )
    config = resolved.config
    assert (config.seed, config.steps, config.eval.every, config.eval.tasks) == (2, 1, 5, 7)
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup) == (3.0, 6)
    assert config.trainer.optimizer.betas == (0.5, 0.6)
    assert resolved.provenance == {
        "seed": "a.toml:2",
        "steps": "base.toml:2",
        "environments.0.type": "base.toml:7",
        "trainer.optimizer.lr": "b.toml:2",
        "trainer.optimizer.betas": "base.toml:5",
        "trainer.optimizer.warmup": "SILVA_TRAINER__OPTIMIZER__WARMUP",
        "eval.every": "--eval.every",
        "eval.tasks": "SILVA_EVAL__TASKS",
    }
    assert [path.name for path in resolved.files] == ["base.toml", "a.toml", "b.toml"]


def test_extends_is_relative_to_its_file_and_may_be_a_list(write, resolve):
    write("shared/x.toml", "seed = 1\nsteps = 1\n")
    write("shared/y.toml", 'extends = "x.toml"\nsteps = 2\n')
    write("runs/a.toml", 'extends = ["../shared/y.toml", "../shared/x.toml"]\n' + TOY)
    resolved = resolve("@ runs/a.toml")
    assert (resolved.config.seed, resolved.config.steps) == (1, 1)  # x comes last, over y
    assert resolved.provenance["steps"] == "shared/x.toml:2"


def test_lists_are_replaced_whole(write, resolve):
    write("a.toml", '[[environments]]\ntype = "toy"\nsize = 2\n[[environments]]\ntype = "grid"\n')
    write("b.toml", '[[environments]]\ntype = "toy"\n')
    resolved = resolve("@ a.toml @ b.toml")
    assert [world.size for world in resolved.config.environments] == [4]
    assert resolved.provenance == {"environments.0.type": "b.toml:2"}


def test_one_element_of_a_list(write, resolve):
    write(
        "a.toml",
        '[[environments]]\ntype = "toy"\nsize = 2\n[[environments]]\ntype = "grid"\nshape = [1, 2]\n',
    )
    line = "@ a.toml --environments.0.size 6 --environments.1.shape.1 9 --environments.2.type toy"
    resolved = resolve(f"{line} --environments.2.name third")
    worlds = resolved.config.environments
    assert (worlds[0].size, worlds[1].shape, worlds[2].label) == (6, (1, 9), "third")
    assert resolved.provenance["environments.0.size"] == "--environments.0.size"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--steps", "8"], "steps", 8),
        (["--steps=1_000"], "steps", 1000),
        (["--name", "8"], "name", "8"),
        (["--name", "true"], "name", "true"),
        (["--name", '"8"'], "name", "8"),
        (["--name", "null"], "name", "null"),
        (["--name", "1999-01-01"], "name", "1999-01-01"),
        (["--name=a=b --c"], "name", "a=b --c"),
        (["--rendering.system="], "rendering.system", ""),
        (["--rendering.system", "null"], "rendering.system", None),
        (["--rendering.system", "12"], "rendering.system", "12"),
        (["--trainer.optimizer.lr", "1e-5"], "trainer.optimizer.lr", 1e-5),
        (["--trainer.optimizer.lr", "2"], "trainer.optimizer.lr", 2.0),
        (["--trainer.optimizer.max-grad-norm", "null"], "trainer.optimizer.max_grad_norm", None),
        (["--trainer.optimizer.betas", "[0.1, 0.2]"], "trainer.optimizer.betas", [0.1, 0.2]),
        (["--rollout.sampling.stop", "['a', \"b\",]"], "rollout.sampling.stop", ["a", "b"]),
        (["--trainer.gradient-checkpointing"], "trainer.gradient_checkpointing", True),
        (["--no-monitoring.report"], "monitoring.report", False),
        (["--no-monitoring.report", "--monitoring.report"], "monitoring.report", True),
        (["--monitoring.report", "false"], "monitoring.report", False),
        (["--monitoring.report", "@b.toml"], "monitoring.report", True),
        (["--warm-start"], "warm_start.steps", 50),
        (["--warm_start.steps", "3"], "warm_start.steps", 3),
        (["--warm_start.steps", "3", "--no-warm-start"], "warm_start", None),
        (["--model.lora", '{"rank": 4}'], "model.lora.rank", 4),
        (["--algorithm.type=reinforce", "--algorithm.entropy=auto"], "algorithm.entropy", "auto"),
        (["--algorithm.type=reinforce", "--algorithm.entropy=1"], "algorithm.entropy", 1.0),
    ],
)
def test_values_on_the_command_line(write, resolve, arguments, key, value):
    write("a.toml", TOY)
    write("b.toml", "seed = 3\n")
    found = resolve(["@", "a.toml", *arguments]).data
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_home_is_written_out(write, resolve, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    write("a.toml", 'output_dir = "~/x"\n' + TOY)
    assert resolve("@ a.toml").data["output_dir"] == "/home/ada/x"
    assert resolve("@ a.toml --output_dir=./~x/").data["output_dir"] == "./~x/"


@pytest.fixture
def python(registries, tmp_path):
    return lambda values: load([], registries, values=values, env={}, cwd=tmp_path)


def test_keys_from_python_nested_and_dotted(python):
    given = {
        "name": "8", "output_dir": Path("/x"), "warm_start": None, "environments": ({"type": "toy"},),
        "trainer": {"optimizer": {"betas": (0.5, 0.6)}}, "trainer.optimizer.lr": np.float32(0.5),
        "steps": np.int64(7), "environments.0.size": 5,
    }  # fmt: skip
    resolved = python(given)
    assert (resolved.data["name"], resolved.data["output_dir"], resolved.data["steps"]) == ("8", "/x", 7)
    assert resolved.data["environments"][0]["size"] == 5
    optimizer = resolved.config.trainer.optimizer
    assert (optimizer.lr, optimizer.betas, resolved.config.warm_start) == (0.5, (0.5, 0.6), None)
    assert resolved.provenance["steps"] == resolved.provenance["trainer.optimizer.lr"] == "Python"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "many"}, 'Python: steps = "many"\n    got text, expected an integer > 0'),
        ({"steps": "8"}, 'Python: steps = "8"\n    got text, expected an integer > 0'),
        ({"stesp": 8}, "Python: stesp = 8\n    unknown key; did you mean steps?"),
        ({"trainer": {"optimiser.lr": 1}}, "Python: trainer.optimiser.lr = 1\n"
         "    unknown key; did you mean trainer.optimizer?"),
        ({"model": {"lora": {1, 2}}}, "Python: model.lora: got set, expected a number, text, "
         "true or false, None, a list or a mapping"),
        ({3: 4}, "Python: got the key 3, expected text such as 'trainer.optimizer.lr'"),
    ],
)  # fmt: skip
def test_mistakes_in_python_name_the_key_and_no_flag(python, values, message):
    with pytest.raises(ConfigError) as caught:
        python({"environments": [{"type": "toy"}]} | values)
    assert str(caught.value) == message


def test_environments_from_the_command_line_alone(resolve):
    config = resolve("--environments.0.type toy --environments.0.size 5 --environments.1.type grid").config
    assert [world.type for world in config.environments] == ["toy", "grid"]
    assert config.environments[0].size == 5
    argument = '[{"type": "toy"}, {"type": "grid", "shape": [1, 2]}]'
    resolved = resolve(["--environments", argument, "--environments.0.size", "7"])
    assert resolved.config.environments[1].shape == (1, 2)
    assert resolved.config.environments[0].size == 7
    assert resolved.provenance["environments.1.shape"] == "--environments"


def test_null_in_toml(write, resolve):
    write(
        "a.toml",
        TOY + '[trainer.optimizer]\nmax_grad_norm = "null"\n[model]\nrevision = "null"\nlora = "null"',
    )
    config = resolve("@ a.toml").config
    assert config.trainer.optimizer.max_grad_norm is None
    assert config.model.lora is None
    assert config.model.revision == "null"  # a text field whose default is null anyway


def test_integers_do_for_floats_and_lists_for_tuples(write, resolve):
    write("a.toml", TOY + "[trainer.optimizer]\nlr = 1\nbetas = [0, 0.5]\n")
    optimizer = resolve("@ a.toml").config.trainer.optimizer
    assert (optimizer.lr, optimizer.betas) == (1.0, (0.0, 0.5))
    assert isinstance(optimizer.lr, float)


def test_table_without_type_has_the_default_type(write, resolve):
    write("a.toml", TOY + "[model.lora]\nrank = 4\n[rollout]\ngroup_size = 2\n[algorithm]\nclip = 0.3\n")
    config = resolve("@ a.toml").config
    assert config.model.lora == Lora(rank=4)
    assert config.rollout == Linear(group_size=2)
    assert config.algorithm == Grpo(clip=0.3)


def test_changing_the_type_restarts_the_section(write, resolve):
    write(
        "a.toml",
        TOY + '[model]\nname = "x"\n[model.lora]\nrank = 4\n[rollout]\ntype = "branching"\nwidth = 3\n',
    )
    resolved = resolve("@ a.toml --model.width 32 --model.type tiny --rollout.type branching")
    assert resolved.config.model == TinyModel(width=32)
    assert resolved.config.rollout.width == 3  # the same type: nothing restarts
    dropped = "name (a.toml:4), lora (a.toml:5)"
    assert resolved.notes == (f"--model.type changes model.type, so the section restarts without {dropped}",)
    assert "model.lora" not in resolved.provenance


def test_keys_written_for_the_type_to_come_are_kept(write, resolve):
    write("a.toml", TOY + "[model]\nwidth = 32\n")
    resolved = resolve("@ a.toml --model.type tiny")
    assert resolved.config.model == TinyModel(width=32)
    assert resolved.notes == ()


def test_a_name_is_short_for_a_table_with_this_type(write, resolve):
    write("a.toml", 'model = "tiny"\nrollout = "branching"\n' + TOY)
    resolved = resolve("@ a.toml --model.width 32 --algorithm reinforce --algorithm.baseline none")
    assert resolved.config.model == TinyModel(width=32)
    assert resolved.config.rollout.type == "branching"
    assert (resolved.config.algorithm.type, resolved.config.algorithm.baseline) == ("reinforce", "none")
    assert resolved.provenance["model.type"] == "a.toml:1"
    assert resolved.provenance["algorithm.type"] == "--algorithm"


def test_a_table_changes_only_the_keys_it_names(write, resolve):
    write("a.toml", TOY + "[warm_start.optimizer]\nweight_decay = 0.1\n")
    optimizer = resolve("@ a.toml").config.warm_start.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-3, 0.1)  # lr as elsewhere is 1e-5


def test_variables_of_other_parts_are_left_alone(write, resolve):
    write("a.toml", TOY)
    assert resolve("@ a.toml", SILVA_CACHE="/tmp/x", SILVA_API_KEY="s", OTHER__A="1").provenance == {
        "environments.0.type": "a.toml:2"
    }


def test_evaluation_sets_are_found_beside_the_file_that_names_them(write, resolve, tmp_path):
    sets = ["rows.jsonl", "held/rows", "gsm8k", "owner/name", "no/such.jsonl"]
    write("there/c.toml", f"{TOY}[synth]\ndecontaminate = {sets}\n")
    for rows in ("rows.jsonl", "held/rows/a.jsonl", "gsm8k/a.jsonl"):  # a name alone is that of a suite
        write(f"there/{rows}", "")
    there = (tmp_path / "there").resolve()
    expected = (f"{there}/rows.jsonl", f"{there}/held/rows", *sets[2:])
    assert resolve("@ there/c.toml").config.synth.decontaminate == expected
