"""The caching allocator's rules one by one, on sequences worked out by hand; then on random ones, and on networks."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from evenly import evenly

from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.memory.allocator import EMPTY_CACHE, Allocator, Pool, Settings, read_settings, replay
from unet3d.memory.ledger import most_held
from unet3d.memory.simulate import simulate
from unet3d.recomputing.program import Technique

DEFAULT, EXPANDABLE = Settings(), Settings(expandable=True)
KINDS = {
    "native": DEFAULT,
    "expandable": EXPANDABLE,
    "max_split": Settings(max_split=20 * MIB),
    "both": Settings(True, 20 * MIB),
    "divisions": Settings(divisions=(4,) * 16),
    "large_segment": Settings(large_segment=64 * MIB),
}


def events(*sizes: float) -> list[tuple[int, int]]:
    """MiB as requests 0, 1, 2, ...; a negative number releases that request: -1 is the first."""
    found: list[tuple[int, int]] = []
    held: list[int] = []
    for size in sizes:
        if size > 0:
            held.append(int(size * MIB))
            found.append((len(held) - 1, held[-1]))
        else:
            index = int(-size) - 1
            found.append((index, -held[index]))
    return found


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (512, 1), (513, 2), (5056, 10)])
def test_requests_are_rounded_up_to_512_bytes(size: int, blocks: int) -> None:
    assert replay([(0, size)])[0] == 512 * blocks


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 1, 2),  # the largest of the small pool
        (1 + 1 / 1024, 1 + 1 / 1024, 20),
        (9.5, 9.5, 20),
        (10, 10, 10),
        (10.5, 10.5, 12),  # 1.5 MiB are split off
        (11, 12, 12),  # 1 MiB is not
        (18.25, 18.25, 20),
        (20, 20, 20),
        (321, 322, 322),
    ],
)
def test_how_large_a_segment_is(size: float, allocated: float, reserved: int) -> None:
    assert replay(events(size)) == (int(allocated * MIB), reserved * MIB)


def test_segments_for_requests_below_10_mib_have_the_size_that_is_asked_for() -> None:
    asked = Settings(large_segment=64 * MIB)
    assert replay(events(2), asked) == (2 * MIB, 64 * MIB)
    assert replay(events(10), asked) == (10 * MIB, 10 * MIB)
    assert replay(events(65), asked._replace(expandable=True))[1] == 128 * MIB, "it grows by such pages"


def test_small_requests_share_a_segment_of_2_mib() -> None:
    assert replay(events(0.5, 0.5, 0.5, 0.5)) == (2 * MIB, 2 * MIB)
    assert replay(events(0.5, 0.5, 0.5, 0.5, 1 / 2048))[1] == 4 * MIB
    assert replay(events(1, 5)) == (6 * MIB, 22 * MIB)  # each from its pool, however much the other has free


def test_large_requests_share_a_segment_of_20_mib() -> None:
    assert replay(events(5, 5, 5, 5)) == (20 * MIB, 20 * MIB)
    assert replay(events(5, 5, 5, 5, 5))[1] == 40 * MIB


def test_in_the_small_pool_the_rest_is_split_off_from_512_bytes() -> None:
    a_block_less = 2 * MIB - 512
    small = Pool(is_small=True, settings=DEFAULT)
    assert small.take(MIB).size == MIB
    assert small.take(MIB - 512).size == MIB - 512
    assert small.free == [(512, a_block_less)]


def test_a_tail_of_1_mib_is_not_split_off_and_counts_as_allocated() -> None:
    assert replay(events(19)) == (20 * MIB, 20 * MIB)
    assert replay(events(19 - 1 / 2048)) == (19 * MIB - 512, 20 * MIB)
    assert replay(events(19), EXPANDABLE) == (19 * MIB, 20 * MIB)  # split from 512 bytes


def test_what_is_released_is_used_again_without_a_new_segment() -> None:
    assert replay(events(30, -1, 30, -2, 25, -3)) == (30 * MIB, 30 * MIB)
    assert replay(events(30, -1, 31))[1] == 62 * MIB  # too small: 30 and 32, never returned


@pytest.mark.parametrize("order", [(1, 2, 3), (1, 3, 2), (3, 2, 1), (2, 1, 3)])
def test_a_released_block_merges_with_free_neighbours_on_both_sides(order: tuple[int, ...]) -> None:
    whole = replay(events(6, 6, 8, *(-index for index in order), 20))
    assert whole == (20 * MIB, 20 * MIB)
    assert replay(events(6, 6, 8, -1, -3, 14))[1] == 34 * MIB  # 6 and 8 with 6 in use between


@pytest.mark.parametrize(("settings", "left"), [(DEFAULT, 40), (EXPANDABLE, 80)])
def test_an_emptied_cache_keeps_segments_in_use(settings: Settings, left: int) -> None:
    """Of the growing segment, 40 MiB before what is in use stay."""
    allocator = Allocator(settings)
    for event in [*events(40, 40, 60, -1, -3), (EMPTY_CACHE, 0)]:
        allocator.apply(*event)
    assert allocator.sizes()[1] == left * MIB
    allocator.apply(9, 60 * MIB)
    assert allocator.sizes()[1] == (left + 60) * MIB
    assert replay([*events(40, -1), (EMPTY_CACHE, 0), (9, 20 * MIB)])[1] == 40 * MIB, "the peak"


def test_segments_do_not_merge_with_each_other() -> None:
    assert replay(events(20, 20, -1, -2, 40))[1] == 80 * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    pool = Pool(is_small=False, settings=DEFAULT)
    blocks = [pool.take(size * MIB) for size in (40, 20, 30, 20)]
    for block in blocks:
        pool.release(block)
    assert [address // MIB for _, address in pool.free] == [40, 90, 60, 0]
    assert pool.take(20 * MIB).address == 40 * MIB
    assert pool.take(20 * MIB).address == 90 * MIB
    assert pool.take(20 * MIB).address == 60 * MIB
    assert pool.take(20 * MIB).address == 0
    assert pool.free == [(10 * MIB, 80 * MIB), (20 * MIB, 20 * MIB)]


def test_fragments_that_one_growing_segment_avoids() -> None:
    """Two segments that are free, 24 and 26 MiB, serve no 50; one that grew to 50 does. Pages are 20 MiB, so 60."""
    grown = events(24, 26, -1, -2, 50)
    assert replay(grown)[1] == 100 * MIB
    assert replay(grown, EXPANDABLE) == (50 * MIB, 60 * MIB)
    assert replay(events(24, -1, 26, -2, 50), EXPANDABLE)[1] == 60 * MIB  # it grows where it is free


def test_a_growing_segment_has_pages_of_2_mib_for_small_requests() -> None:
    assert replay(events(1, 1, 0.5), EXPANDABLE) == (int(2.5 * MIB), 4 * MIB)


def test_the_end_that_can_grow_is_taken_last() -> None:
    """For best fit it counts as large as it could become: 30 MiB inside are cut for 10, the 15 at the end stay."""
    pool = Pool(is_small=False, settings=EXPANDABLE)
    inside = pool.take(30 * MIB)
    pool.take(15 * MIB)
    pool.release(inside)
    assert pool.free == [(15 * MIB, 45 * MIB), (30 * MIB, 0)]
    assert pool.take(10 * MIB).address == 0
    assert pool.take(40 * MIB).address == 45 * MIB
    assert pool.reserved_bytes == 100 * MIB  # 15 free at the end and two pages more


LIMITED = Settings(max_split=40 * MIB)


def test_a_block_beyond_the_limit_is_neither_split_nor_taken_for_less() -> None:
    assert replay(events(50, -1, 38), LIMITED)[1] == 88 * MIB
    assert replay(events(50, -1, 38))[1] == 50 * MIB
    assert replay(events(58, -1, 42), LIMITED) == (58 * MIB, 58 * MIB), "taken whole"
    assert replay(events(38, -1, 25, 12), LIMITED)[1] == 38 * MIB, "below the limit, split as ever"


def test_a_block_beyond_the_limit_wastes_less_than_20_mib() -> None:
    assert replay(events(62, -1, 42), LIMITED)[1] == 104 * MIB
    assert replay(events(61.5, -1, 42.5), LIMITED)[1] == 62 * MIB


def test_a_block_beyond_the_limit_wastes_less_than_a_segment_that_is_asked_for() -> None:
    asked = Settings(max_split=100 * MIB, large_segment=64 * MIB)
    assert replay(events(168, -1, 105), asked) == (168 * MIB, 168 * MIB)
    assert replay(events(170, -1, 105), asked)[1] == 276 * MIB


def test_the_growing_segment_gives_its_end_even_beyond_the_limit() -> None:
    """Best fit refuses 60 MiB for 30, but the segment grows by nothing and its end is cut."""
    grown = Settings(expandable=True, max_split=40 * MIB)
    assert replay(events(60, -1, 30, 30), grown) == (60 * MIB, 60 * MIB)


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200, 4, 1536),  # too small for 4 steps of 512 bytes: a multiple of 512
        (1200 * 1024, 4, 1280 * 1024),  # as torch's own example has it
        (1024 * 1024, 4, 1024 * 1024),
        (1025 * 1024, 2, 1536 * 1024),
        (2047 * 1024, 8, 2048 * 1024),
        (1025 * 1024, 1, 1025 * 1024),
        (1025 * 1024, 0, 1025 * 1024),
    ],
)
def test_requests_are_rounded_up_to_a_share_between_powers_of_two(size: int, divisions: int, rounded: int) -> None:
    allocator = Allocator(Settings(expandable=True, divisions=(divisions,) * 16))  # splits off any rest
    allocator.take(0, size)
    assert allocator.allocated_bytes == rounded


def test_each_doubling_has_divisions_of_its_own() -> None:
    settings = Settings(expandable=True, divisions=(1, 2, *(1,) * 14))  # for requests from 2 to 4 MiB alone
    assert replay([(0, MIB + 600)], settings)[0] == MIB + 1024
    assert replay([(0, 2 * MIB + 600)], settings)[0] == 3 * MIB
    assert replay([(0, 4 * MIB + 600)], settings)[0] == 4 * MIB + 1024


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", DEFAULT),
        ("expandable_segments:True", EXPANDABLE),
        (" max_split_size_mb : 64 , expandable_segments : True,", Settings(True, 64 * MIB)),
        ("expandable_segments:True,expandable_segments:False", DEFAULT),
        ("backend:native", DEFAULT),
        ("roundup_power2_divisions:8,max_split_size_mb:20", Settings(False, 20 * MIB, (8,) * 16)),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", Settings(divisions=(1,) * 9 + (2, 4) + (8,) * 5)),
        ("roundup_power2_divisions:[1:2,2:4,>:8]", Settings(divisions=(2, 4) + (8,) * 14)),
        ("roundup_power2_divisions:[4:2,32:0]", Settings(divisions=(2, 2, 2) + (0,) * 13)),
        ("roundup_power2_divisions:[1048576:4]", Settings(divisions=(4,) * 16)),
        ("roundup_power2_divisions:[>:4]", Settings(divisions=(0,) + (4,) * 15)),
        ("roundup_power2_divisions:[65536:2,>:4]", Settings(divisions=(2,) * 16)),
        ("large_segment_size_mb:11", Settings(large_segment=11 * MIB)),
        ("large_segment_size_mb:12,max_split_size_mb:12", Settings(max_split=12 * MIB, large_segment=12 * MIB)),
    ],
)
def test_settings_that_the_replay_models(text: str, settings: Settings) -> None:
    assert read_settings({"PYTORCH_ALLOC_CONF": text}) == (settings, [])


@pytest.mark.parametrize(
    "part",
    [
        *("garbage_collection_threshold:0.8", "backend:cudaMallocAsync", "pinned_use_background_threads:True", "new"),
        *("expandable_segments_reserve:0.5", "expandable_segments_reserve_by_class:[serving:1G,other:0.5]"),
    ],
)
def test_settings_that_the_replay_does_not_model_are_named_in_one_line(part: str) -> None:
    found, lines = read_settings({"PYTORCH_ALLOC_CONF": f"max_split_size_mb:64,{part}"})
    assert found == Settings(max_split=64 * MIB)
    (line,) = lines
    assert line.startswith("PYTORCH_ALLOC_CONF:") and part in line and "max_split" not in line


@pytest.mark.parametrize("order", [1, -1])
def test_no_limit_on_splits_is_below_the_size_of_segments(order: int) -> None:
    parts = ["max_split_size_mb:63", "large_segment_size_mb:64"]
    found, (line,) = read_settings({"PYTORCH_ALLOC_CONF": ",".join(parts[::order])})
    assert found == Settings(large_segment=64 * MIB)
    assert "max_split_size_mb:63" in line and "large_segment" not in line


MALFORMED = [
    *("expandable_segments:true", "expandable_segments", "expandable_segments:", "max_split_size_mb:19"),
    *("max_split_size_mb:-1", "max_split_size_mb:abc", "max_split_size_mb", "roundup_power2_divisions:3"),
    *("roundup_power2_divisions:", "roundup_power2_divisions:[256:1", "roundup_power2_divisions:[256:3]"),
    *("roundup_power2_divisions:[3:1]", "roundup_power2_divisions:[0:1]", "roundup_power2_divisions:[256]"),
    *("roundup_power2_divisions:[-4:1]", "roundup_power2_divisions:[>:3]", "max_split_size_mb:" + "9" * 5000),
]


@pytest.mark.parametrize("size", ["10", "0", "-20", "abc", ""])
def test_a_malformed_size_of_segments_gives_one_line(size: str) -> None:
    found, (line,) = read_settings({"PYTORCH_ALLOC_CONF": f"large_segment_size_mb:{size},max_split_size_mb:20"})
    assert found == Settings(max_split=20 * MIB)
    assert f"large_segment_size_mb:{size}" in line and "max_split" not in line


@pytest.mark.parametrize("part", MALFORMED, ids=lambda part: part[:50])
def test_a_malformed_setting_gives_one_line(part: str) -> None:
    found, (line,) = read_settings({"PYTORCH_ALLOC_CONF": f"backend:cudaMallocAsync,{part}"})
    assert found == DEFAULT
    assert line.startswith("PYTORCH_ALLOC_CONF:") and f"backend:cudaMallocAsync, {part}" in line


@pytest.mark.slow
def test_the_variable_that_torch_reads_is_read() -> None:
    """The older name wins wherever it is set, even to nothing; torch itself says which it read."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert read_settings(environment) == (DEFAULT, [])
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    assert read_settings(environment) == (Settings(max_split=64 * MIB), [])
    assert read_settings({}) == (DEFAULT, [])
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout == "max_split_size_mb:64\n"


def test_what_cannot_happen_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match=r"\b0\b"):
        replay([(0, -512)])
    with pytest.raises(AssertionError, match=r"\b7\b"):
        replay([(7, 512), (7, 512)])


def stream(seed: int, length: int = 600) -> list[tuple[int, int]]:
    """Requests of 1 byte to 64 MiB, as often small as large, and their releases, to the last."""
    draw = random.Random(seed)
    found: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    for index in range(length):
        held[index] = int(2 ** draw.uniform(0, 26))
        found.append((index, held[index]))
        while held and draw.random() < 0.5:
            gone = draw.choice(list(held))
            found.append((gone, -held.pop(gone)))
    return found + [(index, -size) for index, size in held.items()]


def followed(allocator: Allocator, changes: list[tuple[int, int]]) -> Iterator[int]:
    """Bytes requested and not released, after each event."""
    requested = 0
    for index, change in changes:
        if change > 0:
            allocator.take(index, change)
        else:
            allocator.release(index)
        requested += change
        yield requested


def check_blocks(pool: Pool) -> None:
    """Side by side, none over another, all of the pool, and the free ones listed."""
    blocks = sorted(pool.blocks.values(), key=lambda block: block.address)
    assert all(a.address + a.size == b.address for a, b in pairwise(blocks))
    assert sum(block.size for block in blocks) == pool.reserved_bytes
    assert pool.free == sorted((block.size, block.address) for block in blocks if block.is_free)
    for a, b in pairwise(blocks):
        assert (a.after is b) == (b.before is a)
        assert not (a.after is b and a.is_free and b.is_free)  # they would have merged


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_properties_that_hold_for_any_stream(seed: int, settings: Settings) -> None:
    allocator, changes = Allocator(settings), stream(seed)
    for step, requested in enumerate(followed(allocator, changes)):
        allocated, reserved = allocator.sizes()
        assert requested <= allocated <= reserved
        if step % 50 == 0:
            check_blocks(allocator.small)
            check_blocks(allocator.large)
    assert allocator.allocated_bytes == 0
    for pool in (allocator.small, allocator.large):
        assert not any(block.before or block.after for block in pool.blocks.values())  # whole segments
        assert len(pool.blocks) == 1 or not settings.expandable
        check_blocks(pool)
    assert allocator.sizes()[1] == replay(changes, settings)[1]


@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
@pytest.mark.parametrize("seed", range(3))
def test_a_repeated_stream_soon_reserves_nothing_more(seed: int, expandable: bool) -> None:
    """Native, the second time may: best fit then chooses among segments that the first time had yet to be made."""
    allocator, changes = Allocator(Settings(expandable)), stream(seed)
    reserved = []
    for _ in range(4):
        assert list(followed(allocator, changes))[-1] == 0
        reserved.append(allocator.sizes()[1])
    assert len(set(reserved[1:])) == 1
    assert reserved[0] == reserved[1] or (not expandable and seed == 2 and reserved[0] < reserved[1])


NETWORKS = [("model.activation=leaky_relu",), ("model.norm=group", "amp=true"), ("ckpt=3",)]


@pytest.mark.parametrize("overrides", NETWORKS, ids=" ".join)
def test_what_networks_add_at_64_cubed(overrides: tuple[str, ...]) -> None:
    config = compose.compose(["model=unet_small", "data.patch=[64,64,64]", "optim=adam", *overrides])
    config.model.in_channels, config.model.classes = 1, 3
    ledger = simulate(config, config.model, Technique(evenly(8, int(config.ckpt)))).ledger
    peak = most_held(ledger.events)
    native, expandable = replay(ledger.events), replay(ledger.events, EXPANDABLE)
    most_native, most_expandable = (1.40, 1.20) if config.ckpt else (1.26, 1.10)  # less to hold, in as many pieces
    assert 1.001 < native[0] / peak < 1.005
    assert 1.10 < native[1] / peak < most_native
    assert 1 < expandable[0] / peak < native[0] / peak
    assert 1.02 < expandable[1] / peak < most_expandable
    assert expandable[1] < native[1]
