# SPDX-License-Identifier: Apache-2.0
"""Vision options of `serve` as they end up in moonvit's config.pbtxt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError
from kimi_triton.serve.options import ServeOptions
from kimi_triton.serve.placement import place_vision
from kimi_triton.serve.repository import read_repository, template_folder

CPU, GPU, MODEL = 2, 1, 3  # numbers of the kinds in Triton's protocol


def placed(checkpoint: Path, **options: Any) -> Any:
    model = read_repository(template_folder())["moonvit"]
    place_vision(
        model,
        ServeOptions(checkpoint=checkpoint, **options),
        CheckpointConfig.from_checkpoint(checkpoint).vision,
    )
    return model


def groups(model: Any) -> list[tuple[str, int, int, list[int]]]:
    return [(group.name, group.kind, group.count, list(group.gpus)) for group in model.instance_group]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("", CPU, 1, [])]),
        ({"vision_instances": 3}, [("", CPU, 3, [])]),
        ({"vision_devices": "0,2"}, [("", GPU, 1, [0, 2])]),
        ({"vision_parallel": "data"}, [("moonvit_0", CPU, 1, [])]),
        (
            {"vision_parallel": "tensor", "vision_devices": "0,1;2,3"},
            [("moonvit_0", MODEL, 1, []), ("moonvit_1", MODEL, 1, [])],
        ),
    ],
)
def test_instance_groups(tiny_k25: Path, options: dict[str, Any], expected: Any) -> None:
    assert groups(placed(tiny_k25, **options)) == expected


def test_parameters_reach_the_step(tiny_k25: Path) -> None:
    model = placed(
        tiny_k25,
        vision_parallel="tensor",
        vision_devices="0,1;2,3",
        vision_threads=3,
        vision_stall_timeout_s=7,
        vision_graphs=False,
        image_cache_bytes=5,
    )
    values = {name: value.string_value for name, value in model.parameters.items()}
    expected = {"parallel": "tensor", "devices": "0,1;2,3", "workers": "2", "threads": "3", "stall_timeout_s": "7"}
    expected |= {"graphs": "0", "compile": "0", "image_cache_bytes": "5", "start_timeout_s": "900"}
    assert values.items() >= expected.items()


def test_cpu_instances_share_requests_evenly(tiny_k25: Path) -> None:
    """A batch of many requests would keep one instance busy and the others idle."""
    assert placed(tiny_k25, vision_instances=2).max_batch_size == 1
    assert placed(tiny_k25).max_batch_size == 16
    assert placed(tiny_k25, vision_devices="0,1").max_batch_size == 16
    assert placed(tiny_k25, vision_parallel="data").max_batch_size == 16


def test_e2_a_tower_that_does_not_divide_is_refused(tiny_k25: Path) -> None:
    with pytest.raises(ConfigError, match="4 attention heads of the vision tower do not divide over 3"):
        placed(tiny_k25, vision_parallel="tensor", vision_workers=3)
