"""Help: an overview, one section, or all of it; instant because nothing heavy is imported."""

import re

import pytest

from silva.config import field_types
from silva.config.help import help_text
from silva.config.schema import run_config
from silva.errors import ConfigError


def page(registries, topic="all"):
    return help_text("silva rl", "silva rl: train by RL", registries, topic)


def test_the_overview_has_a_line_for_each_section_and_says_how_to_go_on(registries):
    text = page(registries, "")
    lines = text.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 110
    assert lines[0] == "silva rl: train by RL" and '  name = "run"' in text
    sections = {line.split()[0] for line in lines if line.startswith("  [")}
    plain = {"name", "seed", "output_dir", "steps"}
    assert sections == {f"[{name}]" for name in run_config(registries).model_fields if name not in plain} - {
        "[environments]"
    } | {"[[environments]]"}
    assert "  [algorithm]       Advantages and loss; types: reinforce, grpo" in lines
    assert lines[-4:] == [
        "silva rl --help environments       a line for each environment",
        "silva rl --help trainer.optimizer  one section, or one key",
        "silva rl --help algorithm.ppo      one type of a section",
        "silva rl --help all                every section",
    ]


def test_one_section_with_what_is_below_it(registries):
    lines = page(registries, "trainer.optimizer").splitlines()
    assert lines[0] == "[trainer.optimizer]" and len(lines) == 10
    assert re.match(r"  lr = 1e-5 +Learning rate of AdamW", lines[1])
    critic = page(registries, "trainer.critic").splitlines()
    assert critic[0] == "[trainer.critic]  Of recipes that ask for values."
    assert "[trainer.critic.optimizer]" in critic and not any(
        "[trainer.optimizer]" in line for line in critic
    )
    text = page(registries, "warm-start.optimizer")
    assert text.startswith("[warm_start.optimizer]\n  lr = 0.001 ")  # the default of this place


def test_one_type_and_one_key(registries):
    toy = page(registries, "environments.toy")
    assert toy.startswith('[[environments]] type = "toy"  A board.\n  name = "" ') and "grid" not in toy
    assert "\n  size = 4 " in toy and "\n  train_size = " in toy
    assert page(registries, "environments.0.size").splitlines()[0] == "[[environments]]"
    assert page(registries, "trainer.optimizer.lr").split(" " * 9)[0] == "[trainer.optimizer]\n  lr = 1e-5"
    assert page(registries, "steps").startswith("  steps = 100 ")


def test_a_long_section_of_several_types_lists_them(registries, monkeypatch):
    whole = page(registries, "algorithm")
    assert '[algorithm] type = "grpo" (default)\n  ' in whole
    monkeypatch.setattr("silva.config.help.LONG", 3)
    lines = page(registries, "algorithm").splitlines()
    assert lines[0] == "[algorithm] of every type  Advantages and loss."
    assert lines[-4:] == [
        '[algorithm] type = "reinforce"',
        '[algorithm] type = "grpo" (default)',
        "",
        "--help algorithm.reinforce shows all of one type.",
    ]


def test_a_type_inside_a_section_is_found_by_its_name():
    from silva.registries import REGISTRIES

    with pytest.raises(ConfigError, match=r"did you mean environments\.reward\.math or environments\."):
        page(REGISTRIES, "math")
    assert "  worked_out = true  " in page(REGISTRIES, "environments.reward.math")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("optimizer", "did you mean trainer.optimizer or warm_start.optimizer or trainer.critic.optimizer?"),
        ("grpo", "did you mean algorithm.grpo?"),
        ("trainer.optimiser", "did you mean trainer.optimizer"),
        ("zzz", "expected all, or one of name, seed, output_dir, "),
    ],
)
def test_unknown_topics(registries, topic, hint):
    with pytest.raises(ConfigError, match=f"--help {topic}: there is no section, type or key") as caught:
        page(registries, topic)
    assert hint in str(caught.value)
    with pytest.raises(ConfigError, match="steps is a key, with nothing below it"):
        page(registries, "steps.more")


def test_every_section_and_key_is_there(registries):
    text = page(registries)
    for path, field, model in field_types.fields(run_config(registries)):
        if path == ("environments",):
            assert "[[environments]] of every type" in text
        elif field_types.sections(field.annotation):
            assert f"[{field_types.dotted(path)}]" in text
        elif field_types.held(field):
            assert f"[[{field_types.dotted(path)}]]" in text
        elif path[-1] != "type":
            assert f"  {path[-1]} = " in text, path
        else:
            assert f'type = "{field_types.tag(model)}"' in text
    assert max(map(len, text.splitlines())) <= 110


def test_variants_share_what_they_share(registries):
    lines = page(registries).splitlines()
    start = lines.index('[[environments]] type = "toy"  A board.')
    assert lines[start + 1].split() == ["size", "=", "4", "Side", "of", "the", "board."]
    assert lines[start + 3].startswith('[[environments]] type = "grid"  ')
    assert sum(line.startswith("  train_size = ") for line in lines) == 1
    assert '[algorithm] type = "grpo" (default)' in lines
    start = lines.index("[warm_start.optimizer]")
    assert lines[start + 1] == "  as [trainer.optimizer], but" and lines[start + 2].startswith(
        "  lr = 0.001 "
    )
