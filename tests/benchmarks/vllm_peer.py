# SPDX-License-Identifier: Apache-2.0
"""vLLM's MoonViT and image processor as contenders. Runs in vLLM's own environment, knows nothing of kimi_triton.

usage: vllm_peer.py tower CHECKPOINT | vllm_peer.py processor
Each input line is a list of grids ("[[1, 32, 32]]") or the path of a picture; each answer {"seconds": …}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

PROCESSOR_SETTINGS = {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "sample_fps": 2.0,
    "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
}  # fmt: skip


def tower(checkpoint: str) -> Callable[[str], object]:
    """Kimi-VL's tower of the released size in bf16, its weights packed for the CPU kernels as vLLM does on loading."""
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.moonvit import MoonVitPretrainedModel
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    config = ModelConfig(
        model=checkpoint, skip_tokenizer_init=True, dtype="bfloat16", enable_prompt_embeds=True,
        limit_mm_per_prompt={"image": 1},
    )  # fmt: skip
    with set_current_vllm_config(VllmConfig(model_config=config)):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = MoonVitPretrainedModel(MoonViTConfig()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)

    def run(line: str) -> object:
        grids = torch.tensor([[h, w] for _, h, w in json.loads(line)])
        pixels = torch.randn(int(grids.prod(-1).sum()), 3, 14, 14)
        with torch.inference_mode():
            return model(pixels, grids)

    return run


def processor() -> Callable[[str], object]:
    from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor

    fused = KimiK25FusedVisionProcessor(PROCESSOR_SETTINGS)

    def run(path: str) -> object:
        return fused.preprocess([{"type": "image", "image": Path(path).read_bytes()}], return_tensors="pt")

    return run


def main(kind: str, *arguments: str) -> None:
    import vllm

    run = {"tower": tower, "processor": processor}[kind](*arguments)
    about = {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        run(line.strip())
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
