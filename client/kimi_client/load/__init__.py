# SPDX-License-Identifier: Apache-2.0
"""Load tests of a kimi-triton server with perf_analyzer: inputs, runs, figures, a report, and comparisons."""
