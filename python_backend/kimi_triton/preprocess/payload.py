# SPDX-License-Identifier: Apache-2.0
"""From one element of the `image` input to the bytes of an encoded picture.

An element is a file as it is on disk, its base64 text (standard or URL-safe alphabet, with or without padding and line
breaks), or a data URL holding such text. What the bytes are is read from the bytes; the label of a data URL is ignored.
"""

from __future__ import annotations

import base64
import binascii
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from kimi_triton.errors import InvalidRequest
from kimi_triton.preprocess.settings import MAX_IMAGE_BYTES

# None of these is also the beginning of the base64 text of any of them, so looking for a file first is safe.
MAGIC: dict[str, tuple[bytes, ...]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "WEBP": (b"RIFF",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
}
ACCEPTED = "JPEG, PNG, WEBP, GIF, BMP or TIFF"
HEAD = 64  # bytes that are enough to tell what a file is
WHITESPACE = b" \t\r\n\f\v"
TO_STANDARD = bytes.maketrans(b"-_", b"+/")


def sniff_format(data: bytes) -> str | None:
    """Name of the accepted image format that `data` begins like, or None."""
    for name, beginnings in MAGIC.items():
        if data.startswith(beginnings):
            return name if name != "WEBP" or data[8:12] == b"WEBP" else None
    return None


def image_bytes(element: bytes, index: int, max_image_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """The encoded file inside `element`, image number `index` of its request.

    Raises InvalidRequest when there is no file of an accepted format in it, or one above `max_image_bytes`. Only the
    beginning is looked at before a refusal, and no message repeats what was sent.
    """
    if sniff_format(element) is None:
        element = _from_text(element, index, max_image_bytes)
    _check_size(len(element), index, max_image_bytes)
    return element


def _from_text(element: bytes, index: int, max_image_bytes: int) -> bytes:
    text = element.lstrip(WHITESPACE)
    if not text:
        raise InvalidRequest(f"image {index}: is empty, expected a {ACCEPTED} file")
    if text[:5].lower() == b"data:":
        text = _data_url_body(text, index)
    if sniff_format(_decode_base64_head(text)) is None:
        _refuse(text, index)
    _check_size(len(text) * 3 // 5, index, max_image_bytes)  # 3/4 less what line breaks may take
    try:
        return _decode_base64(text)
    except binascii.Error:
        raise InvalidRequest(f"image {index}: its base64 text is damaged") from None


def _data_url_body(text: bytes, index: int) -> bytes:
    comma = text.find(b",", 0, 1024)
    if comma < 0:
        raise InvalidRequest(f"image {index}: a data URL without a comma after its label")
    if not text[:comma].rstrip().lower().endswith(b";base64"):
        raise InvalidRequest(f"image {index}: a data URL that is not base64; send data:image/...;base64,...")
    body = text[comma + 1 :]
    return unquote_to_bytes(body) if b"%" in body else body


def _decode_base64_head(text: bytes) -> bytes:
    head = text[: 4 * HEAD].translate(TO_STANDARD, WHITESPACE)[:HEAD]
    try:
        return base64.b64decode(head[: len(head) // 4 * 4], validate=True)
    except binascii.Error:
        return b""


def _decode_base64(text: bytes) -> bytes:
    digits = text.translate(TO_STANDARD, WHITESPACE).rstrip(b"=")
    return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)


def _check_size(num_bytes: int, index: int, max_image_bytes: int) -> None:
    if num_bytes > max_image_bytes:
        raise InvalidRequest(f"image {index}: its file has {num_bytes} bytes, at most {max_image_bytes} are accepted")


def _refuse(text: bytes, index: int) -> NoReturn:
    """Say what was sent, if it is one of the usual mistakes."""
    for head in (text[:HEAD], _decode_base64_head(text)):
        if head[4:8] == b"ftyp":
            raise InvalidRequest(f"image {index}: HEIC and AVIF are not accepted, send {ACCEPTED}")
        if head.lstrip()[:4] in (b"<svg", b"<?xm", b"<!DO"):
            raise InvalidRequest(f"image {index}: SVG and HTML are not accepted, send {ACCEPTED}")
    if text[:7].lower() == b"http://" or text[:8].lower() == b"https://":
        raise InvalidRequest(f"image {index}: addresses are not fetched, send the file itself")
    raise InvalidRequest(f"image {index}: neither a {ACCEPTED} file nor its base64 text nor a data URL of it")
