# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's config.json says, read once and checked.

Kimi-K2.5 spells the sizes of its vision tower `vt_hidden_size`, Kimi-VL and transformers' own layout `hidden_size`.
Both spellings are read; two that disagree are refused, and so is every value this project does not implement.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kimi_triton.errors import ConfigError

Family = Literal["kimi_vl", "kimi_k25"]
FAMILIES: tuple[Family, ...] = ("kimi_vl", "kimi_k25")
MERGE_KERNEL_SIZE = (2, 2)
PATCH_SIZE = 14

# Values of the released checkpoints that change the computation. Anything else is another model.
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "patch_size": (PATCH_SIZE,),
    "merge_type": ("sd2_tpool",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "mm_projector_type": ("patchmerger",),
    "projector_hidden_act": ("gelu",),
    "hidden_act": ("gelu_pytorch_tanh",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes of MoonViT and of the projector behind it."""

    family: Family
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int  # longest chunk in frames; 1 for Kimi-VL, which has no video
    text_hidden_size: int
    projector_ln_eps: float = 1e-5
    patch_size: int = PATCH_SIZE
    merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"vision hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads"
            )
        if self.head_dim % 4:
            raise ConfigError(f"vision head size is {self.head_dim}, 2-D rotary embedding needs a multiple of 4")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def projector_prefix(self) -> str:
        return "multi_modal_projector" if self.family == "kimi_vl" else "mm_projector"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The whole config.json. `text` is the raw text_config of the DeepSeek-V3 language model."""

    family: Family
    vision: VisionConfig
    text: dict[str, Any]
    media_placeholder_token_id: int
    eos_token_ids: frozenset[int]
    dtype: str
    quantization: dict[str, Any] | None

    @property
    def max_position_embeddings(self) -> int:
        return int(self.text["max_position_embeddings"])

    @property
    def text_hidden_size(self) -> int:
        return self.vision.text_hidden_size

    @classmethod
    def from_checkpoint(cls, folder: Path) -> CheckpointConfig:
        """Read `folder`/config.json. Raises ConfigError, naming the file and the field."""
        raw = read_json(folder / "config.json")
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"config.json: model_type is {family!r}, expected one of {', '.join(FAMILIES)}")
        text, vision = _section(raw, "text_config"), _section(raw, "vision_config")
        text_model = text.get("model_type", "deepseek_v3")
        if text_model not in ("deepseek_v3", "kimi_k2"):
            raise ConfigError(f"config.json: text_config.model_type is {text_model!r}, expected deepseek_v3 or kimi_k2")
        media_id = _agreed("config.json", raw, "media_placeholder_token_id", "image_token_id")
        return cls(
            family=cast(Family, family),
            vision=_vision_config(cast(Family, family), vision, raw, text),
            text=text,
            media_placeholder_token_id=_integer("config.json", "media_placeholder_token_id", media_id),
            eos_token_ids=_token_ids(raw.get("eos_token_id")) | _token_ids(text.get("eos_token_id")),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or text.get("torch_dtype") or "bfloat16"),
            quantization=_quantization(raw, text),
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises ConfigError when it is missing or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing in checkpoint folder {path.parent}") from None
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _vision_config(family: Family, vision: dict[str, Any], raw: dict[str, Any], text: dict[str, Any]) -> VisionConfig:
    where = "config.json: vision_config"

    def size(*names: str) -> int:
        value = _agreed(where, vision, *names)
        return _integer(where, names[0], value)

    for name, allowed in IMPLEMENTED.items():
        if name in vision and vision[name] not in allowed:
            raise ConfigError(f"{where}.{name} is {vision[name]!r}, only {allowed[0]!r} is implemented")
    kernel = vision.get("merge_kernel_size", MERGE_KERNEL_SIZE)
    kernel = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
    if kernel != MERGE_KERNEL_SIZE:
        raise ConfigError(f"{where}.merge_kernel_size is {list(kernel)}, only [2, 2] is implemented")

    hidden_size = size("vt_hidden_size", "hidden_size")
    for name, holder in (("mm_hidden_size", vision), ("projection_hidden_size", raw)):
        if holder.get(name, hidden_size) != hidden_size:
            raise ConfigError(f"config.json: {name} is {holder[name]}, but the vision tower is {hidden_size} wide")
    text_hidden_size = _integer("config.json: text_config", "hidden_size", text.get("hidden_size"))
    if vision.get("text_hidden_size", text_hidden_size) != text_hidden_size:
        raise ConfigError(
            f"{where}.text_hidden_size is {vision['text_hidden_size']}, "
            f"but text_config.hidden_size is {text_hidden_size}"
        )
    eps = vision.get("projector_ln_eps", raw.get("projection_layer_norm_eps", 1e-5))
    return VisionConfig(
        family=family,
        hidden_size=hidden_size,
        num_hidden_layers=size("vt_num_hidden_layers", "num_hidden_layers"),
        num_attention_heads=size("vt_num_attention_heads", "num_attention_heads"),
        intermediate_size=size("vt_intermediate_size", "intermediate_size"),
        pos_emb_height=size("init_pos_emb_height", "pos_emb_height"),
        pos_emb_width=size("init_pos_emb_width", "pos_emb_width"),
        pos_emb_time=size("init_pos_emb_time", "pos_emb_time") if family == "kimi_k25" else 1,
        text_hidden_size=text_hidden_size,
        projector_ln_eps=float(eps),
    )


def _quantization(raw: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """K2.5 writes the same quantization_config at the top and inside text_config."""
    top, nested = raw.get("quantization_config"), text.get("quantization_config")
    if top and nested and top != nested:
        differing = sorted(key for key in top.keys() | nested.keys() if top.get(key) != nested.get(key))
        raise ConfigError(
            f"config.json: quantization_config and text_config.quantization_config differ in {', '.join(differing)}"
        )
    found = top or nested
    return dict(found) if found else None


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {name} is missing or is no object")
    return value


def _agreed(where: str, holder: dict[str, Any], *names: str) -> Any:
    """The value that is stored under one or several of `names`; all that are there must agree."""
    found = {name: holder[name] for name in names if holder.get(name) is not None}
    if not found:
        raise ConfigError(f"{where}: {' or '.join(names)} is missing")
    if len(set(map(repr, found.values()))) > 1:
        stated = " and ".join(f"{name} = {value}" for name, value in found.items())
        raise ConfigError(f"{where} contradicts itself: {stated}")
    return next(iter(found.values()))


def _integer(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}.{name} is {value!r}, expected a positive integer")
    return value


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
