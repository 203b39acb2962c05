"""Names of the hub: asked for once, with no network of its own in these tests."""

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from silva.errors import ModelError
from silva.models import hub


@pytest.fixture
def answer(monkeypatch):
    """`answer(error, cached)`: what the hub says, whether the cache has the model; gives what was asked."""
    asked = []

    def make(error=None, cached=False):
        def model_info(self, name, *, revision, timeout):
            asked.append((name, revision, timeout))
            if error is not None:
                raise error

        path = "/cache/config.json" if cached else None
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: path)
        return asked

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return make


def refused(kind):
    request = httpx2.Request("GET", "https://hub.example")
    return kind("no", response=httpx2.Response(404, request=request))


NO_NETWORK = httpx2.ConnectError("Name or service not known")


def test_without_a_network_it_is_asked_once(answer):
    asked = answer(NO_NETWORK)
    with pytest.raises(ModelError) as caught:
        hub.options("nowhere", None)
    assert str(caught.value) == (
        "model.name = 'nowhere': there is no such folder here, and https://hub.example cannot be asked for "
        "it (Name or service not known). Name a folder or a GGUF file, or connect to the network"
    )
    assert asked == [("nowhere", None, hub.TIMEOUT)]


def test_without_a_network_the_cache_serves(answer):
    answer(NO_NETWORK, cached=True)
    assert hub.options("org/model", "main") == {"local_files_only": True}


def test_with_a_network_the_download_is_left_to_transformers(answer):
    asked = answer()
    assert hub.options("gpt2", "v1") == {} and asked == [("gpt2", "v1", hub.TIMEOUT)]
    answer(refused(errors.HfHubHTTPError))  # the hub is there, but busy
    assert hub.options("gpt2", None) == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused(errors.RepositoryNotFoundError), "no such model on the hub; a private one needs HF_TOKEN"),
        (
            refused(errors.RevisionNotFoundError),
            "model.revision = 'v9': the hub's org/model has no such revision",
        ),
        (errors.HFValidationError("bad"), "a hub id is of the form organisation/name"),
    ],
)
def test_what_is_not_there_is_said(answer, error, words):
    answer(error)
    with pytest.raises(ModelError, match=words):
        hub.options("org/model", "v9")


def test_offline_mode_asks_nobody(answer, monkeypatch):
    asked = answer()
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    with pytest.raises(ModelError, match=r"\(HF_HUB_OFFLINE is set\)"):
        hub.options("org/model", None)
    answer(cached=True)
    assert hub.options("org/model", None) == {"local_files_only": True} and asked == []
