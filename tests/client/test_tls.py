# SPDX-License-Identifier: Apache-2.0
"""TLS over both protocols, with a certificate authority that exists only here, and headers on every call."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kimi_client import KimiClient, ServerUnavailable, TlsFiles

HEADERS = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-out", str(paths[0]), "-keyout", str(paths[1])], check=True, capture_output=True)
    return paths


class Handler(BaseHTTPRequestHandler):
    """A server whose every model is ready, for those who send the token."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "2.51.0"}).encode())

    def log_message(self, *_: Any) -> None:
        pass


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The same over gRPC."""

    def _is_known(self, context: Any) -> bool:
        return ("authorization", "Bearer secret") in context.invocation_metadata()

    def ServerLive(self, _: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=self._is_known(context))

    def ServerReady(self, _: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=self._is_known(context))

    def ModelReady(self, _: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self._is_known(context))

    def ServerMetadata(self, *_: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(version="2.51.0")


@pytest.fixture
def https_url(certificate: tuple[Path, Path]) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with HTTPServer(("localhost", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def grpcs_url(certificate: tuple[Path, Path]) -> Iterator[str]:
    cert, key = (path.read_bytes() for path in certificate)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, cert)]))
    server.start()
    yield f"grpcs://localhost:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("url_fixture", ["https_url", "grpcs_url"])
def test_a_private_authority_is_trusted_when_named(
    url_fixture: str, certificate: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(url_fixture)
    with KimiClient(url, tls=TlsFiles(ca_file=certificate[0]), headers=HEADERS) as kimi:
        health = kimi.health()
    assert (health.is_live, health.is_ready, health.server_version) == (True, True, "2.51.0")
    with KimiClient(url, tls=TlsFiles(ca_file=certificate[0])) as kimi:
        assert not kimi.health().is_ready


@pytest.mark.parametrize("url_fixture", ["https_url", "grpcs_url"])
def test_an_unknown_authority_is_not_trusted(url_fixture: str, request: pytest.FixtureRequest) -> None:
    with (
        KimiClient(request.getfixturevalue(url_fixture), headers=HEADERS, timeout_s=20) as kimi,
        pytest.raises(ServerUnavailable),
    ):
        kimi.health()


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with (
        KimiClient("https://localhost:9", tls=TlsFiles(ca_file=tmp_path / "no.pem")) as kimi,
        pytest.raises(FileNotFoundError),
    ):
        kimi.health()
