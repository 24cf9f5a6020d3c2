# SPDX-License-Identifier: Apache-2.0
"""Options of `serve` -> processes and devices."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_triton.errors import ConfigError
from kimi_triton.vision.layout import VisionLayout, parse_devices, visible_device
from tests.workers.test_sharding import released_sizes


def plan(**options: Any) -> VisionLayout:
    values = {"parallel": "instances", "devices": "", "num_instances": 0, "num_workers": 0, "num_threads": 0}
    return VisionLayout.plan(config=released_sizes(), num_cores=8, **(values | options))


@pytest.mark.parametrize(
    ("options", "devices", "num_workers", "num_threads"),
    [
        ({}, ((),), 1, 8),
        ({"num_instances": 2}, ((), ()), 1, 4),
        ({"num_instances": 2, "num_threads": 1}, ((), ()), 1, 1),
        ({"devices": "0,1"}, ((0,), (1,)), 1, 4),
        ({"devices": "2;5"}, ((2,), (5,)), 1, 4),
        ({"parallel": "data"}, ((),), 2, 4),
        ({"parallel": "data", "num_workers": 4, "num_instances": 2}, ((), ()), 4, 1),
        ({"parallel": "data", "devices": "0,1,2"}, ((0, 1, 2),), 2, 2),
        ({"parallel": "tensor", "devices": "0,1;2,3"}, ((0, 1), (2, 3)), 2, 2),
        ({"parallel": "tensor", "num_workers": 16}, ((),), 16, 1),
    ],
)
def test_layouts(options: dict[str, Any], devices: Any, num_workers: int, num_threads: int) -> None:
    layout = plan(**options)
    assert (layout.devices, layout.num_workers, layout.num_threads) == (devices, num_workers, num_threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "pipeline"}, "'pipeline', expected one of instances, data, tensor"),
        ({"devices": "0,1", "num_instances": 2}, "leave those out"),
        ({"devices": "0,1", "parallel": "data", "num_workers": 2}, "leave those out"),
        ({"num_workers": 2}, "vision workers is 2, but with `instances`"),
        ({"num_workers": -1, "parallel": "data"}, "-1"),
        ({"num_instances": -1}, "-1"),
        ({"parallel": "tensor", "num_workers": 3}, "16 attention heads .* 3 tensor workers"),
        ({"parallel": "tensor", "devices": "0,1;2,3,4"}, "16 attention heads .* 3 tensor workers"),
        ({"devices": "0,x"}, "'0,x' are not GPU numbers"),
        ({"devices": "0,"}, "'0,' are not GPU numbers"),
        ({"devices": "1;1"}, "a GPU twice"),
        ({"devices": "-1"}, "a negative number"),
    ],
)
def test_layouts_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)


def test_groups_of_devices() -> None:
    assert parse_devices("") == ()
    assert parse_devices("3") == ((3,),)
    assert parse_devices("0,1;2,3") == ((0, 1), (2, 3))


def test_e4_a_process_sees_only_its_device_also_behind_the_servers_own_restriction() -> None:
    assert visible_device(1, {}) == "1"
    assert visible_device(1, {"CUDA_VISIBLE_DEVICES": "4,7"}) == "7"
    assert visible_device(0, {"CUDA_VISIBLE_DEVICES": "GPU-12ab"}) == "GPU-12ab"
    with pytest.raises(ConfigError, match="GPU 2 is asked for, CUDA_VISIBLE_DEVICES=4,7 shows 2"):
        visible_device(2, {"CUDA_VISIBLE_DEVICES": "4,7"})
