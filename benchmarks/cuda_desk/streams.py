"""Random requests to an allocator, answered by torch's own over a runtime without a device, and by the replay."""

import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from cuda_desk import stubs
from unet3d.memory.allocator import read_settings, replay

Events = list[tuple[int, int]]  # (index, bytes gained or lost)
VARIABLE = "PYTORCH_ALLOC_CONF"
SETTINGS = (  # of VARIABLE
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32",
    "max_split_size_mb:40,expandable_segments:True",
    "max_split_size_mb:64,expandable_segments:True,roundup_power2_divisions:4",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8,expandable_segments:True",
    "roundup_power2_divisions:[32:2,64:4]",
    "roundup_power2_divisions:[1:1,4:2,8:4]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[1:2,2:4,>:8]",
    "roundup_power2_divisions:[>:4]",
    "large_segment_size_mb:64",
    "large_segment_size_mb:12",
    "large_segment_size_mb:64,expandable_segments:True",
    "large_segment_size_mb:12,max_split_size_mb:14",
    "large_segment_size_mb:64,max_split_size_mb:100",
    "max_split_size_mb:24,large_segment_size_mb:24,expandable_segments:True",
    "max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True,expandable_segments_reserve:0.5",
    "expandable_segments:True,expandable_segments_reserve:16G",
)


class UnknownSetting(ValueError):
    """This version of torch does not have a setting, and ends where it is given."""


def stream(seed: int, length: int = 800) -> Events:
    """Return requests and, in between, releases in a random order. Sizes: 1 byte to 256 MiB, of one seed in 4 to 8 GiB.

    As many requests are small as are large. Of every second seed, more and more is held.
    """
    draw = random.Random(seed)
    released = 0.5 - seed % 2 * 0.03  # how likely it is, after each request and after each release
    doublings = 33 if seed % 4 == 3 else 28
    found: Events = []
    held: dict[int, int] = {}
    for index in range(length):
        held[index] = int(2 ** draw.uniform(0, doublings))
        found.append((index, held[index]))
        while held and draw.random() < released:
            gone = draw.choice(list(held))
            found.append((gone, -held.pop(gone)))
    return found


class Torch:
    """torch's allocator in a program of its own, built in a folder."""

    def __init__(self, torch: Path, headers: Sequence[Path], place: Path) -> None:
        """`torch`: the folder of an installed CUDA build. subprocess.CalledProcessError if it does not compile."""
        libraries = torch / "lib"
        stubs.build([libraries / "libc10_cuda.so"], headers, place)
        (runtime,) = place.glob("libcudart.so.*[0-9]")
        self.program = place / "replay"
        words = ["g++", "-O1", "-w", "-std=c++20", "-DUSE_CUDA", f"-I{torch / 'include'}"]
        words += [f"-I{folder}" for folder in headers]
        words += [str(stubs.FOLDER / "replay.cpp"), "-o", str(self.program)]
        # The runtime first, and by DT_RPATH, so that it is loaded before one that torch's libraries would find.
        words += ["-Wl,--no-as-needed", str(runtime), f"-L{libraries}", "-lc10_cuda", "-lc10"]
        words += ["-Wl,--disable-new-dtags", f"-Wl,-rpath,{place}:{libraries}"]
        words += ["-Wl,--unresolved-symbols=ignore-in-shared-libs"]
        subprocess.run(words, check=True)

    def peaks(self, events: Events, settings: str) -> tuple[int, int]:
        """Return what torch counts after these events, under settings of PYTORCH_ALLOC_CONF.

        Raises UnknownSetting, or ValueError where torch's allocator fails for another reason.
        """
        lines = "\n".join(f"{index} {change}" for index, change in events)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
        variables |= {VARIABLE: settings, "DESK_GPU_MIB": "1048576", "DESK_GPUS": "1"}
        done = subprocess.run([self.program], input=lines, env=variables, capture_output=True, text=True)
        if "Unrecognized key" in done.stderr:
            raise UnknownSetting(f"{settings}: this torch does not have it")
        if done.returncode:
            raise ValueError(f"{settings}: torch's allocator: {done.stderr.strip().splitlines()[-1:]}")
        allocated, reserved = done.stdout.split()
        return int(allocated), int(reserved)


def replayed(events: Events, settings: str) -> tuple[tuple[int, int], bool]:
    """Return the replay's peaks under settings of PYTORCH_ALLOC_CONF, and whether it leaves out some of them."""
    found, left_out = read_settings({VARIABLE: settings})
    return replay(events, found), bool(left_out)


def differing(torch: Torch, settings: str, seeds: Iterable[int]) -> list[str]:
    """Return a line for each stream whose peaks differ."""
    lines = []
    for seed in seeds:
        events = stream(seed)
        theirs = torch.peaks(events, settings)
        ours, _ = replayed(events, settings)
        if ours != theirs:
            lines.append(f"seed {seed}: torch {tuple(theirs)}, replay {tuple(ours)} bytes allocated and reserved")
    return lines
