# SPDX-License-Identifier: Apache-2.0
"""Fetch pictures from the web, for operators who allow it: certain hosts, public addresses, bounded size and time.

Whoever can name a URL could make the server look at its own network, so every step of the way is checked: a host is
looked up once, all its addresses must be public, and the connection goes to the address that was checked. Redirects
are followed by the same rules. Proxies and credentials in URLs are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from kimi_triton.errors import ConfigError, InvalidRequest, Unavailable

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0  # from the first look-up to the last byte, redirects included
MAX_URL_BYTES = 2048
CHUNK_BYTES = 64 * 1024
DEFAULT_PORTS = {"https": 443, "http": 80}
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # these IPv6 addresses stand for any IPv4 address


def is_url(element: bytes) -> bool:
    """Whether an element of the image input is an address rather than a picture."""
    return element[:8].lower().startswith((b"http://", b"https://"))


@dataclass(frozen=True, slots=True)
class UrlRules:
    """`hosts` are names with or without a port; `*.example.com` means every name below, `*` every name."""

    hosts: tuple[str, ...]
    allow_http: bool = False

    @classmethod
    def parse(cls, hosts: str, allow_http: bool) -> UrlRules | None:
        """From a list with commas; None when it is empty, and nothing may be fetched. Raises ConfigError."""
        names = tuple(name.strip().lower() for name in hosts.split(",") if name.strip())
        for name in names:
            if "/" in name or "*" in name.removeprefix("*"):
                raise ConfigError(f"image URL host {name!r}: expected a name such as example.com, *.example.com or *")
        return cls(names, allow_http) if names else None

    def check(self, parts: SplitResult) -> tuple[str, int]:
        """Host and port of a URL that may be fetched. Raises InvalidRequest."""
        if parts.scheme not in (("https", "http") if self.allow_http else ("https",)):
            raise InvalidRequest(f"{parts.scheme} URLs are not fetched")
        try:
            host, port = (parts.hostname or "").rstrip("."), parts.port or DEFAULT_PORTS[parts.scheme]
        except ValueError:
            raise InvalidRequest("its URL has a port that is no number") from None
        if not host or parts.username is not None or parts.password is not None:
            raise InvalidRequest("its URL has no host, or a user name")
        is_default = port == DEFAULT_PORTS[parts.scheme]
        if not any(_matches(host, port, is_default, pattern) for pattern in self.hosts):
            raise InvalidRequest(f"pictures are not fetched from {host[:100]}{'' if is_default else f':{port}'}")
        return host, port


class ImageFetcher:
    """Fetches pictures by the rules, each by itself; may be used from several threads."""

    def __init__(self, rules: UrlRules, max_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context()

    def fetch(self, element: bytes, index: int) -> bytes:
        """The file at the URL `element`, image number `index`. Raises InvalidRequest, or Unavailable to try again."""
        try:
            return self._fetch(element)
        except (InvalidRequest, Unavailable) as exc:
            raise type(exc)(f"image {index}: {exc}") from None
        except (TimeoutError, OSError, http.client.HTTPException) as exc:
            raise Unavailable(f"image {index}: its URL could not be fetched: {type(exc).__name__}") from None

    def _fetch(self, element: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        parts = _resolved("", _text(element))
        for _ in range(MAX_REDIRECTS + 1):
            host, port = self._rules.check(parts)
            address = public_address(host, port)
            with self._connected(parts.scheme, host, port, address, deadline) as connection:
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                response = connection.getresponse()
                if response.status not in (301, 302, 303, 307, 308):
                    return self._read(response, deadline)
                parts = _resolved(parts.geturl(), _text(response.getheader("Location", "").encode()))
        raise InvalidRequest(f"its URL redirects more than {MAX_REDIRECTS} times")

    @contextmanager
    def _connected(
        self, scheme: str, host: str, port: int, address: str, deadline: float
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection to `address` that is cut at the deadline, however slowly bytes drip in."""
        left = max(0.01, deadline - time.monotonic())
        connection = http.client.HTTPConnection(host, port)
        connection.sock = socket.create_connection((address, port), timeout=left)
        cut = threading.Timer(left, _cut, [connection])
        cut.start()
        try:
            if scheme == "https":
                encrypted = self._tls.wrap_socket(connection.sock, server_hostname=host, do_handshake_on_connect=False)
                connection.sock = encrypted
                encrypted.do_handshake()
            yield connection
        finally:
            cut.cancel()
            connection.close()

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != 200:
            kind = Unavailable if response.status >= 500 else InvalidRequest
            raise kind(f"its URL answers with HTTP status {response.status}")
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise InvalidRequest("its URL answers in a compressed form that was not asked for")
        data = bytearray()
        while chunk := response.read(min(CHUNK_BYTES, self._max_bytes + 1 - len(data))):
            data += chunk
            if len(data) > self._max_bytes:
                raise InvalidRequest(f"the file at its URL has more than {self._max_bytes} bytes")
        if time.monotonic() > deadline or (response.length or 0) > 0:
            raise Unavailable("the file at its URL did not come in whole")
        return bytes(data)


def public_address(host: str, port: int) -> str:
    """An address of `host`, none of which may lead into a private network. Raises InvalidRequest."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (socket.gaierror, UnicodeError):
        raise InvalidRequest(f"the host {host[:100]} of its URL is not known") from None
    if not found or not all(is_public(address) for address in found):
        raise InvalidRequest(f"pictures are not fetched from {host[:100]}: it is not on the public internet")
    return min(found, key=lambda address: ":" in address)  # IPv4 first


def is_public(address: str) -> bool:
    """Whether an address, or the IPv4 address inside it, is globally routed and belongs to one machine."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in NAT64 or parsed.teredo:
            return False
        parsed = parsed.ipv4_mapped or parsed.sixtofour or parsed
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


def _matches(host: str, port: int, is_default: bool, pattern: str) -> bool:
    name, _, given = pattern.partition(":")
    if str(port) != given if given else not is_default:
        return False
    return name == "*" or host == name or (name.startswith("*.") and host.endswith(name[1:]))


def _text(url: bytes) -> str:
    if len(url) > MAX_URL_BYTES or not url.isascii() or any(byte <= 32 or byte == 127 for byte in url):
        raise InvalidRequest(f"its URL is longer than {MAX_URL_BYTES} bytes or holds spaces or unescaped characters")
    return url.decode()


def _resolved(base: str, url: str) -> SplitResult:
    try:
        return urlsplit(urljoin(base, url))
    except ValueError:
        raise InvalidRequest("its URL is malformed") from None


def _cut(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
