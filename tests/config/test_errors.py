"""What a new user gets to read for each way to be wrong. Messages are compared whole."""

# ruff: noqa: E501
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.config.saved import to_toml
from silva.errors import ConfigError

TOY = '[[environments]]\ntype = "toy"\n'


def test_everything_wrong_at_once(write, refuse):
    write(
        "bad.toml",
        """name = 3
stepz = 20
when = 1999-01-01
[model]
width = 3
[trainer]
lr = 1e-3
optim = {lr = 1}
[algorithm]
type = "grpoo"
[[environments]]
type = "toi"
[[environments]]
type = "grid"
size = 3
shape = [1, "a"]
[[environments]]
size = 3
[engine]
api_key = "sk-1"
[rollout.sampling]
temperature = -1
""",
    )
    line = "@ bad.toml --steps eight --trainer.optimizer.lr --model.dtype float33 --environments.9.size 3"
    message = refuse(line, SILVA_EVAL__EVERY="-1", SILVA_STEP="3")
    assert "sk-1" not in message
    assert message == (
        """19 problems in the configuration:
--environments.9.size: environments.9
    no element 9: the list has 3 elements
bad.toml:20: engine.api_key
    looks like a secret, and a configuration is saved with the run; set it in the environment or in .env (API_KEY=...)
bad.toml:3: when = 1999-01-01
    a date; text needs quotes
bad.toml:1: name = 3
    expected a string
--steps: steps = "eight"
    got text, expected an integer > 0
--model.dtype: model.dtype = "float33"
    expected one of "float32", "bfloat16"; did you mean "float32"?
bad.toml:5: model.width = 3
    unknown key: it belongs to model.type = "tiny", and this is "pretrained"
bad.toml:12: environments.0.type = "toi"
    unknown type; did you mean "toy"? known: "toy", "grid", or your own as "file.py:Class" or "package.module:Class"
bad.toml:16: environments.1.shape.1 = "a"
    got text, expected an integer
bad.toml:15: environments.1.size = 3
    unknown key: it belongs to environments.1.type = "toy", and this is "grid"
bad.toml:17: environments.2.type
    missing; expected one of "toy", "grid", or your own as "file.py:Class" or "package.module:Class"
bad.toml:22: rollout.sampling.temperature = -1
    expected a number >= 0
bad.toml:10: algorithm.type = "grpoo"
    unknown type; did you mean "grpo"? known: "reinforce", "grpo", or your own as "file.py:Class" or "package.module:Class"
--trainer.optimizer.lr: trainer.optimizer.lr
    got no value, expected a number > 0
bad.toml:7: trainer.lr = 0.001
    unknown key; did you mean trainer.optimizer.lr or trainer.critic.optimizer.lr or warm_start.optimizer.lr?
bad.toml:8: trainer.optim = a table
    unknown key; did you mean trainer.optimizer?
SILVA_EVAL__EVERY: eval.every = -1
    expected an integer >= 0
SILVA_STEP: step = 3
    unknown key; did you mean steps?
bad.toml:2: stepz = 20
    unknown key; did you mean steps?"""
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "",
            "environments\n"
            "    expected at least one [[environments]] table with a type (or [data], for `silva sft`)",
        ),
        (
            "--environments []",
            "--environments: environments\n"
            "    expected at least one [[environments]] table with a type (or [data], for `silva sft`)",
        ),
        (
            "@ a.toml --seed=18446744073709551616",
            "--seed: seed = 18446744073709551616\n    expected an integer of at most 64 bits, as TOML has them",
        ),
        ("@ a.toml --trainer.optimizer.lr inf", "--trainer.optimizer.lr: trainer.optimizer.lr = inf\n    expected a number > 0"),
        ("@", "@ needs a file name, as in @ run.toml"),
        ("@ --steps 3", "@ needs a file name, as in @ run.toml"),
        ("a.toml", "unexpected argument 'a.toml': expected @ file.toml or --key value; a file is given as @ a.toml"),
        ("@ a.toml b", "unexpected argument 'b': expected @ file.toml or --key value"),
        ("@ a.toml -x", "unexpected argument '-x': expected @ file.toml or --key value"),
        ("@ a.toml --trainer. 3", "--trainer.: not a key; expected a form like --trainer.optimizer.lr"),
        ("--config a.toml", "--config a.toml: unknown key; give the file as @ a.toml"),
        ("@ aa.toml", "aa.toml: no such file; did you mean a.toml?"),
        ("@ quickstart.toml", "quickstart.toml: no such file; TOML files there: a.toml"),
        ("@ nowhere/a.toml", "nowhere/a.toml: no such file; there is no folder DIR/nowhere"),
        ("@ .", ".: cannot be read: Is a directory"),
        ("@ a.toml --lr 1", "--lr: lr = 1\n    unknown key; did you mean trainer.optimizer.lr or "
         "warm_start.optimizer.lr or trainer.critic.optimizer.lr?"),
        ("@ a.toml --trainer.optimizer.beta 1", "--trainer.optimizer.beta: trainer.optimizer.beta = 1\n"
         "    unknown key; did you mean trainer.optimizer.betas?"),
        ("@ a.toml --eval.zzz 1", "--eval.zzz: eval.zzz = 1\n"
         "    unknown key; valid here: every, tasks, samples_per_task, pass_at, sampling"),
        ("@ a.toml --environments.0.sise 1", "--environments.0.sise: environments.0.sise = 1\n"
         "    unknown key; did you mean environments.0.size?"),
        ("@ a.toml --steps 1.5", "--steps: steps = 1.5\n    expected an integer > 0"),
        ("@ a.toml --steps true", "--steps: steps = true\n    expected an integer > 0"),
        ("@ a.toml --steps 0", "--steps: steps = 0\n    expected an integer > 0"),
        ("@ a.toml --monitoring.report 1", "--monitoring.report: monitoring.report = 1\n    expected true or false"),
        ("@ a.toml --monitoring.report yes", '--monitoring.report: monitoring.report = "yes"\n'
         "    got text, expected true or false"),
        ("@ a.toml --eval tiny", '--eval: eval = "tiny"\n    expected a section (table)'),
        ("@ a.toml --model tinny", '--model: model.type = "tinny"\n'
         '    unknown type; did you mean "tiny"? known: "pretrained", "tiny"'),
        ("@ a.toml --steps.x 3", "--steps.x: steps = a table\n    expected an integer > 0"),
        ("@ a.toml --model.lora 3", "--model.lora: model.lora = 3\n    expected a section (table) or null"),
        ("@ a.toml --trainer.optimizer.betas [0]", "--trainer.optimizer.betas: trainer.optimizer.betas.1\n"
         "    missing; expected a number >= 0 and < 1"),
        ("@ a.toml --trainer.optimizer.betas 1", "--trainer.optimizer.betas: trainer.optimizer.betas = 1\n"
         "    expected a list of 2: a number >= 0 and < 1, a number >= 0 and < 1"),
        ("@ a.toml --rollout.sampling.stop [a]", '--rollout.sampling.stop: rollout.sampling.stop = "[a]"\n'
         "    expected a list, each a string that is not empty"),
        ('@ a.toml --rollout.sampling.stop ["x",""]', "--rollout.sampling.stop: rollout.sampling.stop.1 = \"\"\n"
         "    expected a string that is not empty"),
        ("@ a.toml --name=", '--name: name = ""\n    expected a name that is not blank'),
        ("@ a.toml --name=..", '--name: name = ".."\n'
         "    expected the name of one folder, without / or \\; output_dir says where it is"),
        ("@ a.toml --name ../../evil", '--name: name = "../../evil"\n'
         "    expected the name of one folder, without / or \\; output_dir says where it is"),
        ("@ a.toml --name a\\b", '--name: name = "a\\\\b"\n'
         "    expected the name of one folder, without / or \\; output_dir says where it is"),
        ("@ a.toml --name=a\x07b", '--name: name = "a\\u0007b"\n'
         "    expected printable characters, without line breaks or control characters"),
        (f"@ a.toml --name={'é' * 101}", f'--name: name = "{"é" * 66}...\n    expected at most 200 bytes, got 202'),
        ("@ a.toml --output_dir=", '--output_dir: output_dir = ""\n    expected a folder; "." is the working folder'),
        ("@ a.toml --algorithm.type reinforce --algorithm.entropy low",
         '--algorithm.entropy: algorithm.entropy = "low"\n    expected a number or "auto"'),
        ("@ a.toml --environments.1.type toy", "a.toml:1: environments\n"
         "    environments 0 and 1 are both called 'toy'; give one a `name`"),
        ("@ a.toml --environments.0.prices.a x", '--environments.0.prices.a: environments.0.prices.a = "x"\n'
         "    input should be a valid number"),
        ("@ a.toml --name=\"\\ud800\"", "configuration\n    a text in it is not valid Unicode"),
        ("@ a.toml --extends x", '--extends: extends = "x"\n    only a file extends others; give it as @ file.toml'),
        ("@ a.toml --environments.0.type :", '--environments.0.type: environments.0.type = ":"\n'
         '    expected "file.py:name" or "package.module:name"'),
        ("@ a.toml --environments.size 6", "--environments.size: environments = a table\n    expected a list of tables"),
        ("@ a.toml --environments.0.size 6 --environments.size 6", "--environments.size: environments = a table\n"
         "    expected a list of tables"),
        ("@ a.toml --model.hf-token abc", "--model.hf-token: model.hf_token\n    looks like a secret, and a "
         "configuration is saved with the run; set it in the environment or in .env (HF_TOKEN=...)"),
    ],
)  # fmt: skip
def test_one_problem(write, refuse, line, message):
    write(
        "a.toml",
        '[[environments]]\ntype = "toy"\n' if ".prices" not in line else '[[environments]]\ntype = "grid"\n',
    )
    assert refuse(line) == message


def test_too_many_environments(write, refuse):
    write("a.toml", "".join(f'[[environments]]\ntype = "toy"\nname = "{i}"\n' for i in range(1001)))
    assert refuse("@ a.toml") == (
        "a.toml:1: environments = a list of 1001 tables\n    expected at most 1000 tables: each is evaluated on "
        "its own; many variants of an environment are tasks of one"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed = 1\nname = run\n",
            "a.toml:2: not valid TOML: invalid value; text needs quotes\n    name = run",
        ),
        ("[a\n", "a.toml:1: not valid TOML: expected ']' at the end of a table declaration\n    [a"),
        ("a = 1\na = 2\n", "a.toml:2: not valid TOML: cannot overwrite a value\n    a = 2"),
        ('a = """x\n\n', "a.toml:2: not valid TOML: unterminated string"),
        ("extends = 3\n", "a.toml:1: extends\n    expected a file name or a list of them, got 3"),
        ('extends = "b.toml"\n', "b.toml: no such file (a.toml extends it); TOML files there: a.toml"),
        ('extends = "a.toml"\n', "a.toml: `extends` goes in a circle: a.toml -> a.toml"),
        ('extends = "c.toml"\n', "a.toml: `extends` goes in a circle: a.toml -> c.toml -> a.toml"),
    ],
)
def test_one_problem_in_a_file(write, refuse, text, message):
    write("a.toml", text)
    if "c.toml" in text:
        write("c.toml", 'extends = "a.toml"\n')
    assert refuse("@ a.toml") == message


def test_not_text(tmp_path, refuse):
    (tmp_path / "a.toml").write_bytes(b"a = 1\n\xff")
    assert refuse("@ a.toml") == "a.toml: not UTF-8 text (byte 6)"


def test_problem_in_an_extended_file_names_that_file(write, refuse):
    write("shared/base.toml", "[eval]\nevry = 3\n" + TOY)
    write("a.toml", 'extends = "shared/base.toml"\n')
    assert refuse("@ a.toml") == (
        "shared/base.toml:2: eval.evry = 3\n    unknown key; did you mean eval.every?"
    )


def test_key_of_the_variant_left_behind(write, refuse):
    write("a.toml", TOY + '[algorithm]\ntype = "reinforce"\nclip = 0.2\n')
    assert refuse("@ a.toml") == (
        "a.toml:5: algorithm.clip = 0.2\n"
        '    unknown key: it belongs to algorithm.type = "grpo", and this is "reinforce"'
    )


def test_byte_order_mark(tmp_path, resolve):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + TOY.encode())
    assert resolve("@ a.toml").config.environments[0].type == "toy"


KEYS = (
    "name steps model model.type model.lora model.lora.rank environments environments.0 environments.size "
    "environments.0.type environments.0.shape.1 environments.1.type environments.1.prices rollout.type x.y "
    "rollout.sampling.stop rollout.sampling.stop.0 rollout.sampling.stop.0.x algorithm.type algorithm.kl "
    "warm_start no-warm_start no-monitoring.report eval.sampling trainer.optimizer.betas.0 engine"
)
VALUES = (
    '3 -1 null true toy grid tiny linear branching reinforce [] {} [1,2] {"type":"toy"} [{"type":"grid"}] '
    '{"rank":3} {"a":[{"b":null}]} 1e-3 zz:B nan [null] [[1]] [{}]'
)
ARGUMENTS = st.builds(
    lambda key, value: f"--{key}" if value is None else f"--{key}={value}",
    st.sampled_from(KEYS.split()),
    st.none() | st.sampled_from(VALUES.split()),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ARGUMENTS, max_size=4))
def test_whatever_is_given_is_explained_or_saved(write, resolve, arguments):
    write("a.toml", TOY + '[model]\nname = "m"\n')
    try:
        resolved = resolve(["@", "a.toml", *arguments])
    except ConfigError as error:
        assert str(error).strip()
        return
    write("saved.toml", to_toml(resolved))
    assert repr(resolve("@ saved.toml").data) == repr(resolved.data)
