# SPDX-License-Identifier: Apache-2.0
"""How often a JPEG file makes its decoder go over the whole picture, told without decoding it.

A progressive picture is refined scan by scan, and a scan that changes nothing takes a few bytes: a file of some hundred
kilobytes can keep a decoder busy for minutes.
"""

from __future__ import annotations

import re

SCAN, END = 0xDA, 0xD9
NO_LENGTH = (0xD8, 0x01)
# Neither a stuffed zero nor a restart, which occur inside a scan. Bytes between segments are skipped, as decoders do.
MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)


def has_more_scans_than(limit: int, data: bytes) -> bool:
    """Whether more than `limit` scans begin before the end of the picture in the file `data`."""
    if data.count(bytes((0xFF, SCAN))) <= limit:  # nearly always, and much faster than what follows
        return False
    num_scans = place = 0
    while num_scans <= limit and (found := MARKER.search(data, place)):
        marker = found[1][0]
        if marker == END:
            return False
        place = found.end()
        if marker not in NO_LENGTH:
            num_scans += marker == SCAN
            place += int.from_bytes(data[place : place + 2], "big")  # what is inside a segment is no marker
    return num_scans > limit
