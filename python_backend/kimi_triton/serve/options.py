# SPDX-License-Identifier: Apache-2.0
"""What `kimi-triton serve` can be told. Every default is a value that works on a laptop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kimi_triton.pixel_budget import MAX_PIXEL_BYTES
from kimi_triton.vision.layout import Parallel
from kimi_triton.vision.options import IMAGE_CACHE_BYTES

Llm = Literal["transformers", "vllm"]
LLMS: tuple[Llm, ...] = ("transformers", "vllm")
Dtype = Literal["auto", "bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of one server. Ports are TCP ports on `host`; 0 lets the system choose."""

    checkpoint: Path
    model_repository: Path | None = None  # where the repository is written; None: a temporary folder
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    health_port: int = 0  # of /live and /ready
    dtype: Dtype = "auto"  # of vision and language weights; auto: as stored in the checkpoint
    max_images: int = 64  # of one request
    max_patches_per_forward: int = 16384  # of one pass through the vision tower
    vision_parallel: Parallel = "instances"
    vision_devices: str = ""  # GPU numbers, `;` between groups; empty: the CPU
    vision_instances: int = 0  # Triton instances on the CPU; 0: one
    vision_workers: int = 0  # processes of each data or tensor group on the CPU; 0: two
    vision_threads: int = 0  # CPU threads of each vision process; 0: the cores shared out
    vision_graphs: bool = True  # replay small packs as CUDA graphs; never with `tensor`
    vision_compile: bool = False  # torch.compile the vision tower, on GPUs only
    vision_stall_timeout_s: int = 60  # a worker that gets no further for so long is replaced
    image_cache_bytes: int = IMAGE_CACHE_BYTES  # of each vision instance; 0 turns the cache off
    llm: Llm = "transformers"  # vllm: the language model runs in vLLM servers, see `kimi-triton llm-command`
    llm_url: Sequence[str] | None = None  # of vLLM servers
    llm_timeout_s: int = 60  # silence after which a vLLM server is taken for dead
    llm_chunk_ms: int = 40  # tokens of one answer that vLLM gives faster than this are streamed together; 0: never
    llm_max_running: int = 16  # requests decoded together
    llm_max_waiting: int = 256  # requests beyond these; more are refused
    preprocess_instances: int = 2
    max_waiting: int = 128  # requests in front of the first step; more are refused
    max_pixel_bytes: int = MAX_PIXEL_BYTES  # of decoded pictures on their way through the vision step
    image_url_hosts: str = ""  # that pictures may be fetched from, with commas; empty: none
    image_url_http: bool = False  # also without encryption
    start_timeout_s: float = 900.0
    log_file: Path | None = None  # the server's own log; None: a file in the run folder
    verbose: bool = False

    @property
    def llm_max_requests(self) -> int:
        """That the language model may have, running and waiting."""
        return self.llm_max_running + self.llm_max_waiting
