"""The unions close over the registries; the configuration is frozen and strict from Python too."""

import pytest
from config_test_worlds import Grid, Grpo, Local, Toy
from pydantic import ValidationError

from silva.config.schema import Registries, RunConfig, run_config

W = "config_test_worlds:"


def test_defaults_of_the_unions(registries):
    model = run_config(registries)
    config = model(environments=(Toy(),))
    assert isinstance(config, RunConfig)
    assert (config.rollout.type, config.algorithm, config.engine) == ("linear", Grpo(), Local())
    assert run_config(registries) is model  # made once


def test_first_entry_where_the_usual_one_is_missing():
    local = {"local": W + "Local"}
    other = Registries({"toy": W + "Toy"}, {"branching": W + "Branching"}, {"reinforce": W + "Reinforce"},
                       local, local, local)  # fmt: skip
    config = run_config(other)(environments=(Toy(),))
    assert (config.rollout.type, config.algorithm.type) == ("branching", "reinforce")


def test_strict_and_frozen_from_python(registries):
    model = run_config(registries)
    with pytest.raises(ValidationError, match="int_type"):
        model(environments=(Toy(),), steps="8")
    with pytest.raises(ValidationError, match="too_short"):
        model(environments=())
    with pytest.raises(ValidationError, match="frozen_instance"):
        model(environments=(Toy(),)).steps = 3


def test_labels_must_differ(registries):
    model = run_config(registries)
    with pytest.raises(
        ValidationError, match="environments 0 and 2 are both called 'toy'; give one a `name`"
    ):
        model(environments=(Toy(), Grid(), Toy(size=2)))
    assert [each.label for each in model(environments=(Toy(), Toy(name="b"))).environments] == ["toy", "b"]
