# SPDX-License-Identifier: Apache-2.0
"""Check that the steps of each ensemble fit together: names, data types and dimensions of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_triton.errors import ConfigError

Shape = tuple[int, tuple[int, ...]]  # data type, dimensions with the batch dimension


def check_wiring(models: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the ensemble, the step and the tensor that does not fit."""
    for name, model in models.items():
        for step in model.ensemble_scheduling.step:
            if step.model_name not in models:
                raise ConfigError(f"{name}: step {step.model_name} is not in the repository")
        if model.platform == "ensemble":
            _check_ensemble(model, models)


def _check_ensemble(ensemble: Any, models: Mapping[str, Any]) -> None:
    known: dict[str, Shape] = {tensor.name: _shape(ensemble, tensor) for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = models[step.model_name]
        where = f"{ensemble.name}: step {step.model_name}"
        inputs = {tensor.name: tensor for tensor in model.input}
        for key in step.input_map:
            if key not in inputs:
                raise ConfigError(f"{where} has no input {key}")
        for tensor in model.input:
            source = step.input_map.get(tensor.name)
            if source is None and not tensor.optional:
                raise ConfigError(f"{where} gets nothing for its input {tensor.name}")
            if source is not None:
                _check_fit(f"{where}, input {tensor.name}", known.get(source), _shape(model, tensor))
        outputs = {tensor.name: tensor for tensor in model.output}
        for key, value in step.output_map.items():
            if key not in outputs:
                raise ConfigError(f"{where} has no output {key}")
            known[value] = _shape(model, outputs[key])
    for tensor in ensemble.output:
        _check_fit(f"{ensemble.name}, output {tensor.name}", known.get(tensor.name), _shape(ensemble, tensor))


def _shape(model: Any, tensor: Any) -> Shape:
    batch = (-1,) if model.max_batch_size > 0 else ()
    return tensor.data_type, batch + tuple(tensor.dims)


def _check_fit(where: str, produced: Shape | None, consumed: Shape) -> None:
    if produced is None:
        raise ConfigError(f"{where}: no step produces it")
    if produced[0] != consumed[0]:
        raise ConfigError(f"{where}: data type {produced[0]} is produced, {consumed[0]} is expected")
    sides = list(zip(produced[1], consumed[1], strict=False))
    if len(produced[1]) != len(consumed[1]) or any(-1 not in pair and pair[0] != pair[1] for pair in sides):
        raise ConfigError(f"{where}: dimensions {produced[1]} are produced, {consumed[1]} are expected")
