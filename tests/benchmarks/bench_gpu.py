# SPDX-License-Identifier: Apache-2.0
"""`make bench-gpu`: the full-size vision tower in bf16 on one GPU, against transformers' with sdpa and flash attention.

Patches per second and share of the measured matrix-product peak, eager and with CUDA graphs; from JPEG files to the
first embedding for 1 and 16 images; GPU memory. Ends with code 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from kimi_triton.preprocess.pipeline import Preprocessor, PreprocessRequest
from kimi_triton.vision.encoder import MAX_PATCHES_PER_FORWARD, LocalEncoder
from kimi_triton.vision.gpu import speed_up
from kimi_triton.vision.graphs import GraphedEncoder
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.local import load_from_folder
from kimi_triton.vision.moonvit import VisionModel
from tests.benchmarks.bench_encoder import tower_flops, transformers_tower
from tests.benchmarks.bench_preprocess import jpeg
from tests.benchmarks.full_size import SIZES, write_full_size_checkpoint
from tests.benchmarks.measure import Work, finish, interleaved, ratios, show, surroundings

NO_GPU = 2  # exit code
MIB = 2**20
WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is: as reported, or just large enough to run every line."""

    sizes: dict[str, int]
    work: list[list[Grid]]
    turns: int
    matrix_side: int  # of the product that the peak is measured with
    picture_side: int  # in pixels, of the pictures for the time to the first embedding


FULL = Scale(
    sizes=SIZES,
    work=[[(1, 32, 32)], [(1, 64, 64)], [(1, 16, 16)] * 4],
    turns=20,
    matrix_side=8192,
    picture_side=448,
)
SMOKE = Scale(
    sizes={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96},
    work=[[(1, 4, 4)], [(1, 8, 8)], [(1, 2, 2)] * 4],
    turns=2,
    matrix_side=64,
    picture_side=56,
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench_gpu")
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or will be written")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)  # a tiny tower on the CPU
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("bench-gpu needs a CUDA GPU, torch sees none", file=sys.stderr)
        raise SystemExit(NO_GPU)
    if options.smoke:
        bench(options.folder, torch.device("cpu"), SMOKE)
    else:
        bench(options.folder, torch.device("cuda:0"), FULL)


def bench(folder: Path, device: torch.device, scale: Scale) -> None:
    start = time.perf_counter()
    checkpoint = write_full_size_checkpoint(folder, scale.sizes)
    before = memory_mib(device)
    eager, graphed = (load_from_folder(checkpoint, device, "bfloat16", lambda _done, _total: None) for _ in range(2))
    weights_mib = (memory_mib(device) - before) / 2
    before = memory_mib(device)
    speed_up(graphed, max_patches=MAX_PATCHES_PER_FORWARD, use_graphs=True, use_compile=False)
    graphs_mib = memory_mib(device) - before
    ours = {"eager": eager}
    skipped = {}
    if isinstance(graphed.vision_tower.encoder, GraphedEncoder):
        ours["graphs"] = graphed
    else:
        skipped["graphs"] = "they need a GPU with a varlen attention kernel"
    peers = {"transformers_sdpa": transformers_tower("sdpa", scale.sizes).to(device)}
    if is_flash_attn_2_available():
        peers["transformers_flash"] = transformers_tower("flash_attention_2", scale.sizes).to(device)
    else:
        skipped["transformers_flash"] = "flash-attn is not installed or finds no GPU"
    for name, reason in skipped.items():
        print(f"{name} left out: {reason}", flush=True)

    peak = matrix_product_peak(device, scale.matrix_side)
    print(f"matrix-product peak {peak / 1e12:.3f} TFLOP/s", flush=True)
    encode = {name: tower_work(model, device) for name, model in ours.items()}
    encode |= {name: peer_work(tower, device) for name, tower in peers.items()}
    fastest = list(ours)[-1]
    patches_per_second, peak_fraction, working_mib = {}, {}, {}
    vs: dict[str, dict[str, float]] = {f"vs_{peer}": {} for peer in peers}
    for grids in scale.work:
        rows = sum(map(num_patches, grids))
        work = f"{len(grids)}x{num_patches(grids[0])}"
        contenders = {name: prepare(grids) for name, prepare in encode.items()}
        working_mib[work] = {name: round(peak_memory_mib(act, device)) for name, act in contenders.items()}
        seconds = interleaved(contenders, scale.turns)
        show(work, seconds)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        patches_per_second[work] = {name: round(rows / median) for name, median in medians.items()}
        flops = tower_flops(grids, scale.sizes)
        peak_fraction[work] = {name: round(flops / median / peak, 4) for name, median in medians.items()}
        for peer in peers:
            vs[f"vs_{peer}"][work] = round(ratios(seconds, peer, fastest), 3)
    finish(
        patches_per_second=patches_per_second,
        peak_fraction=peak_fraction,
        **vs,
        first_embedding_ms=first_embedding_ms(checkpoint, ours[fastest], device, scale),
        memory_mib={"weights": round(weights_mib), "graphs": round(graphs_mib), "working": working_mib},
        skipped=skipped,
        peak_tflops=round(peak / 1e12, 3),
        seconds=round(time.perf_counter() - start, 1),
        **surroundings(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            cuda=torch.version.cuda,
            dtype="bfloat16",
            threads=torch.get_num_threads(),
            fastest=fastest,
            **scale.sizes,
        ),
    )


def tower_work(model: VisionModel, device: torch.device) -> Callable[[list[Grid]], Work]:
    def prepared(grids: list[Grid]) -> Work:
        pixel_values = random_pixels(grids).to(device)
        return waiting(lambda: model.vision_tower(pixel_values, grids), device)

    return prepared


def peer_work(tower: nn.Module, device: torch.device) -> Callable[[list[Grid]], Work]:
    def prepared(grids: list[Grid]) -> Work:
        normalised = (random_pixels(grids).float() / 127.5 - 1).to(device, torch.bfloat16)
        grid_thw = torch.tensor(grids, device=device)
        return waiting(lambda: tower(normalised, grid_thw), device)

    return prepared


def random_pixels(grids: list[Grid]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(map(num_patches, grids)), 3, 14, 14)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def waiting(act: Work, device: torch.device) -> Work:
    """`act`, then wait for the device, after a few runs in which kernels are chosen and memory is taken."""

    def acted() -> None:
        with torch.inference_mode():
            act()
        wait_for(device)

    for _ in range(WARM_UPS):
        acted()
    return acted


def first_embedding_ms(checkpoint: Path, model: VisionModel, device: torch.device, scale: Scale) -> dict[str, float]:
    """From the bytes of 1 and 16 JPEG files in this process to the first image's rows in host memory."""
    preprocessor = Preprocessor.from_checkpoint(checkpoint)
    encoder = LocalEncoder(model, device)
    file = jpeg(scale.picture_side, scale.picture_side)

    def first(count: int) -> None:
        result = preprocessor.run(PreprocessRequest(images=[file] * count, want_prompt=False))
        grids: list[Grid] = [(t, h, w) for t, h, w in result.image_grid_thw.tolist()]
        images = torch.split(torch.from_numpy(result.pixel_values), [num_patches(grid) for grid in grids])
        rows = encoder.encode(images, grids)[0]
        assert isinstance(rows, Tensor)
        rows.cpu()

    seconds = interleaved({str(count): lambda c=count: first(c) for count in (1, 16)}, scale.turns)
    show("first embedding, by number of images", seconds)
    return {count: round(statistics.median(values) * 1e3, 2) for count, values in seconds.items()}


def matrix_product_peak(device: torch.device, side: int) -> float:
    """FLOP/s of the best of several large bf16 products."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = waiting(lambda: left @ right, device)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_mib(device: torch.device) -> float:
    """Memory of the GPU that torch has given out; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else 0.0


def peak_memory_mib(act: Work, device: torch.device) -> float:
    """The most that `act` takes beyond what was taken before; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    act()
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


if __name__ == "__main__":
    main(sys.argv[1:])
