# SPDX-License-Identifier: Apache-2.0
"""How the vision encoder is spread over processes and devices. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kimi_triton.config import VisionConfig
from kimi_triton.errors import ConfigError

Parallel = Literal["instances", "data", "tensor"]
PARALLEL: tuple[Parallel, ...] = ("instances", "data", "tensor")
DEFAULT_CPU_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayout:
    """`devices` holds the GPUs of each Triton instance; empty ones compute on the CPU."""

    parallel: Parallel
    devices: tuple[tuple[int, ...], ...]
    num_workers: int  # processes that one instance owns; with `instances` it is the process itself
    num_threads: int  # CPU cores of each process that computes

    @classmethod
    def plan(
        cls,
        *,
        parallel: str,
        devices: str,
        num_instances: int,
        num_workers: int,
        num_threads: int,
        num_cores: int,
        config: VisionConfig,
    ) -> VisionLayout:
        """From the options of `serve`; a number of 0 means: what follows from the rest.

        Devices are GPU numbers: `0,1;2,3` are two groups of two. Raises ConfigError.
        """
        kind = checked_parallel(parallel)
        if min(num_instances, num_workers, num_threads) < 0:
            raise ConfigError(
                f"vision instances {num_instances}, workers {num_workers}, threads {num_threads}: one is below 0"
            )
        groups = parse_devices(devices)
        on_cpu: tuple[tuple[int, ...], ...] = ((),) * (num_instances or 1)
        if groups and (num_instances or num_workers):
            raise ConfigError(f"vision devices {devices} say how many instances and workers there are; leave those out")
        if kind == "instances":
            if num_workers > 1:
                raise ConfigError(f"vision workers is {num_workers}, but with `instances` each instance is one process")
            placed, workers = tuple((device,) for group in groups for device in group) or on_cpu, 1
        else:
            placed, workers = groups or on_cpu, num_workers or DEFAULT_CPU_WORKERS
        num_processes = sum(len(group) or workers for group in placed)
        if kind == "tensor":
            for group in placed:
                check_shards(config, len(group) or workers)
        return cls(
            parallel=kind,
            devices=placed,
            num_workers=workers,
            num_threads=num_threads or max(1, num_cores // num_processes),
        )


def checked_parallel(name: str) -> Parallel:
    if name not in PARALLEL:
        raise ConfigError(f"vision parallel is {name!r}, expected one of {', '.join(PARALLEL)}")
    return name


def parse_devices(text: str) -> tuple[tuple[int, ...], ...]:
    """`0,1;2,3` -> ((0, 1), (2, 3)). Raises ConfigError for what is no number and for a device listed twice."""
    if not text:
        return ()
    try:
        groups = tuple(tuple(int(device) for device in group.split(",")) for group in text.split(";"))
    except ValueError:
        raise ConfigError(f"vision devices {text!r} are not GPU numbers such as 0,1 or 0,1;2,3") from None
    listed = [device for group in groups for device in group]
    if min(listed) < 0 or len(set(listed)) < len(listed):
        raise ConfigError(f"vision devices {text!r} hold a negative number or a GPU twice")
    return groups


def check_shards(config: VisionConfig, num_workers: int) -> None:
    """Raises ConfigError with both numbers when the tower cannot be cut into equal parts."""
    for name, size in (("attention heads", config.num_attention_heads), ("MLP units", config.intermediate_size)):
        if num_workers < 1 or size % num_workers:
            raise ConfigError(f"{size} {name} of the vision tower do not divide over {num_workers} tensor workers")


def visible_device(device: int, environment: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES must be for a process that shall see only the server's GPU number `device`."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return str(device)
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if device >= len(names):
        raise ConfigError(f"GPU {device} is asked for, CUDA_VISIBLE_DEVICES={listed} shows {len(names)}")
    return names[device]
