# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the encoder's layers: small packs, which launch kernels more slowly than the GPU runs them.

A graph works on tensors that stay in place, so a pack is copied into the next larger size that was recorded. The rows
that are left over form a sequence of their own, which no image attends to. Never around a collective: a graph of one
rank would wait for ranks that do not replay theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kimi_triton.vision.attention import Sequences
from kimi_triton.vision.grids import Grid
from kimi_triton.vision.moonvit import Encoder

SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # patches; above, kernels outlast their launches
MAX_IMAGES = 16  # in a pack that is replayed; every possible one costs a few empty kernel blocks
WARM_UP_RUNS = 2  # libraries allocate and choose kernels before a recording

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class Recording:
    """The layers for packs of up to `size` patches."""

    def __init__(self, encoder: Encoder, size: int, like: Tensor, freqs_like: Tensor, record: Record) -> None:
        """`like` and `freqs_like` show width, dtype and device of hidden states and rotary factors."""
        self.size = size
        self._hidden_states = like.new_zeros(size, like.shape[-1])
        self._freqs_cis = freqs_like.new_zeros(size, freqs_like.shape[-1])
        self._cu_seqlens = torch.full((MAX_IMAGES + 2,), size, dtype=torch.int32, device=like.device)
        self._cu_seqlens[0] = 0
        # Kernels are launched for the longest sequence there can be; shorter ones end early.
        sequences = Sequences([size], self._cu_seqlens, size)
        self._replay, self._normalised = record(lambda: encoder.layers(self._hidden_states, self._freqs_cis, sequences))

    def run(self, hidden_states: Tensor, freqs_cis: Tensor, sequences: Sequences) -> Tensor:
        """(num_patches, hidden_size) of the layers, valid until the next run."""
        rows, ends = len(hidden_states), len(sequences.cu_seqlens)
        self._hidden_states[:rows].copy_(hidden_states)
        self._hidden_states[rows:].zero_()
        self._freqs_cis[:rows].copy_(freqs_cis)
        self._cu_seqlens[:ends].copy_(sequences.cu_seqlens)
        self._cu_seqlens[ends:].fill_(self.size)  # the left-over rows, then empty sequences
        self._replay()
        return self._normalised[:rows]


class GraphedEncoder(nn.Module):
    """An Encoder that replays recordings where there is one of a fitting size."""

    def __init__(self, encoder: Encoder, sizes: Sequence[int], record: Record) -> None:
        super().__init__()
        self.encoder = encoder
        self._sizes = sizes
        self._record = record
        self._recordings: list[Recording] = []

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.blocks

    def forward(self, hidden_states: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(num_patches, hidden_size) -> (num_patches, hidden_size), valid until the next forward."""
        recording = next((one for one in self._recordings if one.size >= len(hidden_states)), None)
        if recording is None or len(grids) > MAX_IMAGES:
            normalised: Tensor = self.encoder(hidden_states, grids)
            return normalised
        device = hidden_states.device
        sequences = Sequences.from_grids(grids, device)
        return recording.run(hidden_states, self.encoder.rope.freqs_cis(grids, device), sequences)

    @torch.inference_mode()
    def record_all(self, like: Tensor) -> None:
        """Record every size, the largest first, so that all share its memory. `like` is a row of hidden states."""
        freqs_like = self.encoder.rope.freqs_cis([(1, 2, 2)], like.device)
        recordings = [
            Recording(self.encoder, size, like, freqs_like, self._record) for size in sorted(self._sizes, reverse=True)
        ]
        self._recordings = recordings[::-1]


def cuda_record() -> Record:
    """Recordings that share one pool of memory: they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def record(layers: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                layers()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            normalised = layers()
        return graph.replay, normalised

    return record
