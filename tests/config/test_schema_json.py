"""The JSON Schema says what the loader says."""

import pytest

from silva.config.schema_json import json_schema


@pytest.fixture
def schema(registries):
    return json_schema(registries)


def test_keys_have_their_descriptions(schema):
    assert list(schema["properties"])[:3] == ["extends", "name", "seed"]
    assert schema["properties"]["steps"] == {
        "default": 100,
        "description": "Training steps: one batch of rollouts each.",
        "exclusiveMinimum": 0,
        "title": "Steps",
        "type": "integer",
    }
    assert schema["$defs"]["Toy"]["properties"]["size"]["description"] == "Side of the board."
    assert schema["$defs"]["Optimizer"]["additionalProperties"] is False
    assert "required" not in schema  # a file may leave the environments to the one it extends


def test_null_is_the_string(schema):
    norm = schema["$defs"]["Optimizer"]["properties"]["max_grad_norm"]
    assert norm["anyOf"] == [{"exclusiveMinimum": 0, "type": "number"}, {"const": "null"}]
    assert "default" not in schema["$defs"]["PretrainedModel"]["properties"]["revision"]


def test_type_is_required_of_all_but_the_default_variant(schema):
    required = {name: "type" in schema["$defs"][name].get("required", []) for name in (
        "PretrainedModel", "TinyModel", "Grpo", "Reinforce", "Linear", "Branching", "Local", "Toy", "Grid"
    )}  # fmt: skip
    assert required == {
        "PretrainedModel": False, "TinyModel": True, "Grpo": False, "Reinforce": True, "Linear": False,
        "Branching": True, "Local": False, "Toy": True, "Grid": True,
    }  # fmt: skip


def test_a_name_is_short_for_a_table(schema):
    assert schema["properties"]["model"]["oneOf"][-1] == {"enum": ["pretrained", "tiny"]}
    assert schema["properties"]["algorithm"]["oneOf"][-1] == {"enum": ["grpo", "reinforce"]}


def test_environments_of_ones_own_are_let_through(schema):
    *known, own = schema["properties"]["environments"]["items"]["oneOf"]
    assert known == [{"$ref": "#/$defs/Toy"}, {"$ref": "#/$defs/Grid"}]
    assert own["properties"]["type"]["anyOf"] == [{"pattern": ":"}]
    assert own["required"] == ["type"]
