# SPDX-License-Identifier: Apache-2.0
"""Token ids and image rows -> streamed text. The contract is config.pbtxt, next door."""
