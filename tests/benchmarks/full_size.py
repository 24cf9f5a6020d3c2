# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose vision tower has the released size (27 layers, width 1152) and whose language model is tiny."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kimi_triton.config import CheckpointConfig
from kimi_triton.demo.tiny import k25_vision_config, random_weights, save_sharded, write_tiny_checkpoint

SIZES = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
TABLE_SIDE = 64


def write_full_size_checkpoint(folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """About 0.9 GB of seeded bf16 weights in K2.5's layout. A folder that has one already is left as it is."""
    done = folder / "complete"
    if done.exists():
        return folder
    write_tiny_checkpoint(folder, "kimi_k25", num_shards=1)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    config = json.loads((folder / "config.json").read_text())
    text_hidden_size = config["text_config"]["hidden_size"]
    config["vision_config"] = k25_vision_config(sizes, TABLE_SIDE, text_hidden_size)
    config["projection_hidden_size"] = sizes["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_sharded(folder, random_weights(CheckpointConfig.from_checkpoint(folder), seed=0), num_shards=4)
    done.touch()
    return folder


if __name__ == "__main__":
    write_full_size_checkpoint(Path(sys.argv[1]))
