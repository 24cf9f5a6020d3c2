# SPDX-License-Identifier: Apache-2.0
"""MoonViT, the vision encoder of Kimi-VL and Kimi-K2.5, and the projector behind it.

One plain PyTorch model for both: Kimi-VL is K2.5 with one frame. Parameters keep their checkpoint names. Images are
packed into one sequence without padding. Layers take the number of heads from the weights they find, so linear layers
can be replaced by shards from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kimi_triton.config import VisionConfig
from kimi_triton.vision.attention import Attention, Sequences, sdpa_attention
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.merger import Projector, merge_patches
from kimi_triton.vision.positions import PositionEmbedding
from kimi_triton.vision.rope import RotaryEmbedding, rotate_

LAYER_NORM_EPS = 1e-5
PIXEL_CENTRE = 128  # pixels enter as x - 128


class PatchEmbed(nn.Module):
    """Pixels to hidden states, plus absolute positions. `proj` holds the weights that `fold_normalisation` makes.

    `proj` stays in fp32 in a bf16 model: folded weights are no longer bf16 numbers, and rounding them again would add
    more error than all the roundings of the unfolded layer. It is a six-hundredth of the tower's arithmetic.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.pos_emb = PositionEmbedding(config.pos_emb_height, config.pos_emb_width, config.hidden_size)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_patches, 3, 14, 14) uint8 -> (num_patches, hidden_size)."""
        centred = pixel_values.flatten(1).to(self.proj.weight.dtype).sub_(PIXEL_CENTRE)
        positions: Tensor = self.pos_emb(grids)
        hidden_states: Tensor = self.proj(centred) + positions
        return hidden_states.to(positions.dtype)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(hidden_size, intermediate_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc1 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        projected: Tensor = self.fc1(self.act(self.fc0(hidden_states)))
        return projected


class EncoderBlock(nn.Module):
    def __init__(self, config: VisionConfig, attention: Attention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention = attention
        self.norm0 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: Tensor, freqs_cis: Tensor, sequences: Sequences) -> Tensor:
        """Adds to `hidden_states` (num_patches, hidden_size) in place and returns it."""
        hidden_states += self.attend(self.norm0(hidden_states), freqs_cis, sequences)
        hidden_states += self.mlp(self.norm1(hidden_states))
        return hidden_states

    def attend(self, hidden_states: Tensor, freqs_cis: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim))  # (num_patches, 3, num_heads, head_dim)
        rotate_(qkv[:, :2], freqs_cis)
        query, key, value = qkv.unbind(1)
        attended = self.attention(query, key, value, sequences)
        projected: Tensor = self.wo(attended.flatten(1))
        return projected


class Encoder(nn.Module):
    def __init__(self, config: VisionConfig, attention: Attention) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(config.head_dim)
        self.blocks = nn.ModuleList(EncoderBlock(config, attention) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)

    def forward(self, hidden_states: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_patches, hidden_size) -> (num_patches, hidden_size). Overwrites its input."""
        sequences = Sequences.from_grids(grids, hidden_states.device)
        return self.layers(hidden_states, self.rope.freqs_cis(grids, hidden_states.device), sequences)

    def layers(self, hidden_states: Tensor, freqs_cis: Tensor, sequences: Sequences) -> Tensor:
        """The part that is the same for every pack of a size. Overwrites `hidden_states`."""
        for block in self.blocks:
            hidden_states = block(hidden_states, freqs_cis, sequences)
        normalised: Tensor = self.final_layernorm(hidden_states)
        return normalised


class MoonViT(nn.Module):
    def __init__(self, config: VisionConfig, attention: Attention = sdpa_attention) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config, attention)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_patches, 3, 14, 14) uint8 -> (num_image_tokens, 4, hidden_size)."""
        hidden_states = self.encoder(self.patch_embed(pixel_values, grids), grids)
        return merge_patches(hidden_states, grids)


class VisionModel(nn.Module):
    """Pixels of several images -> their rows for the language model."""

    def __init__(self, config: VisionConfig, attention: Attention = sdpa_attention) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = MoonViT(config, attention)
        self.projector = Projector(config)
        self.eval().requires_grad_(False)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_patches, 3, 14, 14) uint8, one grid for each image -> (num_image_tokens, text_hidden_size)."""
        image_embeds: Tensor = self.projector(self.vision_tower(pixel_values, grids))
        return image_embeds
