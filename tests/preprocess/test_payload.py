# SPDX-License-Identifier: Apache-2.0
"""Files, base64 and data URLs in one element of the `image` input."""

from __future__ import annotations

import base64
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.images import decode_image
from kimi_triton.preprocess.patches import image_to_patches
from kimi_triton.preprocess.payload import image_bytes, sniff_format
from tests.preprocess.pictures import KIMI_K25, encode, noise

PNG = encode(noise(40, 30), "PNG")
TEXT = base64.b64encode(PNG)
URL_SAFE = base64.urlsafe_b64encode(PNG)
HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(500)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'

WRAPPINGS = {
    "raw": PNG,
    "base64": TEXT,
    "line_breaks": base64.encodebytes(PNG),
    "crlf_line_breaks": base64.encodebytes(PNG).replace(b"\n", b"\r\n"),
    "leading_newlines": b"\n \n" + TEXT,
    "no_padding": TEXT.rstrip(b"="),
    "url_safe": URL_SAFE,
    "url_safe_no_padding": URL_SAFE.rstrip(b"="),
    "data_url": b"data:image/png;base64," + TEXT,
    "data_url_upper_case": b"DATA:image/PNG;BASE64," + TEXT,
    "data_url_wrong_label": b"data:image/jpeg;base64," + TEXT,
    "data_url_svg_label": b"data:image/svg+xml;base64," + TEXT,
    "data_url_no_label": b"data:;base64," + TEXT,
    "data_url_parameters": b"data:image/png;charset=utf-8;name=a;base64," + TEXT,
    "data_url_line_breaks": b"data:image/png;base64,\n" + base64.encodebytes(PNG),
    "data_url_no_padding": b"data:image/png;base64," + TEXT.rstrip(b"="),
    "data_url_url_safe": b"data:image/png;base64," + URL_SAFE,
    "data_url_percent": b"data:image/png;base64," + quote(TEXT, safe="").encode(),
}

REFUSALS = {
    "empty": (b"", "empty"),
    "blank": (b" \n\t", "empty"),
    "one_byte": (b"\x00", "neither"),
    "zeros": (bytes(4096), "neither"),
    "text": (b"please describe my secret picture " * 100, "neither"),
    "short_word": (b"secret", "neither"),
    "svg": (SVG, "SVG"),
    "svg_with_declaration": (b'<?xml version="1.0"?>\n' + SVG, "SVG"),
    "svg_base64": (base64.b64encode(SVG), "SVG"),
    "svg_data_url": (b"data:image/svg+xml;base64," + base64.b64encode(SVG), "SVG"),
    "svg_plain_data_url": (b"data:image/svg+xml;utf8," + SVG, "not base64"),
    "html": (b"<!DOCTYPE html><html>secret</html>", "HTML"),
    "heic": (HEIC, "HEIC"),
    "heic_base64": (base64.b64encode(HEIC), "HEIC"),
    "heic_data_url": (b"data:image/heic;base64," + base64.b64encode(HEIC), "HEIC"),
    "heic_as_jpeg": (b"data:image/jpeg;base64," + base64.b64encode(HEIC), "HEIC"),
    "address": (b"https://example.com/secret.png", "addresses are not fetched"),
    "data_url_without_comma": (b"data:image/png;base64" + b"A" * 5000, "comma"),
    "data_url_not_base64": (b"data:image/png,%89PNG", "not base64"),
    "data_url_empty": (b"data:image/png;base64,", "neither"),
    "sound_in_riff": (b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(100), "neither"),
    "bad_digit": (TEXT[:200] + b"!" + TEXT[200:], "damaged"),
    "padding_inside": (TEXT[:200] + b"=" + TEXT[200:], "damaged"),
    "impossible_length": (TEXT.rstrip(b"=") + b"A" * (1 + -len(TEXT.rstrip(b"=")) % 4), "damaged"),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a7_every_wrapping_gives_the_same_file_and_tensor(wrapping: str) -> None:
    data = image_bytes(WRAPPINGS[wrapping], 0)
    assert data == PNG
    patches = image_to_patches(decode_image(data, 0, KIMI_K25), 0, KIMI_K25)
    assert patches.digest == image_to_patches(noise(40, 30), 0, KIMI_K25).digest


@pytest.mark.parametrize("kind", REFUSALS)
def test_a7_everything_else_is_refused_by_image_and_without_an_echo(kind: str) -> None:
    element, reason = REFUSALS[kind]
    with pytest.raises(InvalidRequest, match=rf"^image 2: .*{reason}") as caught:
        image_bytes(element, 2)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "beginning", [b"x", b"<svg ", b"\x00\x00\x00\x18ftypheic", b"data:text/plain;base64,AAAA", b"iVBO"]
)
def test_a7_a_large_payload_is_refused_within_milliseconds(beginning: bytes) -> None:
    element = beginning + b"A" * 50_000_000
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        image_bytes(element, 0)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize("wrapping", ["raw", "base64", "line_breaks", "data_url"])
def test_files_above_the_byte_limit_are_refused_with_both_numbers(wrapping: str) -> None:
    assert image_bytes(WRAPPINGS[wrapping], 0, len(PNG)) == PNG
    with pytest.raises(InvalidRequest, match=rf"^image 4: .* {len(PNG)} bytes, at most {len(PNG) - 1}"):
        image_bytes(WRAPPINGS[wrapping], 4, len(PNG) - 1)


def test_base64_far_above_the_byte_limit_is_not_decoded_first() -> None:
    element = TEXT[:64] + b"!" * 3000  # decoding would complain about its digits
    with pytest.raises(InvalidRequest, match="at most 1000"):
        image_bytes(element, 0, 1000)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_accepted_format_is_recognised_raw_and_as_base64(file_format: str) -> None:
    data = encode(noise(20, 20), file_format)
    assert image_bytes(data, 0) == data
    assert image_bytes(base64.b64encode(data), 0) == data


@given(
    tail=st.binary(max_size=200),
    width=st.integers(1, 100),
    padded=st.booleans(),
    url_safe=st.booleans(),
)
def test_base64_text_round_trips_whatever_its_line_length(
    tail: bytes, width: int, padded: bool, url_safe: bool
) -> None:
    data = PNG[:16] + tail
    text = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data)
    text = text if padded else text.rstrip(b"=")
    element = b"\n".join(text[start : start + width] for start in range(0, len(text), width))
    assert image_bytes(element, 0) == data


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_returned_or_refused(element: bytes) -> None:
    try:
        assert sniff_format(image_bytes(element, 0))
    except InvalidRequest:
        assert sniff_format(element) is None
