# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to a VisionModel: two renamed layers, pixel normalisation folded in, one dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.config import VisionConfig
from kimi_triton.errors import ConfigError
from kimi_triton.vision.attention import choose_attention
from kimi_triton.vision.moonvit import PIXEL_CENTRE, VisionModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HALF = (0.5, 0.5, 0.5)
PROJ_WEIGHT, PROJ_BIAS = "vision_tower.patch_embed.proj.weight", "vision_tower.patch_embed.proj.bias"
K25_PROJECTOR_NAMES = {"proj.0": "linear_1", "proj.2": "linear_2"}


def vision_dtype(name: str) -> torch.dtype:
    """bfloat16 or float32. Raises ConfigError for others: bf16-trained activations do not fit into float16."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, the vision encoder runs in {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_vision_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    image_mean: Sequence[float] = HALF,
    image_std: Sequence[float] = HALF,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> VisionModel:
    """Read tower and projector on to `device`. Raises ConfigError; tensors were accounted for by Checkpoint."""
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype}, the vision encoder runs in {' or '.join(DTYPES)}")
    config = checkpoint.config.vision
    names = checkpoint.names("vision_tower.", f"{config.projector_prefix}.")

    def read() -> Iterator[tuple[str, Tensor]]:
        for done, (name, tensor) in enumerate(checkpoint.read(names, str(device)), start=1):
            yield name, tensor
            on_progress(done, len(names))

    with torch.device("meta"):
        model = VisionModel(config, choose_attention(device, dtype))
    model.load_state_dict(model_state(config, read(), dtype, image_mean, image_std), assign=True)
    return model.requires_grad_(False)


def model_state(
    config: VisionConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    image_mean: Sequence[float] = HALF,
    image_std: Sequence[float] = HALF,
) -> dict[str, Tensor]:
    """Tensors under their checkpoint names -> the state_dict of a VisionModel that reads raw pixels."""
    unfolded: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in (PROJ_WEIGHT, PROJ_BIAS):
            unfolded[name] = tensor
        else:
            state[_model_name(name, config)] = tensor.to(dtype)
    weight, bias = fold_normalisation(unfolded[PROJ_WEIGHT], unfolded[PROJ_BIAS], image_mean, image_std)
    return state | {PROJ_WEIGHT: weight, PROJ_BIAS: bias}


def fold_normalisation(
    weight: Tensor, bias: Tensor, image_mean: Sequence[float], image_std: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Weights for x - 128, x in 0..255, that give what `weight` gives for (x / 255 - mean) / std; float32.

    (hidden_size, 3, 14, 14), (hidden_size,) -> (hidden_size, 588), (hidden_size,). Around 128 the rest that goes into
    the bias is small; around 0 it would be a difference of large numbers.
    """
    channel = (1, 3, 1, 1)
    mean = torch.tensor(image_mean, dtype=torch.float64, device=weight.device).view(channel)
    std = torch.tensor(image_std, dtype=torch.float64, device=weight.device).view(channel)
    centre = (PIXEL_CENTRE / 255 - mean) / std  # what pixel value 128 becomes
    exact = weight.double()
    folded_bias = bias.double() + (exact * centre).sum((1, 2, 3))
    folded_weight = exact / (255 * std)
    return folded_weight.flatten(1).float(), folded_bias.float()


def _model_name(name: str, config: VisionConfig) -> str:
    prefix, _, rest = name.partition(".")
    if prefix != config.projector_prefix:
        return name
    layer, _, kind = rest.rpartition(".")
    return f"projector.{K25_PROJECTOR_NAMES.get(layer, layer)}.{kind}"
