# SPDX-License-Identifier: Apache-2.0
"""Turn the vision options of `serve` into instance groups and parameters of the moonvit step."""

from __future__ import annotations

import os

from tritonclient.grpc import model_config_pb2

from kimi_triton.config import VisionConfig
from kimi_triton.serve.options import ServeOptions
from kimi_triton.vision.layout import VisionLayout

Group = model_config_pb2.ModelInstanceGroup


def place_vision(model: model_config_pb2.ModelConfig, options: ServeOptions, config: VisionConfig) -> None:
    """Fill in the step's config. Raises ConfigError for a layout that this tower or these options do not allow."""
    layout = plan_vision(options, config)
    if layout.parallel == "instances" and len(layout.devices) > 1 and not layout.devices[0]:
        model.max_batch_size = 1  # on the CPU a batch gains nothing, and would leave the other instances idle
    del model.instance_group[:]
    model.instance_group.extend(instance_groups(model.name, layout))
    parameters = {
        "parallel": layout.parallel,
        "devices": "" if layout.parallel == "instances" else options.vision_devices,
        "workers": layout.num_workers,
        "threads": layout.num_threads,
        "graphs": int(options.vision_graphs),
        "compile": int(options.vision_compile),
        "stall_timeout_s": options.vision_stall_timeout_s,
        "start_timeout_s": round(options.start_timeout_s),
        "image_cache_bytes": options.image_cache_bytes,
    }
    for name, value in parameters.items():
        model.parameters[name].string_value = str(value)


def plan_vision(options: ServeOptions, config: VisionConfig) -> VisionLayout:
    """The vision processes that the options ask for. Raises ConfigError."""
    return VisionLayout.plan(
        parallel=options.vision_parallel,
        devices=options.vision_devices,
        num_instances=options.vision_instances,
        num_workers=options.vision_workers,
        num_threads=options.vision_threads,
        num_cores=len(os.sched_getaffinity(0)),
        config=config,
    )


def instance_groups(model_name: str, layout: VisionLayout) -> list[model_config_pb2.ModelInstanceGroup]:
    """One process for each GPU, N processes on the CPU, or one process for each group of workers.

    A process that owns workers finds its devices by the number in its group's name.
    """
    count = len(layout.devices)
    if layout.parallel != "instances":
        kind = Group.KIND_MODEL if layout.devices[0] else Group.KIND_CPU
        return [Group(name=f"{model_name}_{number}", kind=kind, count=1) for number in range(count)]
    if layout.devices[0]:
        return [Group(kind=Group.KIND_GPU, count=1, gpus=[device for group in layout.devices for device in group])]
    return [Group(kind=Group.KIND_CPU, count=count)]
