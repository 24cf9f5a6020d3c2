# SPDX-License-Identifier: Apache-2.0
"""The parameters of the vision step, as config.pbtxt gives them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_triton.errors import ConfigError
from kimi_triton.vision.layout import Parallel, checked_parallel, parse_devices, visible_device

if TYPE_CHECKING:
    from kimi_triton.triton_io import StepOptions

IMAGE_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """One Triton instance of the vision step."""

    checkpoint: Path
    dtype: str = "auto"
    max_patches_per_forward: int = 16_384
    image_cache_bytes: int = IMAGE_CACHE_BYTES  # 0 turns the cache off
    parallel: Parallel = "instances"
    devices: tuple[str, ...] = ()  # GPUs as CUDA_VISIBLE_DEVICES names them; none: the CPU
    num_workers: int = 1
    num_threads: int = 0  # CPU threads of each process that computes; 0: as torch chooses
    use_graphs: bool = True  # CUDA graphs of small packs; never with `tensor`
    use_compile: bool = False  # torch.compile, on GPUs only
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0

    @classmethod
    def from_triton(cls, options: StepOptions, environment: Mapping[str, str]) -> VisionOptions:
        """`environment` tells which GPUs the server itself may see. Raises ConfigError."""
        parallel = checked_parallel(options.text("parallel", "instances"))
        devices = _devices(options, parallel)
        num_workers = 1 if parallel == "instances" else len(devices) or options.integer("workers", 2)
        if num_workers < 1:
            raise ConfigError(f"{options.model_name}: parameter 'workers' is {num_workers}, expected 1 or more")
        return cls(
            checkpoint=options.path("checkpoint"),
            dtype=options.text("dtype", "auto"),
            max_patches_per_forward=options.integer("max_patches_per_forward", 16_384),
            image_cache_bytes=options.integer("image_cache_bytes", IMAGE_CACHE_BYTES),
            parallel=parallel,
            devices=tuple(visible_device(device, environment) for device in devices),
            num_workers=num_workers,
            num_threads=options.integer("threads", 0),
            use_graphs=bool(options.integer("graphs", 1)),
            use_compile=bool(options.integer("compile", 0)),
            start_timeout_s=options.integer("start_timeout_s", 600),
            stall_timeout_s=options.integer("stall_timeout_s", 60),
        )


def _devices(options: StepOptions, parallel: Parallel) -> tuple[int, ...]:
    """GPU numbers of this instance: Triton's own for `instances`, else those of the group it is named after."""
    if parallel == "instances":
        return (options.device_id,) if options.instance_kind == "GPU" else ()
    groups = parse_devices(options.text("devices", ""))
    if not groups:
        return ()
    number = int(options.instance_name.split("_")[-2])  # moonvit_1_0: group 1, its only instance
    return groups[number]
