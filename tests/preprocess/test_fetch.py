# SPDX-License-Identifier: Apache-2.0
"""Pictures come from allowed hosts with public addresses only, however the way there is dressed up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kimi_triton.errors import ConfigError, InvalidRequest, Unavailable
from kimi_triton.preprocess import fetch
from kimi_triton.preprocess.fetch import ImageFetcher, UrlRules, is_public, is_url
from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::",
]  # fmt: skip


class Site(ThreadingHTTPServer):
    """A web site whose answers the test sets: path -> (status, headers, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str, host: str = "pictures.example") -> bytes:
        return f"http://{host}:{self.port}{path}".encode()


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        page = self.server.pages[self.path]
        if callable(page):
            page(self)
            return
        status, headers, body = page
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Reached as pictures.example; other names lead where their first label says: ip-10-0-0-1.example."""

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host == "unknown.example":
            raise socket.gaierror
        addresses = [host] if host[0].isdigit() else ["127.0.0.1"]
        if host.startswith("ip-"):
            addresses = host.split(".")[0].removeprefix("ip-").replace("-", ".").split("and")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    real = is_public
    monkeypatch.setattr(fetch.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1" or real(address))
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()


def fetcher(site: Site, hosts: str = "*", max_bytes: int = 1000, timeout_s: float = 5) -> ImageFetcher:
    rules = UrlRules.parse(",".join(f"{host}:{site.port}" for host in hosts.split(",")), allow_http=True)
    assert rules is not None
    return ImageFetcher(rules, max_bytes, timeout_s)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_and_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_ordinary_addresses_are_public(address: str) -> None:
    assert is_public(address)


def test_a_picture_comes_as_it_is(site: Site) -> None:
    site.pages["/a.png?size=2"] = (200, {}, b"picture")
    assert fetcher(site).fetch(site.url("/a.png?size=2"), 0) == b"picture"


def test_redirects_are_followed_but_not_for_ever(site: Site) -> None:
    site.pages |= {f"/{step}": (302, {"Location": f"/{step + 1}"}, b"") for step in range(5)}
    site.pages["/2"] = (200, {}, b"picture")
    assert fetcher(site).fetch(site.url("/0"), 0) == b"picture"
    site.pages["/2"] = (302, {"Location": "/0"}, b"")
    with pytest.raises(InvalidRequest, match="redirects more than 3 times"):
        fetcher(site).fetch(site.url("/0"), 0)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://ip-10-0-0-1.example:{port}/x", "not on the public internet"),
        ("http://ip-169-254-169-254.example:{port}/latest/meta-data", "not on the public internet"),
        ("http://ip-8-8-8-8and10-0-0-1.example:{port}/x", "not on the public internet"),
        ("http://pictures.example:22/x", "not fetched from pictures.example:22"),
        ("http://user:pass@pictures.example:{port}/x", "user name"),
        ("file:///etc/passwd", "file URLs are not fetched"),
        ("gopher://pictures.example:{port}/x", "gopher URLs are not fetched"),
        ("http://[broken", "malformed"),
        ("http://pictures.example:port/x", "no number"),
        ("http://unknown.example:{port}/x", "is not known"),
    ],
)
def test_where_a_redirect_leads_is_checked_like_a_url(location: str, words: str, site: Site) -> None:
    target = location.replace("{port}", str(site.port))
    site.pages["/"] = (302, {"Location": target}, b"")
    with pytest.raises(InvalidRequest, match=f"^image 4: .*{words}"):
        fetcher(site).fetch(site.url("/"), 4)
    assert site.asked == ["/"]
    if target.startswith("http"):
        with pytest.raises(InvalidRequest, match=words):
            fetcher(site).fetch(target.encode(), 4)
        assert site.asked == ["/"]


@pytest.mark.parametrize(
    ("hosts", "host", "is_allowed"),
    [
        ("pictures.example", "pictures.example", True),
        ("pictures.example", "PICTURES.example", True),
        ("pictures.example", "pictures.example.", True),
        ("pictures.example", "other.example", False),
        ("pictures.example", "a.pictures.example", False),
        ("*.example", "pictures.example", True),
        ("*.example", "evilexample", False),
        ("*.example", "example", False),
        ("a.example,pictures.example", "pictures.example", True),
    ],
)
def test_hosts_are_matched_whole(hosts: str, host: str, is_allowed: bool, site: Site) -> None:
    site.pages["/"] = (200, {}, b"picture")
    if is_allowed:
        assert fetcher(site, hosts).fetch(site.url("/", host), 0) == b"picture"
    else:
        with pytest.raises(InvalidRequest, match="not fetched from"):
            fetcher(site, hosts).fetch(site.url("/", host), 0)


def test_http_needs_permission_and_the_default_port_is_meant() -> None:
    rules = UrlRules.parse("*", allow_http=False)
    assert rules is not None
    with pytest.raises(InvalidRequest, match="http URLs are not fetched"):
        ImageFetcher(rules, 10).fetch(b"http://example.com/a.png", 0)
    with pytest.raises(InvalidRequest, match=r"example\.com:8080"):
        ImageFetcher(rules, 10).fetch(b"https://example.com:8080/a.png", 0)


@pytest.mark.parametrize("declared", [True, False])
def test_a_file_above_the_limit_is_refused(declared: bool, site: Site) -> None:
    headers = {} if declared else {"Content-Length": "", "Connection": "close"}
    site.pages["/"] = (200, headers, b"x" * 1001)
    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        fetcher(site).fetch(site.url("/"), 0)


@pytest.mark.parametrize(("status", "error"), [(404, InvalidRequest), (403, InvalidRequest), (503, Unavailable)])
def test_a_status_is_told(status: int, error: type[Exception], site: Site) -> None:
    site.pages["/"] = (status, {}, b"secret text")
    with pytest.raises(error, match=f"status {status}$"):
        fetcher(site).fetch(site.url("/"), 0)


@pytest.mark.parametrize("part", ["header", "body"])
def test_a_dripping_server_is_cut_at_the_deadline(part: str, site: Site) -> None:
    def drip(handler: Any) -> None:
        if part == "body":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
        try:
            for _ in range(100):
                handler.wfile.write(b"x")
                time.sleep(0.1)
        except OSError:
            pass

    site.pages["/"] = drip
    start = time.monotonic()
    with pytest.raises(Unavailable):
        fetcher(site, timeout_s=0.5).fetch(site.url("/"), 0)
    assert time.monotonic() - start < 3


def test_a_cut_file_is_not_taken_for_a_whole_one(site: Site) -> None:
    site.pages["/"] = (200, {"Content-Length": "900"}, b"half")
    with pytest.raises(Unavailable, match="in whole"):
        fetcher(site).fetch(site.url("/"), 0)


@pytest.mark.parametrize("url", [b"http://a b/", b"http://\xff/", b"http://a/\r\nHost: x", b"http://a/" + b"x" * 3000])
def test_unescaped_and_long_urls_are_refused(url: bytes) -> None:
    rules = UrlRules.parse("*", allow_http=True)
    assert rules is not None
    with pytest.raises(InvalidRequest, match="image 0: its URL is longer"):
        ImageFetcher(rules, 10).fetch(url, 0)


def test_rules_are_off_when_empty_and_refuse_what_is_no_host() -> None:
    assert UrlRules.parse(" ", allow_http=True) is None
    for wrong in ("https://example.com", "a.*.example", "**"):
        with pytest.raises(ConfigError, match="image URL host"):
            UrlRules.parse(wrong, allow_http=False)


def test_what_is_a_url() -> None:
    assert is_url(b"HTTPS://a/b")
    assert not is_url(b"data:image/png;base64,https://")


def test_off_by_default_and_part_of_the_pipeline_when_on(site: Site, tiny_k25: Path, png: Any) -> None:
    picture = png(56, 56)
    site.pages["/a.png"] = (200, {}, picture)
    request = PreprocessRequest(text_input=b"What?", images=[site.url("/a.png")])
    with pytest.raises(InvalidRequest, match="image 0: addresses are not fetched"):
        Preprocessor.from_checkpoint(tiny_k25).run(request)
    assert site.asked == []
    rules = UrlRules.parse(f"pictures.example:{site.port}", allow_http=True)
    fetched = Preprocessor.from_checkpoint(tiny_k25, url_rules=rules).run(request)
    sent = Preprocessor.from_checkpoint(tiny_k25).run(PreprocessRequest(text_input=b"What?", images=[picture]))
    assert (fetched.image_digest == sent.image_digest).all()
