# SPDX-License-Identifier: Apache-2.0
"""The commands that start vLLM for a checkpoint, in the one way that the engine can talk to."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from kimi_triton.config import CheckpointConfig
from kimi_triton.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """What the machines of one vLLM server look like. GPUs in all: tensor_parallel_size * pipeline_parallel_size."""

    checkpoint: Path
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nodes: int = 1
    master_addr: str = ""  # of node 0, as the others reach it
    max_model_len: int = 0  # tokens of prompt and answer; 0: what the checkpoint allows
    host: str = "0.0.0.0"
    port: int = 8100

    def lines(self) -> list[str]:
        """One command for each node. Raises ConfigError when the sizes do not fit the checkpoint or each other."""
        config = CheckpointConfig.from_checkpoint(self.checkpoint)
        self._check(config)
        length = self.max_model_len or config.max_position_embeddings
        shared = [
            *("vllm", "serve", str(self.checkpoint.resolve())),
            *("--enable-prompt-embeds", "--skip-tokenizer-init"),
            "--language-model-only",  # images come as embeddings, so no vision tower is loaded
            *("--generation-config", "vllm"),  # every option travels with its request
            *("--max-model-len", str(length)),
        ]
        if self.tensor_parallel_size > 1:
            shared += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.pipeline_parallel_size > 1:
            shared += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
        return [shlex.join(shared + self._of_node(node)) for node in range(self.nodes)]

    def _of_node(self, node: int) -> list[str]:
        address = ["--host", self.host, "--port", str(self.port)] if node == 0 else ["--headless"]
        if self.nodes == 1:
            return address
        return ["--nnodes", str(self.nodes), "--node-rank", str(node), "--master-addr", self.master_addr, *address]

    def _check(self, config: CheckpointConfig) -> None:
        sizes = (("--tensor-parallel-size", self.tensor_parallel_size), ("--nodes", self.nodes))
        for name, size in (*sizes, ("--pipeline-parallel-size", self.pipeline_parallel_size)):
            if size < 1:
                raise ConfigError(f"{name} is {size}, expected at least 1")
        heads, layers = int(config.text["num_attention_heads"]), int(config.text["num_hidden_layers"])
        if heads % self.tensor_parallel_size:
            raise ConfigError(f"--tensor-parallel-size is {self.tensor_parallel_size}, the model has {heads} heads")
        if self.pipeline_parallel_size > layers:
            raise ConfigError(
                f"--pipeline-parallel-size is {self.pipeline_parallel_size}, the model has {layers} layers"
            )
        gpus = self.tensor_parallel_size * self.pipeline_parallel_size
        if gpus % self.nodes:
            raise ConfigError(
                f"{gpus} GPUs (tensor times pipeline size) cannot be spread evenly over {self.nodes} nodes"
            )
        if self.nodes > 1 and not self.master_addr:
            raise ConfigError(f"{self.nodes} nodes need --master-addr, the address of the first one")
        if self.max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len is {self.max_model_len}, the checkpoint allows {config.max_position_embeddings}"
            )
