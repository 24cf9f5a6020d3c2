# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kimi_client import ServerError, Usage
from kimi_client.answer import join_chunks, read_chunk, split_embeds


def test_only_the_last_chunk_has_a_reason_and_the_usage(make_response: Callable[..., Any]) -> None:
    first, last = read_chunk(make_response("a ")), read_chunk(make_response("b", "stop", 2))
    assert (first.finish_reason, first.usage) == (None, None)
    assert (last.finish_reason, last.usage) == ("stop", Usage(7, 2, 0))
    answer = join_chunks([first, last], "r")
    assert (str(answer), answer.finish_reason, answer.usage.completion_tokens) == ("a b", "stop", 2)
    assert answer.logprobs == (-0.5, -0.5)


def test_an_answer_without_its_end_is_an_error(make_response: Callable[..., Any]) -> None:
    for chunks in ([], [read_chunk(make_response("a "))]):
        with pytest.raises(ServerError, match=f"ended after {len(chunks)} pieces without a finish reason"):
            join_chunks(chunks, "r")


def test_another_models_response_is_an_error() -> None:
    with pytest.raises(ServerError, match=r"not one of kimi_vl: it has \['OUTPUT0'\]"):
        read_chunk({"OUTPUT0": np.zeros(1)})


def embeds(grids: list[list[int]], rows: int) -> dict[str, Any]:
    values = np.arange(rows, dtype=np.float32)[None, :, None].repeat(8, axis=2)  # (1, rows, 8)
    return {"image_embeds": values, "image_grid_thw": np.array([grids], dtype=np.int64)}


def test_rows_are_dealt_by_the_grid() -> None:
    # 100x100, 640x480 and 1x1 pixels have 16, 414 and 1 tokens; the number of frames (t = 4) is no factor.
    parts = split_embeds(embeds([[1, 8, 8], [1, 36, 46], [4, 2, 2]], 16 + 414 + 1))
    assert [part.shape for part in parts] == [(16, 8), (414, 8), (1, 8)]
    assert np.concatenate(parts)[:, 0].tolist() == list(range(431))


@pytest.mark.parametrize(("grids", "rows"), [([[1, 8, 8]], 15), ([[1, 8, 8]], 0), ([[1, 2, 2], [1, 2, 4]], 4)])
def test_c4_rows_that_do_not_fit_the_grid_are_an_error(grids: list[list[int]], rows: int) -> None:
    with pytest.raises(ServerError, match=f"image_embeds has {rows} rows, image_grid_thw describes"):
        split_embeds(embeds(grids, rows))
