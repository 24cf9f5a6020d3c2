# SPDX-License-Identifier: Apache-2.0
"""Light client for a kimi-triton server."""

__version__ = "0.1.0"
