# SPDX-License-Identifier: Apache-2.0
"""One request, from what a client sent to the tensors of the next steps. Needs no torch.

Cheap refusals come first: options, messages and counts before any picture is decoded, and everything before the
vision tower sees the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kimi_triton.config import PATCH_SIZE, CheckpointConfig
from kimi_triton.errors import ConfigError, InvalidRequest
from kimi_triton.preprocess.fetch import ImageFetcher, UrlRules, is_url
from kimi_triton.preprocess.images import decode_image, keep_decode_memory
from kimi_triton.preprocess.patches import ImagePatches, image_to_patches, num_image_tokens
from kimi_triton.preprocess.payload import image_bytes
from kimi_triton.preprocess.settings import MAX_IMAGE_BYTES, MAX_PIXELS, ImageSettings
from kimi_triton.text.messages import Message, image_parts, parse_messages, user_message
from kimi_triton.text.options import GenerationOptions
from kimi_triton.text.prompt import build_prompt
from kimi_triton.text.tokenizer import KimiTokenizer

if TYPE_CHECKING:
    from kimi_triton.triton_io import StepOptions

MAX_IMAGES = 64
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessRequest:
    """Inputs and parameters as they arrived; with `want_prompt` off only the images are looked at."""

    text_input: bytes | None = None  # UTF-8
    messages: bytes | None = None
    images: Sequence[bytes] = ()
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)
    sampling_parameters: bytes | None = None
    want_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreprocessResult:
    """Tensors of the next steps; a request without images has zero rows of them."""

    pixel_values: npt.NDArray[np.uint8]  # (num_patches, 3, 14, 14)
    image_grid_thw: npt.NDArray[np.int64]  # (num_images, 3)
    image_digest: npt.NDArray[np.uint8]  # (num_images, 32)
    input_ids: npt.NDArray[np.int32] | None = None  # (num_tokens,)
    generation: bytes | None = None  # GenerationOptions.to_json


class Preprocessor:
    """Everything of a checkpoint that turns requests into tensors. Safe to share between threads."""

    def __init__(
        self,
        settings: ImageSettings,
        tokenizer: KimiTokenizer,
        defaults: GenerationOptions,
        *,
        max_images: int,
        max_context: int,
        num_threads: int,
        fetcher: ImageFetcher | None,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_images = max_images
        self.max_context = max_context
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="image")

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path,
        *,
        max_images: int = MAX_IMAGES,
        max_context: int | None = None,
        max_pixels: int = MAX_PIXELS,
        max_image_bytes: int = MAX_IMAGE_BYTES,
        num_threads: int = 4,
        url_rules: UrlRules | None = None,
    ) -> Preprocessor:
        """`max_context` in tokens, prompt and answer together; what the checkpoint allows unless given.

        Without `url_rules` no picture is fetched from the web.

        Raises ConfigError for a checkpoint that cannot be served and for limits beyond it.
        """
        keep_decode_memory()
        config = CheckpointConfig.from_checkpoint(folder)
        longest = config.max_position_embeddings
        if max_images < 1 or not 2 <= (max_context or longest) <= longest:
            raise ConfigError(
                f"max_images is {max_images}, expected 1 or more; max_context is {max_context}, expected 2 to {longest}"
            )
        return cls(
            ImageSettings.from_checkpoint(
                folder, config.family, max_pixels=max_pixels, max_image_bytes=max_image_bytes
            ),
            KimiTokenizer.from_checkpoint(folder, config),
            GenerationOptions.from_checkpoint(folder),
            max_images=max_images,
            max_context=max_context or longest,
            num_threads=num_threads,
            fetcher=None if url_rules is None else ImageFetcher(url_rules, max_image_bytes),
        )

    @classmethod
    def from_triton(cls, options: StepOptions) -> Preprocessor:
        """As the step's parameters say."""
        return cls.from_checkpoint(
            options.path("checkpoint"),
            max_images=options.integer("max_images", MAX_IMAGES),
            url_rules=UrlRules.parse(options.text("image_url_hosts", ""), bool(options.integer("image_url_http", 0))),
        )

    def run(self, request: PreprocessRequest) -> PreprocessResult:
        """Tensors of `request`.

        Raises InvalidRequest, naming the option, message or image (from 0, in the order of the prompt). The length of
        a prompt is known once its images are decoded: how a picture is turned can be written behind its pixels.
        """
        self._check_num_images(len(request.images))
        if not request.want_prompt:
            if not request.images:
                raise InvalidRequest("the image input holds no image")
            return _result(self._encode_images(request.images))
        options = GenerationOptions.from_request(request.parameters, request.sampling_parameters, self.defaults)
        messages = _messages(request)
        images = self._encode_images(self._take_images(messages, request.images))
        grids = [image.grid for image in images]
        input_ids = build_prompt(messages, grids, self.tokenizer, self.settings.family, options.thinking)
        room = self.max_context - len(input_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(input_ids)} tokens, {sum(map(num_image_tokens, grids))} of them for images; "
                f"at most {self.max_context - 1} fit, so that one is left for the answer"
            )
        options = replace(options, max_tokens=min(options.max_tokens, room))
        return replace(_result(images), input_ids=np.array(input_ids, np.int32), generation=options.to_json())

    def _take_images(self, messages: Sequence[Message], images: Sequence[bytes]) -> list[bytes]:
        """The picture of each image part: its URL, or the next element of the `image` input."""
        parts = image_parts(messages)
        self._check_num_images(len(parts))
        num_taken = sum(part.url is None for part in parts)
        if num_taken != len(images):
            raise InvalidRequest(f"messages take {num_taken} images from the image input, but it holds {len(images)}")
        elements = iter(images)
        return [next(elements) if part.url is None else part.url.encode() for part in parts]

    def _check_num_images(self, num_images: int) -> None:
        if num_images > self.max_images:
            raise InvalidRequest(f"the request has {num_images} images, the limit is {self.max_images}")

    def _encode_images(self, elements: Sequence[bytes]) -> list[ImagePatches]:
        if len(elements) < 2:
            return [self._encode_image(element, index) for index, element in enumerate(elements)]
        return list(self._threads.map(self._encode_image, elements, range(len(elements))))

    def _encode_image(self, element: bytes, index: int) -> ImagePatches:
        if self._fetcher is not None and is_url(element):
            element = self._fetcher.fetch(element, index)
        data = image_bytes(element, index, self.settings.max_image_bytes)
        image = decode_image(data, index, self.settings)
        return image_to_patches(image, index, self.settings)


def _messages(request: PreprocessRequest) -> list[Message]:
    if request.text_input is not None and request.messages is not None:
        raise InvalidRequest("text_input and messages are both given, expected one of them")
    if request.text_input is not None:
        return [user_message(_utf8(request.text_input), len(request.images))]
    if request.messages is None:
        raise InvalidRequest("text_input and messages are both missing, expected one of them")
    return parse_messages(request.messages)


def _utf8(text_input: bytes) -> str:
    try:
        return text_input.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"text_input is no UTF-8: byte {exc.start} is 0x{text_input[exc.start]:02x}") from None


def _result(images: list[ImagePatches]) -> PreprocessResult:
    """Uses up `images`: each one's patches are let go when they are copied, so there is never a second copy of all."""
    grids = np.array([image.grid for image in images], np.int64).reshape(-1, 3)
    digests = bytearray().join(image.digest for image in images)
    return PreprocessResult(
        pixel_values=images[0].pixel_values if len(images) == 1 else _concatenate(images),
        image_grid_thw=grids,
        image_digest=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
    )


def _concatenate(images: list[ImagePatches]) -> npt.NDArray[np.uint8]:
    end = sum(len(image.pixel_values) for image in images)
    pixel_values = np.empty((end, 3, PATCH_SIZE, PATCH_SIZE), np.uint8)
    while images:
        patches = images.pop().pixel_values
        pixel_values[end - len(patches) : end] = patches
        end -= len(patches)
    return pixel_values
