# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_triton.checkpoint import Checkpoint
from kimi_triton.vision.cpu import MLP_ROWS, BlockedMLP, PackedLinear, pack_linears
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.load import load_vision_model
from kimi_triton.vision.moonvit import VisionModel
from kimi_triton.workers.sharding import apply_tensor_parallel

CPU = torch.device("cpu")
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this CPU"
)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias).bfloat16().requires_grad_(False)


def in_double(layer: nn.Linear, rows: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(rows.double(), layer.weight.double(), bias)


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 24, 1500])
def test_a_packed_layer_equals_the_layer(bias: bool, num_rows: int) -> None:
    layer, rows = linear(72, 41, bias), torch.randn(num_rows, 72).bfloat16()
    packed = PackedLinear(layer)(rows)
    assert packed.dtype == torch.bfloat16
    assert torch.allclose(packed.double(), in_double(layer, rows), rtol=2**-8, atol=1e-5)


@needs_bf16
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_fused_gelu_is_as_good_as_a_separate_one(approximate: str) -> None:
    layer, rows = linear(72, 40), 4 * torch.randn(500, 72).bfloat16()
    gelu = nn.GELU(approximate)
    exact = F.gelu(in_double(layer, rows), approximate=approximate)
    fused, separate = PackedLinear(layer, gelu)(rows), gelu(layer(rows))
    assert (fused - exact).square().mean() <= (separate - exact).square().mean()


@needs_bf16
@pytest.mark.parametrize(("approximate", "value"), [("tanh", -0.003637), ("none", -0.004050)])
def test_tanh_and_exact_gelu_are_told_apart(approximate: str, value: float) -> None:
    layer = nn.Linear(32, 32, bias=False).bfloat16().requires_grad_(False)
    nn.init.eye_(layer.weight)
    rows = torch.full((40, 32), -3.0).bfloat16()  # where the two differ by a tenth of their value
    assert torch.allclose(PackedLinear(layer, nn.GELU(approximate))(rows).float(), torch.tensor(value), rtol=0.01)


@pytest.mark.parametrize("num_rows", [1, MLP_ROWS, 2 * MLP_ROWS + 5])
def test_blocks_of_rows_change_nothing(num_rows: int) -> None:
    rows = torch.randn(num_rows, 8)
    assert torch.equal(BlockedMLP(nn.GELU())(rows), F.gelu(rows))


@needs_bf16
@pytest.mark.parametrize("grids", [[(1, 36, 46), (1, 2, 2)], [(4, 8, 8)]])
def test_bf16_error_of_a_packed_model_is_no_larger_than_that_of_transformers_eager_path(
    grids: list[Grid],
    k25_checkpoint: Checkpoint,
    reference: Callable[..., nn.Module],
    reference_embeds: Callable[..., Tensor],
    pixels: Callable[..., Tensor],
) -> None:
    pixel_values = pixels(grids)
    exact = reference_embeds(reference(torch.float32, "eager"), pixel_values, grids)
    eager = reference_embeds(reference(torch.bfloat16, "eager"), pixel_values, grids)
    model = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)
    pack_linears(model)
    ours = model(pixel_values, grids)
    assert (ours - exact).square().mean() <= (eager - exact).square().mean()


@needs_bf16
def test_every_bf16_layer_is_packed_and_its_weight_freed(k25_checkpoint: Checkpoint) -> None:
    model = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)
    pack_linears(model)
    left = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert left == {"vision_tower.patch_embed.proj"}  # stays in fp32
    packed = sum(isinstance(module, PackedLinear) for module in model.modules())
    assert packed == 4 * model.config.num_hidden_layers + 2
    assert not [name for name, _ in model.named_parameters() if "wqkv" in name or "fc" in name or "linear" in name]


@needs_bf16
def test_shards_are_packed_but_meet_once_for_a_whole_pack(
    k25_checkpoint: Checkpoint, pixels: Callable[..., Tensor]
) -> None:
    grids: list[Grid] = [(1, 40, 40)]  # more rows than a block of BlockedMLP
    model = load_vision_model(k25_checkpoint, CPU, torch.bfloat16)
    summed: list[Tensor] = []
    apply_tensor_parallel(model, 0, 2, summed.append)
    pack_linears(model)
    model(pixels(grids), grids)
    assert [len(rows) for rows in summed] == [1600] * 2 * model.config.num_hidden_layers
    assert isinstance(model.vision_tower.encoder.blocks[0].mlp.fc1.product, PackedLinear)


def test_fp32_models_are_left_alone(k25_model: VisionModel) -> None:
    before = [type(module) for module in k25_model.modules()]
    pack_linears(k25_model)
    assert [type(module) for module in k25_model.modules()] == before
