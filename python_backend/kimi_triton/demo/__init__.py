# SPDX-License-Identifier: Apache-2.0
"""A small trained model that comes with the package, and everything it was made with."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
