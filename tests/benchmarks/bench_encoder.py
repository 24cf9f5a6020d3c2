# SPDX-License-Identifier: Apache-2.0
"""`make bench-encoder`: the full-size vision tower in bf16 against transformers' and vLLM's on the same cores."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Kimi_K25VisionConfig, Kimi_K25VisionModel

from kimi_triton.vision.cpu import pack_linears
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.local import load_from_folder
from tests.benchmarks.full_size import SIZES, write_full_size_checkpoint
from tests.benchmarks.measure import VLLM_PYTHON, Peer, finish, interleaved, ratios, show, surroundings

WORK: dict[str, tuple[list[Grid], int]] = {  # grids, turns
    "1x1024": ([(1, 32, 32)], 5),
    "4x256": ([(1, 16, 16)] * 4, 5),
    "1x4096": ([(1, 64, 64)], 3),
}


def main(folder: Path) -> None:
    checkpoint = write_full_size_checkpoint(folder)
    model = load_from_folder(checkpoint, torch.device("cpu"), "bfloat16", lambda _done, _total: None)
    pack_linears(model)  # as LocalEncoder does
    ours = model.vision_tower
    theirs = transformers_tower()
    vllm = Peer(VLLM_PYTHON, Path(__file__).with_name("vllm_peer.py"), "tower", str(checkpoint))
    peak = matrix_product_peak()
    print(f"matrix-product peak {peak / 1e9:.0f} GFLOP/s", flush=True)
    vs_transformers, vs_vllm, peak_fraction, median_s = {}, {}, {}, {}
    with torch.inference_mode():
        for name, (grids, turns) in WORK.items():
            rows = sum(map(num_patches, grids))
            pixel_values = torch.randint(0, 256, (rows, 3, 14, 14), dtype=torch.uint8)
            normalised = (pixel_values.float() / 127.5 - 1).bfloat16()
            seconds = interleaved(
                {
                    "kimi-triton": lambda p=pixel_values, g=grids: ours(p, g),
                    "transformers": lambda p=normalised, g=grids: theirs(p, torch.tensor(g)),
                    "vllm": lambda g=grids: vllm.ask(str([list(grid) for grid in g])),
                },
                turns,
            )
            show(name, seconds)
            vs_transformers[name] = round(ratios(seconds, "transformers", "kimi-triton"), 3)
            vs_vllm[name] = round(ratios(seconds, "vllm", "kimi-triton"), 3)
            median_s[name] = {who: round(statistics.median(values), 4) for who, values in seconds.items()}
            peak_fraction[name] = round(tower_flops(grids) / median_s[name]["kimi-triton"] / peak, 3)
    vllm.close()
    finish(
        vs_transformers=vs_transformers,
        vs_vllm=vs_vllm,
        peak_fraction=peak_fraction,
        median_s=median_s,
        peak_gflops=round(peak / 1e9),
        **surroundings(dtype="bfloat16", threads=torch.get_num_threads(), vllm=vllm.about, layers=27, width=1152),
    )


def transformers_tower(attention: str = "sdpa", sizes: Mapping[str, int] = SIZES) -> Kimi_K25VisionModel:
    """In bf16 with seeded weights of the same scale, on the CPU."""
    torch.manual_seed(0)
    config = Kimi_K25VisionConfig(**sizes)
    config._attn_implementation = attention
    tower = Kimi_K25VisionModel(config).to(torch.bfloat16).eval()
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return tower.requires_grad_(False)


def tower_flops(grids: list[Grid], sizes: Mapping[str, int] = SIZES) -> float:
    """Multiplications and additions of all matrix products of the tower."""
    width, mlp, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    linear = 2 * width * (4 * width + 2 * mlp)
    per_image = (num_patches(grid) * linear + 4 * num_patches(grid) ** 2 * width for grid in grids)
    embedding = 2 * 588 * width * sum(map(num_patches, grids))
    return layers * sum(per_image) + embedding


def matrix_product_peak() -> float:
    """FLOP/s of the best of several large bf16 products with packed weights, the most that the tower could reach."""
    rows, inner, columns = 4096, 1152, 4304
    left = torch.randn(rows, inner, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(columns, inner, dtype=torch.bfloat16), rows)

    def product() -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")
        return result

    product()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best


if __name__ == "__main__":
    main(Path(sys.argv[1]))
