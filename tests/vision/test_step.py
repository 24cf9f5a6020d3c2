# SPDX-License-Identifier: Apache-2.0
"""The vision step: checks, order, neighbours, cache and metrics, on a tiny checkpoint in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_triton.errors import ConfigError, InvalidRequest, KimiError
from kimi_triton.metric import Metric, MetricSpec
from kimi_triton.vision.grids import Grid, num_image_tokens, num_patches
from kimi_triton.vision.options import VisionOptions
from kimi_triton.vision.step import VisionInputs, VisionOutputs, VisionStep

GRIDS: list[Grid] = [(1, 2, 4), (1, 6, 2), (4, 2, 2), (1, 8, 8)]


class Recorder:
    """A metric that remembers."""

    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def increment(self, value: float) -> None:
        self.value += value

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class Options:
    """What triton_io.StepOptions gives a step, without Triton."""

    model_name = "moonvit"
    device_id = 0

    def __init__(self, checkpoint: Path, kind: str = "CPU", instance: str = "moonvit_0_0", **values: str) -> None:
        self.instance_kind, self.instance_name = kind, instance
        self._values = {"checkpoint": str(checkpoint), "dtype": "float32", **values}
        self.recorders: dict[str, Recorder] = {}

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name) or default

    def path(self, name: str) -> Path:
        return Path(self._values[name])

    def integer(self, name: str, default: int) -> int:
        return int(self._values.get(name) or default)

    def metrics(self, specs: Sequence[MetricSpec]) -> Mapping[str, Metric]:
        self.recorders = {spec.name: Recorder() for spec in specs}
        return self.recorders


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step chooses what its process sees of the GPUs; that must not outlast a test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def options(tiny_k25: Path) -> Options:
    return Options(tiny_k25, max_patches_per_forward="64", image_cache_bytes="1000000")


@pytest.fixture
def step(options: Options) -> VisionStep:
    return VisionStep.from_triton(options)  # type: ignore[arg-type]


def request(grids: Sequence[Grid], seed: int = 0) -> VisionInputs:
    """Every image of a seed and place has a digest of its own."""
    pixels = np.random.default_rng(seed).integers(256, size=(sum(map(num_patches, grids)), 3, 14, 14), dtype=np.uint8)
    digest = np.zeros((len(grids), 32), np.uint8)
    digest[:, 0], digest[:, 1] = seed, np.arange(len(grids))
    return VisionInputs(pixels, np.array(grids, np.int64).reshape(-1, 3), digest)


def outputs_of(result: VisionOutputs | KimiError) -> VisionOutputs:
    assert isinstance(result, VisionOutputs), result
    return result


def rows_of(result: VisionOutputs | KimiError) -> Tensor:
    return outputs_of(result).image_embeds


def test_rows_and_flags_of_each_request_in_order(step: VisionStep) -> None:
    batch = [request(GRIDS, 1), request(GRIDS[:1], 2), request(GRIDS[::-1], 3)]
    results = step.encode_batch(batch)
    for inputs, result in zip(batch, results, strict=True):
        outputs = outputs_of(result)
        grids: list[Grid] = [(t, h, w) for t, h, w in inputs.image_grid_thw.tolist()]
        assert outputs.image_embeds.shape == (sum(map(num_image_tokens, grids)), 128)
        assert outputs.image_embeds.dtype == torch.bfloat16
        assert outputs.image_cached.tolist() == [False] * len(grids)


def test_requests_together_equal_requests_apart(step: VisionStep, options: Options) -> None:
    batch = [request(GRIDS, 1), request(GRIDS[1:2], 2), request([], 3), request(GRIDS[2:], 4)]
    together = step.encode_batch(batch)
    alone = VisionStep.from_triton(options)  # type: ignore[arg-type]
    for inputs, result in zip(batch, together, strict=True):
        torch.testing.assert_close(rows_of(result), rows_of(alone.encode_batch([inputs])[0]), rtol=0, atol=0.02)


def test_c6_a_request_without_images_gets_no_rows_and_costs_nothing(step: VisionStep, options: Options) -> None:
    outputs = outputs_of(step.encode_batch([request([])])[0])
    assert outputs.image_embeds.shape == (0, 128)
    assert outputs.image_embeds.dtype == torch.bfloat16
    assert outputs.image_cached.shape == (0,)
    assert all(recorder.value == 0 and not recorder.observed for recorder in options.recorders.values())


GOOD = request(GRIDS)
HUGE = 2**62


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([(1, 14, 2)], "pixel_values has 8 patches, image_grid_thw describes 28"),
        ([(1, 2, 3)], "image 0: grid has 3 columns"),
        ([(1, 0, 4)], "image 0: grid has 0 rows"),
        ([(1, -2, -4)], "image 0: grid has -2 rows"),
        ([(0, 2, 4)], "image 0: grid has 0 frames"),
        ([(5, 2, 4)], "image 0: grid has 5 frames, expected 1 to 4"),
        ([(1, 2, 514)], "image 0: grid has 514 columns"),
        ([(1, HUGE, HUGE)], f"image 0: grid has {HUGE} rows"),
        ([(HUGE, HUGE, HUGE)], f"image 0: grid has {HUGE} frames"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_and_its_neighbours_are_served(
    step: VisionStep, grids: list[Grid], message: str
) -> None:
    good = request(GRIDS[:1])
    bad = VisionInputs(good.pixel_values, np.array(grids, np.int64), good.image_digest)
    before, refused, after = step.encode_batch([good, bad, request([])])
    assert isinstance(refused, InvalidRequest)
    assert message in str(refused)
    assert len(rows_of(before)) == 2
    assert len(rows_of(after)) == 0


def test_a_number_of_digests_that_does_not_fit_is_refused(step: VisionStep) -> None:
    for digest in (GOOD.image_digest[:3], GOOD.image_digest[:, :16]):
        (refused,) = step.encode_batch([VisionInputs(GOOD.pixel_values, GOOD.image_grid_thw, digest)])
        assert isinstance(refused, InvalidRequest)
        assert f"image_digest has shape {list(digest.shape)}, image_grid_thw describes 4 images" in str(refused)


def test_d1_rows_that_are_not_finite_are_an_error_of_their_request_only(
    step: VisionStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = step._encoder._encoder
    plain_encode = encoder.encode

    def encode(images: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor | KimiError]:
        results: list[Tensor | KimiError] = list(plain_encode(images, grids))
        results[1] = InvalidRequest("not finite in 3 rows")
        return results

    monkeypatch.setattr(encoder, "encode", encode)
    bad, good = step.encode_batch([request(GRIDS[:2], 1), request(GRIDS[:1], 2)])
    assert str(bad) == "image 1: not finite in 3 rows"
    assert isinstance(bad, InvalidRequest)
    assert len(rows_of(good)) == 2


def test_cache_on_equals_cache_off(step: VisionStep, tiny_k25: Path) -> None:
    without = VisionStep.from_triton(Options(tiny_k25, max_patches_per_forward="64", image_cache_bytes="0"))  # type: ignore[arg-type]
    for seeds in ([1, 2], [2, 1, 3], [1]):
        batch = [request(GRIDS, seed) for seed in seeds]
        for result, expected in zip(step.encode_batch(batch), without.encode_batch(batch), strict=True):
            torch.testing.assert_close(rows_of(result), rows_of(expected), rtol=0, atol=0.02)
            assert not outputs_of(expected).image_cached.any()


def test_a_second_request_with_the_same_images_is_told_so(step: VisionStep) -> None:
    first = step.encode_batch([request(GRIDS[:2])])[0]
    again = step.encode_batch([request(GRIDS[:2]), request([*GRIDS[:2], (1, 4, 4)])])
    assert [outputs_of(result).image_cached.tolist() for result in again] == [[True, True], [True, True, False]]
    assert torch.equal(rows_of(again[0]), rows_of(first))


def test_metrics_count_images_work_and_the_cache(step: VisionStep, options: Options) -> None:
    step.encode_batch([request(GRIDS[:2]), request(GRIDS[:1])])
    step.encode_batch([request([(1, 8, 8), (1, 2, 2)], seed=1)])
    metrics = {name.removeprefix("kimi_vision_"): recorder for name, recorder in options.recorders.items()}
    values = Counter({name: recorder.value for name, recorder in metrics.items()})
    assert values["images"] == 5
    assert values["patches"] == 8 + 12 + 8 + 64 + 4
    assert (values["cache_hits"], values["cache_misses"]) == (1, 4)
    assert values["cache_bytes"] == (2 + 3 + 16 + 1) * 128 * 2
    assert values["worker_restarts"] == values["cache_mismatches"] == 0
    assert metrics["forward_patches"].observed == [20, 64, 4]  # 64 at most in one forward
    assert metrics["forward_images"].observed == [2, 1, 1]
    assert len(metrics["encode_ms"].observed) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel": "pipeline"}, "expected one of instances, data, tensor"),
        ({"parallel": "data", "workers": "-1"}, "'workers' is -1"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_options_that_cannot_be(tiny_k25: Path, values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VisionStep.from_triton(Options(tiny_k25, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "instance", "values", "devices", "num_workers"),
    [
        ("CPU", "moonvit_0_1", {}, (), 1),
        ("GPU", "moonvit_0_0", {}, ("4",), 1),
        ("MODEL", "moonvit_1_0", {"parallel": "tensor", "devices": "0,1;2,3"}, ("6", "7"), 2),
        ("CPU", "moonvit_0_0", {"parallel": "data", "workers": "3"}, (), 3),
    ],
)
def test_e4_an_instance_knows_its_devices(
    tiny_k25: Path, kind: str, instance: str, values: dict[str, str], devices: tuple[str, ...], num_workers: int
) -> None:
    triton = Options(tiny_k25, kind, instance, **values)
    options = VisionOptions.from_triton(triton, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})  # type: ignore[arg-type]
    assert (options.devices, options.num_workers) == (devices, num_workers)


def test_e4_the_step_is_imported_without_torch() -> None:
    """So that the process can choose its GPU first."""
    script = "import sys, kimi_triton.vision.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, env=dict(os.environ)).returncode == 0
