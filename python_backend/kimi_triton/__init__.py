# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL and Kimi-K2.5/K2.6 on Triton Inference Server."""

__version__ = "0.1.0"
