"""The caching allocator: its rules on requests worked out by hand, any requests, and settings as torch reads them."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unet3d.base.types import MIB
from unet3d.memory.allocator import EMPTY_CACHE, Allocator, Pool, Settings, read_settings, replay

VARIABLE = "PYTORCH_ALLOC_CONF"
UNITS = {"B": 1, "K": 2**10, "M": MIB}
# By settings: a rule, requests in MiB (K: KiB, B: bytes; -2 releases the second), and the most allocated and reserved.
RULES = """
PYTORCH_ALLOC_CONF=
requests are multiples of 512 bytes         | 512B                                    | 512B 2
a byte more takes 512 more                  | 513B                                    | 1K 2
the small pool serves up to 1 MiB           | 1                                       | 1 2
the large pool serves the rest              | 1025K                                   | 1025K 20
a large segment is shared below 10 MiB      | 9.5                                     | 9.5 20
a request has its own from 10 MiB on        | 10                                      | 10 10
whose size is even; 1.5 MiB are cut off it  | 10.5                                    | 10.5 12
1 MiB is not cut off, counts as allocated   | 11                                      | 12 12
1 MiB and 512 bytes are cut off             | 19455.5K                                | 19455.5K 20
small requests share 2 MiB                  | .5 .5 .5 .5                             | 2 2
one more takes 2 MiB more                   | .5 .5 .5 .5 1B                          | 2097664B 4
512 bytes are cut off in the small pool     | 1 1023.5K 512B                          | 2 2
pools share nothing                         | 1 5                                     | 6 22
large requests share 20 MiB                 | 5 5 5 5 5                               | 25 40
what is released is used again              | 30 -1 30 -2 25 -3                       | 30 30
what is too small is not                    | 30 -1 31                                | 32 62
a released block merges on both sides       | 6 6 8 -1 -3 -2 20                       | 20 20
a released block merges on one side         | 6 6 8 -2 -1 -3 20                       | 20 20
no block merges across one in use           | 6 6 8 -1 -3 14                          | 20 34
segments do not merge                       | 24 26 -1 -2 50                          | 50 100
the smallest block that fits is taken       | 40 20 30 20 -1 -2 -3 -4 20 20 30 40     | 110 110
of equal ones the lowest                    | 5 5 5 5 5 5 5 5 -4 -8 5 -5 -6 -7 20     | 40 40
an empty cache keeps segments in use        | 40 40 60 -1 -3 empty 120                | 160 160
without a limit any block is cut            | 50 -1 38                                | 50 50
PYTORCH_ALLOC_CONF=expandable_segments:True
a growing segment is cut from 512 bytes on  | 19                                      | 19 20
all blocks are in one segment and merge     | 24 26 -1 -2 50                          | 50 60
the segment grows where it is free          | 24 -1 26 -2 50                          | 50 60
small requests have pages of 2 MiB          | 1 1 .5                                  | 2.5 4
its end, which can grow, is taken last      | 30 15 -1 15 30                          | 60 80
PYTORCH_ALLOC_CONF=large_segment_size_mb:64
the size of large segments is asked for     | 2                                       | 2 64
PYTORCH_ALLOC_CONF=large_segment_size_mb:64,expandable_segments:True
a growing segment has such pages            | 65                                      | 65 128
PYTORCH_ALLOC_CONF=max_split_size_mb:40
a block beyond the limit is not cut         | 50 -1 38                                | 50 88
a request beyond the limit takes it whole   | 58 -1 42                                | 58 58
below the limit all is as ever              | 38 -1 25 12                             | 38 38
no 20 MiB of a block are left unused        | 62 -1 42                                | 62 104
less than 20 MiB may be unused              | 61.5 -1 42.5                            | 62 62
PYTORCH_ALLOC_CONF=max_split_size_mb:100,large_segment_size_mb:64
the size of a segment may not be unused     | 170 -1 105                              | 170 276
less than that may                          | 168 -1 105                              | 168 168
PYTORCH_ALLOC_CONF=max_split_size_mb:40,expandable_segments:True
a growing segment's end is always cut       | 60 -1 30 30                             | 60 60
PYTORCH_ALLOC_CONF=roundup_power2_divisions:4,expandable_segments:True
a power of two has divisions                | 1200K                                   | 1280K 20
PYTORCH_ALLOC_CONF=roundup_power2_divisions:4
divisions are 512 bytes at least            | 1200B                                   | 1536B 2
a power of two is not rounded               | 1024K                                   | 1 2
PYTORCH_ALLOC_CONF=roundup_power2_divisions:8
the last division ends at the next power    | 15.9                                    | 16 16
PYTORCH_ALLOC_CONF=roundup_power2_divisions:1,expandable_segments:True
one division is none                        | 1025K                                   | 1025K 20
PYTORCH_ALLOC_CONF=roundup_power2_divisions:[1:1,2:2,4:1]
each doubling has its own: one for 1 MiB    | 1025K                                   | 1025K 20
two for 2 MiB and more                      | 2049K                                   | 3 20
one for 4 MiB and more                      | 4097K                                   | 4097K 20
"""
ROWS: list[list[str]] = []
for line in RULES.strip().splitlines():
    if line.startswith(VARIABLE):
        asked_for = line.partition("=")[2]
    else:
        ROWS.append([asked_for, *map(str.strip, line.split("|"))])


def size_of(text: str) -> int:
    """Return bytes."""
    unit = text[-1] if text[-1] in UNITS else "M"
    return int(float(text.rstrip("BKM")) * UNITS[unit])


def events_of(text: str) -> list[tuple[int, int]]:
    """Return requests 0, 1, 2, ... and their releases."""
    events: list[tuple[int, int]] = []
    sizes: list[int] = []
    for word in text.split():
        if word == "empty":
            events.append((EMPTY_CACHE, 0))
        elif word.startswith("-"):
            index = int(word[1:]) - 1
            events.append((index, -sizes[index]))
        else:
            events.append((len(sizes), size_of(word)))
            sizes.append(size_of(word))
    return events


@pytest.mark.parametrize(("asked", "rule", "requests", "most"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_rule_of_the_allocator(asked: str, rule: str, requests: str, most: str) -> None:
    found, left_out = read_settings({VARIABLE: asked})
    assert not left_out
    assert replay(events_of(requests), found) == tuple(map(size_of, most.split()))


def test_of_a_growing_segment_an_emptied_cache_frees_the_end() -> None:
    allocator = Allocator(Settings(expandable=True))
    for event in events_of("40 40 60 -1 -3 empty"):
        allocator.apply(*event)
    assert allocator.sizes() == (40 * MIB, 80 * MIB), "40 MiB before what is in use stay"


def check_blocks(pool: Pool) -> None:
    """Blocks lie side by side, are all of the pool, and no two that are free are neighbours in a segment."""
    blocks = sorted(pool.blocks.values(), key=lambda block: block.address)
    assert sum(block.size for block in blocks) == pool.reserved_bytes
    assert pool.free == sorted((block.size, block.address) for block in blocks if block.is_free)
    for block, following in pairwise(blocks):
        assert block.address + block.size == following.address
        assert (block.after is following) == (following.before is block)
        assert not (block.after is following and block.is_free and following.is_free)


@given(
    st.builds(
        Settings,
        st.booleans(),
        st.sampled_from([20 * MIB, 2**63]),
        st.sampled_from([(0,) * 16, (4,) * 16]),
        st.sampled_from([20 * MIB, 64 * MIB]),
    ),
    st.lists(st.floats(0, 26) | st.integers(0, 99), max_size=150),
)
def test_blocks_of_any_sequence_tile_their_segments(asked: Settings, draws: list[float]) -> None:
    """A float is the logarithm of a request, an integer the number of one to release."""
    allocator = Allocator(asked)
    held: dict[int, int] = {}
    for index, draw in enumerate(draws):
        if isinstance(draw, float):
            held[index] = int(2**draw)
            allocator.apply(index, held[index])
        elif held:
            gone = list(held)[draw % len(held)]
            allocator.apply(gone, -held.pop(gone))
        allocated, reserved = allocator.sizes()
        assert sum(held.values()) <= allocated <= reserved
    pools = (allocator.small, allocator.large)
    for pool in pools:
        check_blocks(pool)
    for index, size in held.items():
        allocator.apply(index, -size)
    assert allocator.allocated_bytes == 0
    for pool in pools:
        check_blocks(pool)
        assert not any(block.before or block.after for block in pool.blocks.values()), "whole segments"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("backend:native", Settings()),
        (" max_split_size_mb : 64 , expandable_segments : True,", Settings(True, 64 * MIB)),
        ("expandable_segments:True,expandable_segments:False", Settings()),
        ("large_segment_size_mb:12,max_split_size_mb:12", Settings(max_split=12 * MIB, large_segment=12 * MIB)),
        ("roundup_power2_divisions:8,max_split_size_mb:20", Settings(False, 20 * MIB, (8,) * 16)),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", Settings(divisions=(1,) * 9 + (2, 4) + (8,) * 5)),
        ("roundup_power2_divisions:[4:2,32:0]", Settings(divisions=(2, 2, 2) + (0,) * 13)),
        ("roundup_power2_divisions:[1048576:4]", Settings(divisions=(4,) * 16)),
        ("roundup_power2_divisions:[>:4]", Settings(divisions=(0,) + (4,) * 15)),
    ],
)
def test_settings_that_the_replay_models(text: str, found: Settings) -> None:
    assert read_settings({VARIABLE: text}) == (found, [])


LEFT_OUT = """
garbage_collection_threshold:0.8 backend:cudaMallocAsync new expandable_segments_reserve_by_class:[serving:1G,other:0.5]
expandable_segments:true expandable_segments max_split_size_mb:63 max_split_size_mb:-1 max_split_size_mb:abc
large_segment_size_mb:10 large_segment_size_mb: roundup_power2_divisions:3 roundup_power2_divisions:
roundup_power2_divisions:[256:1 roundup_power2_divisions:[256:3] roundup_power2_divisions:[3:1]
roundup_power2_divisions:[256] roundup_power2_divisions:[-4:1] roundup_power2_divisions:[>:3]
"""


@pytest.mark.parametrize("part", [*LEFT_OUT.split(), "max_split_size_mb:" + "9" * 5000], ids=lambda part: part[:50])
def test_what_is_malformed_or_not_modelled_is_named_in_one_line(part: str) -> None:
    """No limit on splits is below the size of segments, wherever that is given."""
    found, (line,) = read_settings({VARIABLE: f"{part},large_segment_size_mb:64"})
    assert found == Settings(large_segment=64 * MIB)
    assert line.startswith(f"{VARIABLE}: the replay leaves out {part}: ")


@pytest.mark.slow
def test_the_variable_that_torch_reads_is_read() -> None:
    """The older name wins wherever it is set, even to nothing; torch itself says which it read."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "", VARIABLE: "expandable_segments:True"}
    assert read_settings(environment) == (Settings(), [])
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    assert read_settings(environment) == (Settings(max_split=64 * MIB), [])
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout == "max_split_size_mb:64\n"
