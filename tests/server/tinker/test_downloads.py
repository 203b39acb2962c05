"""Files of checkpoints go to whoever has their address, and to nobody else."""

from __future__ import annotations

import base64
import json
from urllib.parse import urlsplit

import pytest
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.ports import CLOCK

BARE = {"x-api-key": ""}


@pytest.fixture
def service(of_each_database: Service) -> Service:
    """Tests of this file that use it are tests of both databases."""
    return of_each_database


async def saved(service, http, name="a"):
    """A client, and the path of the addresses of what it has saved."""
    client = await Client(http).begin()
    model = await client.model()
    await client.result(await client.post("/save_weights_external", model_id=model, seq_id=1, path=name))
    (folder,) = (service.state / "weights").iterdir()
    (folder / "run.json").write_text("what training needs")
    return client, f"/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"


def _text(address):
    """What it says, in base64."""
    text = address.rpartition("/")[2].partition(".")[0]
    return text + "=" * (-len(text) % 4)


async def test_a_file_is_read_by_its_address_alone(service):
    async with service.asked() as http:
        _, where = await saved(service, http)
        answer = (await http.get(where)).json()
        assert list(answer["urls"]) == ["weights.json"]
        address = answer["urls"]["weights.json"]
        assert address.startswith("http://localhost/api/v1/files/")
        said = json.loads(base64.urlsafe_b64decode(_text(address)))
        assert said.keys() == {"folder", "file", "own", "expires"}  # nothing of the key
        found = await http.get(address, headers=BARE)
        assert (found.status_code, json.loads(found.content)) == (200, [0.0, False, 0.0])
        assert (await http.get(where, headers=BARE)).status_code == 401
        assert (await http.post(urlsplit(address).path, headers=BARE)).status_code == 401


async def test_no_other_address_reads_anything(service):
    async with service.asked() as http:
        _, where = await saved(service, http)
        (address,) = (await http.get(where)).json()["urls"].values()
        text, _, signature = address.rpartition("/")[2].partition(".")
        (folder,) = (service.state / "weights").iterdir()
        for token in (
            text, f"{text}.", f"{text}.{signature[::-1]}", f"{text[:-2]}AA.{signature}", f".{signature}", "",
            f"..%2f{folder.name}%2fweights.json", "%2e%2e/%2e%2e/tinker.sqlite", "\u00e9.\u00e9",
            f"../weights/{folder.name}/weights.json",
        ):  # fmt: skip
            found = await http.get(f"/files/{token}", headers=BARE)
            assert found.status_code in (401, 403, 404) and b"true" not in found.content, token
        for name in ("b", "..", "a%2f..%2fa", "%2e%2e%2fa", "run.json"):
            assert (await http.get(where.replace("/a/", f"/{name}/"))).status_code in (400, 404, 405), name


async def test_an_address_ends_with_its_hour_and_with_the_checkpoint(service, monkeypatch):
    async with service.asked() as http:
        client, where = await saved(service, http)
        (address,) = (await http.get(where)).json()["urls"].values()
        ends = json.loads(base64.urlsafe_b64decode(_text(address)))["expires"]
        for now, status in ((ends - 1, 200), (ends, 403)):
            with monkeypatch.context() as patch:
                patch.setattr(CLOCK.port, "time", lambda now=now: now, raising=False)
                assert (await http.get(address)).status_code == status
        model = where.split("/")[2]
        checkpoint = f"/training_runs/{model}/checkpoints/external_weights/a"
        assert (await http.delete(checkpoint)).status_code == 200
        assert (await http.get(address)).status_code == 404
        assert (await http.get(where)).status_code == 404
        again = await client.post("/save_weights_external", model_id=model, seq_id=2, path="a")
        await client.result(again)
        assert (await http.get(address)).status_code == 404  # it is another one now
        (address,) = (await http.get(where)).json()["urls"].values()
        assert (await http.get(address)).status_code == 200


async def test_only_its_owner_gets_the_addresses_of_a_checkpoint_that_is_not_public(service):
    async with service.asked() as http:
        _, where = await saved(service, http)
        other = {"x-api-key": "tml-other"}
        assert (await http.get(where, headers=other)).status_code == 404
        publish = where.partition("/external")[0] + "/external_weights/a/publish"
        await http.post(publish)
        (address,) = (await http.get(where, headers=other)).json()["urls"].values()
        assert (await http.get(address)).status_code == 200
        await http.delete(publish)
        assert (await http.get(address)).status_code == 404


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_sdk_downloads_a_checkpoint(client, tmp_path):
    from tinker.cli.commands.checkpoint import _download_checkpoint

    trained = client.create_lora_training_client(base_model="base", rank=8, seed=3).result()
    rest = client.create_rest_client()
    exported = trained.save_weights_external("mine").result().path
    for number, path in enumerate([exported, trained.save_state("held").result().path]):
        folder = tmp_path / str(number)
        folder.mkdir()
        _download_checkpoint(rest, path, folder, show_progress=False, format="json")
        assert json.loads((folder / "weights.json").read_text()) == [0.0, False, 0.0]
    kinds = {each.checkpoint_type for each in rest.list_user_checkpoints().result().checkpoints}
    assert kinds == {"training", "external"}
