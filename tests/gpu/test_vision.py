# SPDX-License-Identifier: Apache-2.0
"""The vision tower on a GPU. `make test-gpu` prints what each test measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_triton.vision.attention import Sequences, sdpa_attention
from kimi_triton.vision.encoder import LocalEncoder
from kimi_triton.vision.gpu import speed_up
from kimi_triton.vision.graphs import MAX_IMAGES, SIZES
from kimi_triton.vision.grids import Grid, num_patches
from kimi_triton.vision.local import load_from_folder
from kimi_triton.vision.moonvit import VisionModel

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
SIXTEEN_SMALL: list[Grid] = [(1, 16, 16)] * 16
MIXED: list[Grid] = [(1, 2, 2), (1, 36, 46), (4, 8, 6), (1, 60, 50), (1, 16, 16), (2, 2, 10)]
BIG_SMALL_BIG: list[list[Grid]] = [[(1, 60, 50)], [(1, 2, 2)], [(1, 64, 60)]]

# Workers on one GPU; the parent computes nothing there. Prints the pids that nvidia-smi counts.
CONTEXTS = """
import subprocess, sys
from dataclasses import replace
from pathlib import Path
from tests.workers.conftest import pids, random_images, started_pool, vision_options
options = replace(vision_options(Path(sys.argv[1]), "data", 2), devices=("0", "0"), dtype="bfloat16")
def contexts():
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
before = contexts()
with started_pool(options) as pool:
    pool.encode(random_images([(1, 4, 4)] * 4), [(1, 4, 4)] * 4)
    print(contexts() - before)
"""


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Write past pytest's capture."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {text}")

    return write


def loaded(folder: Path, dtype: str = "bfloat16") -> VisionModel:
    return load_from_folder(folder, CUDA, dtype, lambda _done, _total: None)


def pixels(grids: list[Grid], device: torch.device = CUDA) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(map(num_patches, grids)), 3, 14, 14)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)


def run(model: VisionModel, grids: list[Grid]) -> Tensor:
    with torch.inference_mode():
        return model(pixels(grids), grids).float().cpu()


def seconds_of(act: Callable[[], object], repeats: int = 20) -> float:
    """The median of repeated runs, each waited for."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[repeats // 2]


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_fp32_on_the_gpu_equals_fp32_on_the_cpu(tiny_k25: Path, report: Callable[[str], None]) -> None:
    on_cpu = load_from_folder(tiny_k25, torch.device("cpu"), "float32", lambda _done, _total: None)
    with torch.inference_mode():
        expected = on_cpu(pixels(MIXED, torch.device("cpu")), MIXED)
    difference = worst(run(loaded(tiny_k25, "float32"), MIXED), expected)
    report(f"largest difference of fp32 from the CPU: {difference:.1e} of the largest value")
    assert difference < 1e-3


def test_the_varlen_kernel_equals_sdpa_of_each_image(report: Callable[[str], None]) -> None:
    """flash-attn where it is installed, else torch's own; the released head size and number of heads."""
    from kimi_triton.vision.attention import choose_attention

    attention = choose_attention(CUDA, torch.bfloat16)
    assert attention is not sdpa_attention, "no varlen kernel on this GPU"
    sequences = Sequences.from_grids(MIXED, CUDA)
    rows = sum(sequences.lengths)
    query, key, value = torch.randn(3, rows, 16, 72, device=CUDA, dtype=torch.bfloat16).unbind(0)
    exact = sdpa_attention(query.float(), key.float(), value.float(), sequences)
    found = attention(query, key, value, sequences)
    difference = worst(found.float(), exact)
    per_image = worst(sdpa_attention(query, key, value, sequences).float(), exact)
    report(f"{attention.__qualname__}: {difference:.1e} from fp32, one SDPA call for each image: {per_image:.1e}")
    assert difference < 2 * max(per_image, 0.01)


def test_bf16_in_company_equals_bf16_alone(tiny_k25: Path, report: Callable[[str], None]) -> None:
    model = loaded(tiny_k25)
    encoder = LocalEncoder(model, CUDA)
    images = list(torch.split(pixels(MIXED, torch.device("cpu")), [num_patches(grid) for grid in MIXED]))
    together = encoder.encode(images, MIXED)
    differences = []
    for image, grid, rows in zip(images, MIXED, together, strict=True):
        (alone,) = encoder.encode([image], [grid])
        assert isinstance(rows, Tensor)
        assert isinstance(alone, Tensor)
        differences.append(worst(rows.float(), alone.float()))
    report(f"largest difference between packed and alone: {max(differences):.1e}")
    assert max(differences) < 0.02


def test_graphs_equal_eager_in_every_size(tiny_k25: Path, report: Callable[[str], None]) -> None:
    eager, graphed = loaded(tiny_k25), loaded(tiny_k25)
    speed_up(graphed, max_patches=16_384, use_graphs=True, use_compile=False)
    packs: list[list[Grid]] = [[(1, 8, size // 8)] for size in SIZES]
    packs += [MIXED, SIXTEEN_SMALL, [(1, 2, 2)] * MAX_IMAGES, [(1, 2, 2)] * (MAX_IMAGES + 1), *BIG_SMALL_BIG]
    differences = [worst(run(graphed, grids), run(eager, grids)) for grids in packs]
    report(f"largest difference of graphs from eager in {len(packs)} packs: {max(differences):.1e}")
    assert max(differences) < 0.01


def test_graphs_are_faster_for_small_packs(tiny_k25: Path, report: Callable[[str], None]) -> None:
    eager, graphed = loaded(tiny_k25), loaded(tiny_k25)
    speed_up(graphed, max_patches=16_384, use_graphs=True, use_compile=False)
    for grids in ([(1, 16, 16)], [(1, 32, 32)], SIXTEEN_SMALL):
        pack = pixels(grids)
        with torch.inference_mode():
            slow, fast = (seconds_of(lambda model=model: model(pack, grids)) for model in (eager, graphed))  # noqa: B023
        report(f"{len(pack)} patches: eager {1e3 * slow:.2f} ms, graph {1e3 * fast:.2f} ms")
        assert fast < 1.1 * slow


def test_compiled_blocks_equal_eager_ones(tiny_k25: Path, report: Callable[[str], None]) -> None:
    eager, compiled = loaded(tiny_k25), loaded(tiny_k25)
    speed_up(compiled, max_patches=16_384, use_graphs=False, use_compile=True)
    difference = max(worst(run(compiled, grids), run(eager, grids)) for grids in (MIXED, SIXTEEN_SMALL))
    report(f"largest difference of compiled blocks: {difference:.1e}")
    assert difference < 0.02


def test_d5_no_layer_waits_for_the_device(tiny_k25: Path, report: Callable[[str], None]) -> None:
    """The profiler's count of synchronising calls in one forward; torch itself raises at any that it knows."""
    model = loaded(tiny_k25)
    pack = pixels(SIXTEEN_SMALL)
    with torch.inference_mode():
        model(pack, SIXTEEN_SMALL)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(pack, SIXTEEN_SMALL)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            model(pack, SIXTEEN_SMALL)
    waits = [event for event in profile.events() if "Synchronize" in event.name]
    inside = len(waits) - 1  # the profiler waits once at its end
    report(f"{max(inside, 0)} synchronisations in a forward of {len(model.vision_tower.encoder.blocks)} layers")
    assert inside <= 0


def test_d5_sizes_may_shrink_and_grow(tiny_k25: Path) -> None:
    model = loaded(tiny_k25)
    first = [run(model, grids) for grids in BIG_SMALL_BIG]
    again = [run(model, grids) for grids in reversed(BIG_SMALL_BIG)]
    assert all(torch.equal(one, other) for one, other in zip(first, reversed(again), strict=True))


def test_d2_peak_memory_is_level_in_the_number_of_images(tiny_k25: Path, report: Callable[[str], None]) -> None:
    """Forwards are bounded, so beyond one forward only the results grow."""
    encoder = LocalEncoder(loaded(tiny_k25), CUDA, max_patches_per_forward=4096)
    peaks = {}
    for count in (4, 16, 64, 256):
        grids: list[Grid] = [(1, 32, 32)] * count
        images = list(torch.split(pixels(grids, torch.device("cpu")), 1024))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        encoder.encode(images, grids)
        peaks[count] = torch.cuda.max_memory_allocated()
    results = 256 * 128 * 2  # bytes of one image's rows
    slope = (peaks[256] - peaks[16]) / 240
    report(f"peak memory in MiB by images of 1024 patches: { {n: round(b / 2**20, 1) for n, b in peaks.items()} }")
    report(f"that is {slope:.0f} bytes for each further image, whose rows take {results}")
    assert slope < 4 * results


def test_e4_as_many_contexts_as_processes_that_compute(tiny_k25: Path, report: Callable[[str], None]) -> None:
    torch.zeros(1, device=CUDA)
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    if not subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        pytest.skip("nvidia-smi does not see processes here")
    command = [sys.executable, "-c", CONTEXTS, str(tiny_k25)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    report(f"2 workers on one GPU and their parent: {output.strip()} contexts")
    assert int(output) == 2
