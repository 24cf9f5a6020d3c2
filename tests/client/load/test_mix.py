# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import io
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from kimi_client import InvalidRequest
from kimi_client.load.input_file import write_input_file
from kimi_client.load.mix import DrawnRequest, Mix, Size, draw_requests, make_jpeg, parse_sizes, parse_weighted
from kimi_client.tensors import unpack_bytes

SMALL = (Size(32, 24, 3.0), Size(48, 16, 1.0))


def test_a_seed_draws_the_same_requests_and_another_seed_others() -> None:
    mix = Mix(image_sizes=SMALL, images_per_request=((1, 1), (2, 1)), repeat_rate=0.3)
    assert draw_requests(mix, 20) == draw_requests(mix, 20)
    other = draw_requests(Mix(image_sizes=SMALL, seed=1), 20)
    assert not {i for r in other for i in r.images} & {i for r in draw_requests(mix, 20) for i in r.images}


def test_prompts_are_all_different_and_as_long_as_asked() -> None:
    requests = draw_requests(Mix(image_sizes=SMALL, prompt_words=((5, 1), (9, 1))), 50)
    assert len({request.prompt for request in requests}) == 50
    assert set(Counter(len(request.prompt.split()) for request in requests)) == {5, 9}


def test_weights_decide_sizes_and_counts() -> None:
    requests = draw_requests(Mix(image_sizes=SMALL, images_per_request=((0, 1), (1, 1), (3, 2))), 400)
    counts = Counter(len(request.images) for request in requests)
    assert all(abs(counts[number] / 400 - share) < 0.08 for number, share in ((0, 0.25), (1, 0.25), (3, 0.5)))
    sizes = Counter(Image.open(io.BytesIO(image)).size for request in requests for image in request.images)
    assert abs(sizes[32, 24] / sum(sizes.values()) - 0.75) < 0.05


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_the_repeat_rate_is_the_share_of_pictures_sent_before(rate: float) -> None:
    images = [i for r in draw_requests(Mix(image_sizes=SMALL, repeat_rate=rate), 400) for i in r.images]
    repeated = 1 - len(set(images)) / len(images)
    assert abs(repeated - rate) < 0.06


def test_pictures_are_as_large_as_photographs() -> None:
    assert 10_000 < len(make_jpeg(640, 480, 0)) < 200_000


def test_specifications_are_read() -> None:
    assert parse_sizes("640x480:3, 224x224") == (Size(640, 480, 3.0), Size(224, 224, 1.0))
    assert parse_weighted("0:1,2:0.5,3") == ((0, 1.0), (2, 0.5), (3, 1.0))


@pytest.mark.parametrize("text", ["", "640", "640x", "0x5", "axb", "640x480:", "640x480:x", "1x1:-1", "1x1:0"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1.5", "1:0"])
def test_wrong_numbers_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_weighted(text)


def test_wrong_mixes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"repeat rate must be between 0 and 1, got 1\.5"):
        Mix(repeat_rate=1.5)
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1, got 0"):
        Mix(max_tokens=0)


@pytest.mark.parametrize("size", [0, 63])
def test_i1_bytes_carry_their_length_and_their_shape(size: int, tmp_path: Path) -> None:
    requests = [DrawnRequest("7 what", (b"x" * size, b"\xff\x00")), DrawnRequest("8 only text", ())]
    write_input_file(tmp_path / "in.json", requests, stream=True, max_tokens=9)
    with_pictures, text_only = json.loads((tmp_path / "in.json").read_text())["data"]
    packed = base64.b64decode(with_pictures["image"]["content"]["b64"])
    assert len(packed) == 4 + size + 4 + 2
    assert unpack_bytes(packed) == [b"x" * size, b"\xff\x00"]
    assert with_pictures["image"]["shape"] == [2]
    assert with_pictures["text_input"] == ["7 what"]
    assert json.loads(with_pictures["sampling_parameters"][0]) == {"stream": True, "max_tokens": 9}
    assert "image" not in text_only
