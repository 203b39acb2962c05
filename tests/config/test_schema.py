"""The unions close over the registries; the configuration is frozen and strict from Python too."""

import pytest
from config_test_worlds import Toy
from pydantic import ValidationError

from silva.config.schema import Registries, run_config

W = "config_test_worlds:"


def test_first_entry_where_the_usual_one_is_missing():
    local = {"local": W + "Local"}
    other = Registries({"toy": W + "Toy"}, {"branching": W + "Branching"}, {"reinforce": W + "Reinforce"},
                       local, local, local)  # fmt: skip
    config = run_config(other)(environments=(Toy(),))
    assert (config.rollout.type, config.algorithm.type) == ("branching", "reinforce")


def test_strict_and_frozen_from_python(registries):
    model = run_config(registries)
    assert run_config(registries) is model  # made once
    with pytest.raises(ValidationError, match="int_type"):
        model(environments=(Toy(),), steps="8")
    with pytest.raises(ValidationError, match="at least one"):
        model(environments=())
    with pytest.raises(ValidationError, match="frozen_instance"):
        model(environments=(Toy(),)).steps = 3
