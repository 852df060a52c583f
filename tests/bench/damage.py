"""Small sound data sets, and ways to damage one file of them at random: the trials of `fuzz.py`."""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from unet3d.config.schema import Data

NAMES = ("a", "b", "c")
LAYOUTS = ("decathlon", "nnunet", "folders")
Content = dict[str, Any]
Damage = Callable[[random.Random, Path], None]


def data_set(root: Path, layout: str, ending: str) -> Data:
    """A sound data set of three cases in that layout."""
    images, labels = ("images", "labels") if layout == "folders" else ("imagesTr", "labelsTr")
    channel = "_0000" if layout == "nnunet" else ""
    rng = np.random.default_rng(0)
    affine = np.diag([1, 1.5, 2.5, 1])
    for folder in (images, labels):
        (root / folder).mkdir(parents=True)
    for number, name in enumerate(NAMES):
        kind = nib.Nifti2Image if number == 1 else nib.Nifti1Image
        scan = kind(rng.normal(100, 20, (9, 8, 7)).astype(np.float32), affine)
        nib.save(scan, root / images / f"{name}{channel}{ending}")
        nib.save(kind(rng.integers(0, 3, (9, 8, 7)).astype(np.uint8), affine), root / labels / f"{name}{ending}")
    (root / "dataset.json").write_text(json.dumps(manifest(layout, ending)))
    return Data(
        format=layout, root=str(root), classes=["background", "x", "y"] if layout == "folders" else None, spacing=None
    )


def manifest(layout: str, ending: str) -> Content:
    """dataset.json, which data=folders does not read."""
    if layout == "nnunet":
        labels = {"background": 0, "x": 1, "y": 2}
        return {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": 3, "file_ending": ending}
    files = [{"image": f"./imagesTr/{name}{ending}", "label": f"./labelsTr/{name}{ending}"} for name in NAMES]
    labels_by_value = {"0": "background", "1": "x", "2": "y"}
    return {"name": "Small", "modality": {"0": "CT"}, "labels": labels_by_value, "training": files}


def in_plain(change: Callable[[random.Random, bytearray], None]) -> Damage:
    """Damage to what a file holds once inflated; sound gzip around it."""

    def damage(rng: random.Random, path: Path) -> None:
        packed = path.name.endswith(".gz")
        content = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
        change(rng, content)
        path.write_bytes(gzip.compress(bytes(content), 1) if packed else bytes(content))

    return damage


def in_file(change: Callable[[random.Random, bytearray], None]) -> Damage:
    """Damage to the file as it lies on the disk: of a .nii.gz, to its gzip."""

    def damage(rng: random.Random, path: Path) -> None:
        content = bytearray(path.read_bytes())
        change(rng, content)
        path.write_bytes(bytes(content))

    return damage


def header_bytes(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(min(352, len(content)))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def header_field(rng: random.Random, content: bytearray) -> None:
    """A number that is at home in no header, at the offset of some field of NIfTI-1 or NIfTI-2."""
    kind = rng.choice(("<i2", "<i4", "<i8", "<f4", "<f8", ">i4", ">f4"))
    extremes = (np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-45) if "f" in kind else (0, -1, 1, 32767, 2**15 - 1, 2**7)
    value = np.array(rng.choice(extremes)).astype(kind).tobytes()
    at = rng.choice((0, 12, 16, 24, 40, 42, 44, 46, 48, 68, 70, 72, 76, 80, 84, 108, 112, 116, 123, 168, 176, 252, 254))
    at = rng.choice((at, 256, 260, 264, 268, 280, 284, 296, 312, 344, 348, 352, rng.randrange(540)))
    content[at : at + len(value)] = value


def bit_flips(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 8, 64))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def duplicate_block(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    block = content[start : start + rng.randint(1, 512)]
    content[rng.randrange(len(content)) : 0] = block * rng.choice((1, 2, 50))


def remove_block(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.randint(1, 512)]


def noise(rng: random.Random, content: bytearray) -> None:
    content[:] = rng.randbytes(rng.randrange(2000))


def extension(rng: random.Random, content: bytearray) -> None:
    """A header extension that claims any size, before voxels that begin anywhere."""
    sizes = np.array([rng.choice((0, 7, 16, 2**31 - 1, -16)), rng.choice((2, 4, 6, 32, 99))]).astype("<i4")
    content[348:352] = b"\1\0\0\0"
    content[352:352] = sizes.tobytes() + b"<a/>" * 2
    content[108:112] = np.array(rng.choice((352, 368, 353, 1e9, -1, 2**31))).astype("<f4").tobytes()


def bomb(rng: random.Random, path: Path) -> None:
    """Gzip of zeros behind a sound header that claims more than it should, or no more than there was."""
    content = bytearray(gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes())
    if rng.random() < 0.7 and content[:4] == (348).to_bytes(4, "little"):
        size = rng.choice((300, 700, 2000, 32767))
        content[40:48] = np.array([3, size, size, size]).astype("<i2").tobytes()
    zeros = bytes(rng.choice((2**20, 2**24)))
    path.write_bytes(gzip.compress(bytes(content) + zeros, 6) if path.name.endswith(".gz") else bytes(content))


def link(rng: random.Random, path: Path) -> None:
    """A link to a neighbour, to itself, to a folder, to nothing, or out of the data set."""
    path.unlink()
    outside = path.parent.parent.parent / "outside.nii"
    path.symlink_to(rng.choice((path, path.parent, path.parent / "none.nii", outside, Path("/dev/zero"))))


def not_a_file(rng: random.Random, path: Path) -> None:
    path.unlink()
    if rng.random() < 0.5:
        path.mkdir()
    else:
        os.mkfifo(path)


NIFTI: dict[str, Damage] = {
    **{f"{f.__name__}": in_plain(f) for f in (header_bytes, header_field, extension)},
    **{f"{f.__name__}": in_plain(f) for f in (bit_flips, truncate, duplicate_block, remove_block)},
    **{f"gzip {f.__name__}": in_file(f) for f in (bit_flips, truncate, duplicate_block, remove_block, noise)},
    **{f.__name__: f for f in (bomb, link, not_a_file)},
}

PATHS = ("../outside.nii", "/etc/passwd", "imagesTr/../../outside.nii", "imagesTr/out.nii", "", ".", "a" * 5000, "a\0b")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, 10**30, 10**400, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800"),
    *("a\nb", "é" * 9, "\u202eabc", [], {}, [[]], [1, 2], {"0": "x"}, {"a": {"b": []}}, "9" * 5000, PATHS[0], PATHS[1]),
)


def spots(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from spots(node[key])


def change_value(rng: random.Random, content: Content) -> None:
    node, key = rng.choice([*spots(content)])
    node[key] = rng.choice(ODD)


def change_path(rng: random.Random, content: Content) -> None:
    entries = [item for item in content.get("training", []) if isinstance(item, dict)]
    if entries:
        rng.choice(entries)[rng.choice(("image", "label"))] = rng.choice(PATHS)
    else:
        content["file_ending"] = rng.choice(PATHS)


def change_key(rng: random.Random, content: Content) -> None:
    node, key = rng.choice([spot for spot in spots(content) if isinstance(spot[0], dict)])
    node[rng.choice(("0", "00", "-1", "9" * 5000, "\x1b", "image", "ignore", ""))] = node.pop(key)


def repeat(rng: random.Random, content: Content) -> None:
    lists = [node[key] for node, key in spots(content) if isinstance(node[key], list)]
    for entries in lists[:1]:
        entries += entries * rng.choice((1, 1000))


def nest(rng: random.Random, content: Content) -> None:
    node, key = rng.choice([*spots(content)])
    for _ in range(rng.choice((10, 900))):
        node[key] = [node[key]] if rng.random() < 0.5 else {"0": node[key]}


JSON = {f.__name__: f for f in (change_value, change_path, change_key, repeat, nest)}


def damage_json(rng: random.Random, path: Path) -> str:
    if rng.random() < 0.3:
        name = rng.choice([*NIFTI])
        NIFTI[name](rng, path)
        return name
    content = json.loads(path.read_text())
    name = rng.choice([*JSON])
    try:
        JSON[name](rng, content)
        path.write_text(json.dumps(content), encoding="utf-8")
    except RecursionError:  # json cannot write what it is to read
        path.write_text("[" * rng.choice((1000, 100_000)))
    return name
