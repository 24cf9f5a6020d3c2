# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder as released: config.json, an index and shards of safetensors.

Opening one reads headers only, and accounts for every tensor: what is missing, unexpected, truncated or of the wrong
shape is refused by name before a server starts. The index alone decides which file holds a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from kimi_triton.config import CheckpointConfig, read_json
from kimi_triton.errors import ConfigError
from kimi_triton.inventory import expected_tensors, is_derived

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAMED_AT_MOST = 5  # tensor names in one message


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `dtype` is safetensors' name, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A checked checkpoint. Raises ConfigError, naming the file or tensor, when it cannot be served."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"checkpoint {folder} is not a folder")
        self.folder = folder
        self.config = CheckpointConfig.from_checkpoint(folder)
        self.tensors = {name: info for name, info in _stored_tensors(folder).items() if not is_derived(name)}
        _check_inventory(self.tensors, expected_tensors(self.config))

    def names(self, *prefixes: str) -> list[str]:
        """Names of the stored tensors that start with one of `prefixes`."""
        return [name for name in self.tensors if name.startswith(prefixes)]

    def read(self, names: Iterable[str], device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the stored dtype, file by file; peak memory is one tensor above what is kept."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        for file, wanted in by_file.items():
            with safe_open(file, framework="pt", device=device) as shard:
                for name in wanted:
                    yield name, shard.get_tensor(name)

    def num_bytes(self, *prefixes: str) -> int:
        """Bytes that the weights under `prefixes` take in their stored dtype."""
        return sum(_num_bytes(self.tensors[name]) for name in self.names(*prefixes))


def _num_bytes(info: TensorInfo) -> int:
    size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(info.dtype, 1)
    for side in info.shape:
        size *= side
    return size


def _stored_tensors(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            shards = len(list(folder.glob("*.safetensors")))
            raise ConfigError(f"{folder} has neither {INDEX} nor {SINGLE} ({shards} other safetensors files)")
        return _header(folder / SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{INDEX}: weight_map is missing or empty")
    stored: dict[str, TensorInfo] = {}
    for file_name in sorted(set(map(str, weight_map.values()))):
        if Path(file_name).name != file_name:
            raise ConfigError(f"{INDEX}: shard {file_name!r} is not a plain file name")
        header = _header(folder / file_name)
        indexed = {name for name, holder in weight_map.items() if holder == file_name}
        _refuse(f"{file_name} lacks tensors that {INDEX} places there", indexed - header.keys())
        _refuse(f"{file_name} holds tensors that {INDEX} does not place there", header.keys() - indexed)
        stored.update(header)
    return stored


def _header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of one shard; safetensors checks that the data is as long as the header says."""
    if not file.is_file():
        raise ConfigError(f"shard {file.name} is missing in {file.parent}")
    try:
        with safe_open(file, framework="numpy") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: TensorInfo(file, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as exc:
        raise ConfigError(f"shard {file.name} is truncated or damaged ({file.stat().st_size} bytes): {exc}") from exc


def _check_inventory(stored: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]]) -> None:
    _refuse("missing tensors", expected.keys() - stored.keys())
    _refuse("unexpected tensors", stored.keys() - expected.keys())
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ConfigError(f"{name} has shape {list(stored[name].shape)}, config.json implies {list(shape)}")
        if name.startswith("vision_tower.") and stored[name].dtype not in ("BF16", "F32", "F16"):
            raise ConfigError(f"{name} is stored as {stored[name].dtype}, vision weights must be floating point")


def _refuse(what: str, names: set[str]) -> None:
    if names:
        first = sorted(names)[:NAMED_AT_MOST]
        more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
        raise ConfigError(f"{what}: {', '.join(first)}{more}")
