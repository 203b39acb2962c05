"""Servers with a certificate: who may come in, and files that cannot be used."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send
from tests.server.running import certificate, connected, listening, run

from silva.errors import ConfigError
from silva.wire.guard import Guard
from silva.wire.listening import Bind, check_bind, serve
from silva.wire.transport import Unreachable


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"true"})


async def test_those_who_trust_the_certificate_come_in_and_nobody_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = Bind(**certificate(tmp_path))
    async with listening(Guard(hello, bind, key="k3y", log=print), bind) as address:
        assert address.startswith("https://127.0.0.1:")
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):  # it never begins its handshake
            async with connected(address) as peer:
                with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
                    await peer.get("/")
            monkeypatch.setenv("SSL_CERT_FILE", bind.certificate)
            async with connected(address, key="k3y") as peer:
                assert await peer.get("/") is True
            async with connected(address.replace("https", "http"), key="k3y") as peer:
                with pytest.raises(Unreachable):
                    await peer.get("/")
            async with httpx2.AsyncClient(timeout=60) as client:
                origin = {"authorization": "Bearer k3y", "origin": address}
                assert (await client.get(address, headers=origin)).status_code == 200


PLAIN = "expected a file in PEM"
PAIR = "expected two files in PEM that belong together"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own, other: {**own, "private_key": ""}, "TLS: got no private key"),
        (lambda own, other: {**own, "certificate": ""}, "TLS: got no certificate"),
        (lambda own, other: {**own, "certificate": "/none.pem"}, f"No such file or directory; {PLAIN}"),
        (lambda own, other: {**own, "private_key": "/none.key"}, f"No such file or directory; {PLAIN}"),
        (lambda own, other: {**own, "private_key": "/"}, f"Is a directory; {PLAIN}"),
        (lambda own, other: {**own, "private_key": other["private_key"]}, PAIR),
        (lambda own, other: {**own, "certificate": own["private_key"]}, PAIR),
        (lambda own, other: {**own, "private_key": own["certificate"]}, PAIR),
        (lambda own, other: {**own, "certificate": "/dev/null"}, PAIR),
        (lambda own, other: {**own, "unix": "a.sock"}, "a Unix socket has no TLS"),
    ],
)
def test_files_that_cannot_be_used_are_told_at_the_start(
    tmp_path: Path, spoil: Callable[[dict[str, str], dict[str, str]], dict[str, str]], said: str
) -> None:
    bind = Bind(**spoil(certificate(tmp_path), certificate(tmp_path, "other")))
    with pytest.raises(ConfigError) as refused:
        check_bind(bind, "")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError):
        run(serve(hello, bind, ready=print))


def test_a_private_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    files, secret = certificate(tmp_path), str(tmp_path / "secret.key")
    sealed = ["openssl", "pkcs8", "-topk8", "-passout", "pass:word", "-in", files["private_key"]]
    subprocess.run([*sealed, "-out", secret], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="without a password"):
        check_bind(Bind(certificate=files["certificate"], private_key=secret), "")
