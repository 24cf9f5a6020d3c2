# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.errors import ConfigError
from kimi_triton.vision.load import fold_normalisation, load_vision_model, model_state, vision_dtype
from kimi_triton.vision.moonvit import VisionModel

CPU = torch.device("cpu")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def folded(pixel_values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (pixel_values.flatten(1).float() - 128) @ weight.T + bias


@pytest.mark.parametrize(("mean", "std"), [((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), (CLIP_MEAN, CLIP_STD)])
def test_folded_weights_read_raw_pixels(
    mean: tuple[float, ...], std: tuple[float, ...], pixels: Callable[..., Tensor]
) -> None:
    weight, bias = torch.randn(5, 3, 14, 14), torch.randn(5)
    pixel_values = pixels([(1, 4, 4)])
    channel_mean, channel_std = (torch.tensor(value, dtype=torch.float64).view(3, 1, 1) for value in (mean, std))
    normalised = (pixel_values.double() / 255 - channel_mean) / channel_std
    expected = normalised.flatten(1) @ weight.double().flatten(1).T + bias
    result = folded(pixel_values, *fold_normalisation(weight, bias, mean, std))
    assert torch.allclose(result.double(), expected, atol=1e-4)


def test_padding_means_minus_one_and_white_plus_one() -> None:
    weight, bias = torch.randn(5, 3, 14, 14), torch.randn(5)
    weights = fold_normalisation(weight, bias, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for value, meaning in ((0, -1.0), (255, 1.0)):
        pixel_values = torch.full((1, 3, 14, 14), value, dtype=torch.uint8)
        expected = bias + meaning * weight.sum((1, 2, 3))
        assert torch.allclose(folded(pixel_values, *weights)[0], expected, atol=1e-4)


def test_bf16_patch_embedding_is_no_worse_than_the_unfolded_layer(
    k25_checkpoint: Checkpoint, pixels: Callable[..., Tensor]
) -> None:
    model = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)
    names = ["vision_tower.patch_embed.proj.weight", "vision_tower.patch_embed.proj.bias"]
    stored = dict(k25_checkpoint.read(names))
    weight, bias = stored[names[0]].flatten(1), stored[names[1]]
    grids = [(1, 16, 16)]
    pixel_values = pixels(grids)
    normalised = ((pixel_values / 255 - 0.5) / 0.5).flatten(1)
    positions = model.vision_tower.patch_embed.pos_emb(grids)
    exact = normalised.double() @ weight.double().T + bias.double() + positions
    unfolded = torch.nn.functional.linear(normalised.bfloat16(), weight, bias) + positions
    ours = model.vision_tower.patch_embed(pixel_values, grids)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean() < (unfolded - exact).square().mean()


@pytest.mark.parametrize("family", ["k25_checkpoint", "vl_checkpoint"])
def test_every_parameter_comes_from_the_checkpoint(family: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(family)
    model = load_vision_model(checkpoint, CPU, torch.float32)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    prefix = checkpoint.config.vision.projector_prefix
    last = "linear_2" if prefix == "multi_modal_projector" else "proj.2"
    stored = dict(checkpoint.read([f"{prefix}.{last}.weight", "vision_tower.encoder.blocks.1.mlp.fc1.weight"]))
    assert torch.equal(model.projector.linear_2.weight, stored[f"{prefix}.{last}.weight"].float())
    block = model.vision_tower.encoder.blocks[1]
    assert torch.equal(block.mlp.fc1.weight, stored["vision_tower.encoder.blocks.1.mlp.fc1.weight"].float())


def test_tower_parameters_keep_their_checkpoint_names(vl_checkpoint: Checkpoint, vl_model: VisionModel) -> None:
    assert {name for name in vl_model.state_dict() if name.startswith("vision_tower.")} == set(
        vl_checkpoint.names("vision_tower.")
    )


def test_loading_is_strict(k25_checkpoint: Checkpoint) -> None:
    config = k25_checkpoint.config.vision
    tensors = dict(k25_checkpoint.read(k25_checkpoint.names("vision_tower.", "mm_projector.")))
    del tensors["vision_tower.encoder.blocks.0.norm0.bias"]
    with pytest.raises(RuntimeError, match=r"vision_tower\.encoder\.blocks\.0\.norm0\.bias"):
        VisionModel(config).load_state_dict(model_state(config, tensors.items(), torch.float32))


def test_progress_counts_every_tensor(k25_checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    load_vision_model(k25_checkpoint, CPU, torch.float32, on_progress=lambda *counts: seen.append(counts))
    total = len(k25_checkpoint.names("vision_tower.", "mm_projector."))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_d1_float16_is_refused(k25_checkpoint: Checkpoint) -> None:
    assert vision_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype is 'float16', the vision encoder runs in bfloat16 or float32"):
        vision_dtype("float16")
    with pytest.raises(ConfigError, match=r"dtype is torch\.float16"):
        load_vision_model(k25_checkpoint, CPU, torch.float16)
