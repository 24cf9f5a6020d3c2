# SPDX-License-Identifier: Apache-2.0
"""Every field case has a test named after it, and what the operator's page says about numbers is computed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_triton.serve.memory import MIB, shm_need
from kimi_triton.serve.options import ServeOptions

TESTS = Path(__file__).parent
OPERATING = (TESTS.parent / "python_backend" / "OPERATING.md").read_text()
CASES = {"a": 8, "b": 4, "c": 7, "d": 5, "e": 4, "f": 5, "g": 9, "h": 6, "i": 2, "j": 4}
NAMES = [f"{letter}{number}" for letter, count in CASES.items() for number in range(1, count + 1)]
ON_A_SERVER = {"a5", "a6", "b4", "c1", "c5", "c6", "e3", "g1", "g2", "g3", "g4", "g5", "g6", "g7", "g8", "g9", "h6"}
SOURCES = {path: path.read_text() for path in TESTS.rglob("test_*.py")}


def cases_named(case: str, sources: dict[Path, str]) -> list[str]:
    return [name for text in sources.values() for name in re.findall(rf"def (test_{case}_\w+)", text)]


def test_there_are_54_cases() -> None:
    assert len(NAMES) == 54


@pytest.mark.parametrize("case", NAMES)
def test_the_case_has_a_test(case: str) -> None:
    assert cases_named(case, SOURCES), f"no test_{case}_... in tests/"


@pytest.mark.parametrize("case", sorted(ON_A_SERVER))
def test_the_case_is_shown_on_a_live_server(case: str) -> None:
    on_server = {path: text for path, text in SOURCES.items() if "pytest.mark.server" in text}
    assert cases_named(case, on_server), f"no test_{case}_... with the server mark"


def test_the_names_looked_for_are_of_this_form() -> None:
    assert cases_named("z9", SOURCES) == []


@pytest.mark.parametrize(("name", "text_hidden_size"), [("Kimi-K2.5 (7168)", 7168), ("Kimi-VL (2048)", 2048)])
def test_g6_the_documented_shared_memory_is_what_is_computed(name: str, text_hidden_size: int) -> None:
    config: Any = SimpleNamespace(text_hidden_size=text_hidden_size, vision=SimpleNamespace(num_attention_heads=16))
    need = -(-shm_need(ServeOptions(checkpoint=Path()), config) // MIB)
    (row,) = [line for line in OPERATING.splitlines() if line.startswith(f"| {name} ")]
    numbers = [int(value) for value in re.findall(r"(\d+) MiB", row)]
    assert numbers[-1] == need
    assert abs(sum(numbers[:-1]) - need) <= 1


def test_every_policy_names_a_case() -> None:
    policies = OPERATING.partition("## Policies")[2].partition("Every case")[0]
    named = {case.lower() for case in re.findall(r"\b([A-J]\d)\b", policies)}
    assert len(named) >= 12
    assert named <= set(NAMES)
