"""data.cache=disk: the patches of data.cache=memory to the bit, whole files or none, and the memory of a patch."""

import io
import os
import pickle
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from guards import no, nothing, without, yes
from nifti_files import decathlon, image, rewrite, told, write
from promises import promise
from training import TINY, call, fill, records, same, send, train

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Augment, Config, Data
from unet3d.data import cache, loader, prepare
from unet3d.data.cache import DiskCache, key_of
from unet3d.data.cases import Case
from unet3d.data.check import DIGEST
from unet3d.data.patches import Patches, PreparedCase, crop
from unet3d.data.prepare import prepare_data
from unet3d.run import run as job

SHAPE = (21, 18, 13)
ARRAYS = 5  # of a case
SEMI = {"semi": True, "sparse": [3, 3, 2], "scored": [2, 2, 2], "ignore": 9}
ALWAYS = {f"{name}_p": 1.0 for name in ("spatial", "noise", "blur", "contrast", "gamma", "low_resolution")}
KEY = key_of("a")
ONE = {"voxels": (2, None)}
NUMBERS = {"voxels": np.arange(10, dtype=np.float32).reshape(2, 5)}


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Two cases, kept in tmp_path/cache."""
    found = decathlon(tmp_path / "set", ("a", "b"), SHAPE)
    return replace(found, cache="disk", cache_root=str(tmp_path / "cache"), intensity="zscore", patch=[12, 12, 8])


def equal(a: PreparedCase, b: PreparedCase) -> bool:
    voxels = np.array_equal(a.centres, b.centres) and a.centres.dtype == b.centres.dtype
    return torch.equal(a.image, b.image) and torch.equal(a.label, b.label) and voxels and a.spacing == b.spacing


def entries(data: Data) -> dict[str, tuple[int, int]]:
    """Every file of the cache, with what changes when it is written again."""
    paths = [*Path(data.cache_root or "").iterdir()]
    return {path.name: ((found := path.stat()).st_ino, found.st_mtime_ns) for path in paths}


def are_as_prepared(data: Data) -> bool:
    """Whether what the cache holds, or makes again, are the cases as they are without it."""
    found, sound = prepare_data(data), prepare_data(replace(data, cache="memory"))
    return all(equal(found.read(one), sound.read(one)) for one in (*sound.train, *sound.val))


@pytest.mark.parametrize(
    ("workers", "changes", "tile"),
    [
        (2, {"augment": Augment(elastic=2, **ALWAYS), "spacing": [1.2, 1.2, 2.0], "intensity": "ct"}, [12, 12, 8]),
        (0, {"patch": [24, 24, 24], "foreground": 1.0}, [24, 24, 24]),
        (0, {"patch": [16, 16, 16], "augment": Augment(spatial_p=0.5)}, [8, 8, 8]),
        (2, SEMI, [12, 12, 8]),
    ],
    ids=["augmented", "beyond the border", "mirrored context", "sparse"],
)
def test_patches_are_the_same_to_the_bit_wherever_cases_are_kept(
    data: Data, workers: int, changes: dict[str, Any], tile: list[int]
) -> None:
    found = []
    for place in ("memory", "off", "disk", "disk"):
        config = Config(data=replace(data, cache=place, **changes), workers=workers, batch=2)
        ready = prepare_data(config.data)
        patches = Patches(lambda index, ready=ready: ready.read_train(ready.train[index]), config.data, 3, tile)
        found.append([*islice(loader.batches(patches, [one.id for one in ready.train], config), 3)])
    for steps in zip(*found, strict=True):
        for first, *others in zip(*steps, strict=True):
            for other in others:
                assert torch.equal(first.image, other.image)
                assert torch.equal(first.label, other.label)


def test_nothing_is_read_or_written_again_by_the_next_run(
    data: Data, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which says again what was replaced."""
    stored = image(SHAPE)
    stored[1, 2, 3] = np.nan
    write(Path(data.root or "") / "imagesTr/a.nii.gz", stored)
    data.nonfinite = "zero"
    first, before = prepare_data(data), entries(data)
    replaced = ["warning: a: 1 ", "NaN", "data.nonfinite=zero"]
    assert told(capsys.readouterr().err.splitlines(), [replaced])
    monkeypatch.setattr(prepare, "read_volume", lambda *of: pytest.fail("a volume is read"))
    second = prepare_data(data)
    assert entries(data) == before
    assert all(equal(first.read(one), second.read(one)) for one in first.train)
    assert told(capsys.readouterr().err.splitlines(), [replaced])


def test_other_numbers_need_another_format(data: Data) -> None:
    """Where this fails, prepared cases have changed: raise FORMAT, so that no older file is read, then correct it."""
    found = prepare_data(replace(data, intensity="ct", spacing=[1.3, 1.1, 2.0], ignore=2))
    one = found.read(found.train[0])
    ramp = torch.linspace(-1, 1, one.label.numel(), dtype=torch.float64)
    image = (one.image.double().flatten() * ramp).sum().item()
    centres = int(one.centres_of(0).astype(np.int64).sum())
    assert (cache.FORMAT, one.spacing, int(one.label.sum()), centres) == (4, (1.3, 1.1, 2.0), -210_031, 57_369)
    assert image == pytest.approx(-117.90, rel=1e-3)


@promise("Data", "prepared cases that do ...")
@pytest.mark.parametrize("mirror", [False, True])
def test_a_patch_touches_its_own_bytes_alone(tmp_path: Path, mirror: bool) -> None:
    """Rows of 8 and 4 MiB: the system maps up to 2 MiB around what is read."""
    arrays = {"image": np.ones((1, 2, 2, 2**21), np.float32), "label": np.zeros((2, 2, 2**21), np.int16)}
    found = DiskCache(tmp_path, full=False).read(KEY, {name: a.shape for name, a in arrays.items()}, lambda: arrays)
    image, label = (torch.from_dlpack(found[name]) for name in arrays)
    crop(image, label, np.array([0.5, 0.5, 2.0**20]), [4, 4, 16], mirror)
    maps = Path("/proc/self/smaps").read_text()
    (kib,) = re.findall(rf"/{KEY}\.arrays\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    assert 0 < int(kib) * 2**10 <= (image.nbytes + label.nbytes) / 2


def test_the_scale_of_ct_follows_the_training_cases(data: Data) -> None:
    for fold in (0, 1, 0):
        assert are_as_prepared(replace(data, intensity="ct", fold=fold, folds=2))


ROOM = 100 * 2**20


def limit_addresses() -> None:
    """Once it prepares cases, the process may take ROOM more than it has."""

    def limit() -> None:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:")]
        most = int(line.split()[1]) * 2**10 + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    call(job, "prepare_data", 1, limit)


@promise(
    "Data",
    "prepared cases that do not fit into memory",
    "refused; with `data.cache=disk` they train, whatever `ulimit -d` and `ulimit -v` allow",
)
@without("unet3d.data.cache.can_stay_mapped", yes)
@pytest.mark.slow
def test_more_data_than_the_process_may_take_trains_from_disk(tmp_path: Path) -> None:
    """34 cases of 88^3 voxels, 6 bytes each once prepared, are a third more than ROOM; every one is visited."""
    voxels = np.random.default_rng(0).integers(0, 1000, (88, 88, 88), np.int16)
    decathlon(tmp_path, ())
    listed = [{"image": f"imagesTr/{number}.nii", "label": f"labelsTr/{number}.nii"} for number in range(34)]
    rewrite(tmp_path, training=listed)
    for number, entry in enumerate(listed):
        voxels[0, 0, 0] = 2000 + number  # no two cases are the same
        write(tmp_path / entry["image"], voxels)
        write(tmp_path / entry["label"], (voxels > 900).astype(np.uint8))
    words = [word for word in TINY if "phantom" not in word] + ["data=decathlon", f"data.root={tmp_path}"]
    words += ["data.cache=disk", f"data.cache_root={tmp_path}/cache", "data.intensity=zscore", "hydra.run.dir=run"]
    words += ["data.val_fraction=0.01", "eval_every=0", "inference.overlap=0", "batch=4", "steps=9"]
    done = train(tmp_path, *words, hook=limit_addresses)
    assert done.code == 0, done.err
    assert sum("train/loss" in record for record in records(tmp_path / "run")) == 9


def kill_within_a_file() -> None:
    """At the second array of the third case."""
    call(cache, "write_array", ARRAYS * 2 + 2, lambda: send(signal.SIGKILL))


@promise(
    "Data",
    "SIGKILL while cases are prepared on disk",
    "whole cases stay, half files do not count, and the next run continues; living writers are left alone",
)
@pytest.mark.slow
def test_killed_while_preparing_the_next_run_goes_on(finished: Path, tmp_path: Path) -> None:
    """To the weights and scores of a run that keeps its cases in memory."""
    data = Data(cache_root=str(tmp_path / "cache"))
    words = [*TINY, "amp=true", "ckpt=2", f"data.root={finished.parent / 'data/phantom'}"]
    words += ["data.cache=disk", f"data.cache_root={data.cache_root}"]
    assert train(tmp_path, *words, "hydra.run.dir=a", hook=kill_within_a_file).code == -signal.SIGKILL
    before = entries(data)
    whole = {name: found for name, found in before.items() if name.endswith(".arrays")}
    assert len(whole) == 2 < len(before)
    done = train(tmp_path, *words, "hydra.run.dir=b")
    assert done.code == 0, done.err
    assert told([line for line in done.out.splitlines() if str(data.cache_root) in line], [["4 ", " 0.1 MiB ", " 2 "]])
    after = entries(data)
    assert whole.items() <= after.items() and len(after) == 4 and all(name.endswith(".arrays") for name in after)
    assert same(tmp_path / "b", finished)
    assert (tmp_path / "b/scores.csv").read_bytes() == (finished / "scores.csv").read_bytes()


@promise(
    "Data",
    "several processes that prepare the same cases",
    "a case may be prepared twice, with the same bytes; files are whole at any moment",
)
def test_two_that_make_a_key_at_once_both_have_it_whole(tmp_path: Path) -> None:
    first, second = DiskCache(tmp_path, full=True), DiskCache(tmp_path, full=True)
    made = first.read(KEY, ONE, lambda: second.read(KEY, ONE, lambda: NUMBERS))
    for found in (made, second.read(KEY, ONE, lambda: pytest.fail("made again"))):
        assert np.array_equal(found["voxels"], NUMBERS["voxels"])
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.arrays"]


@promise("Data", "SIGKILL while cases are ...")
@without("unet3d.data.cache.remove_abandoned", nothing)
def test_what_the_dead_have_left_takes_no_room(tmp_path: Path) -> None:
    store, left = DiskCache(tmp_path, full=False), tmp_path / f".unet3d-{'0' * 16}.tmp"
    left.touch()
    assert store.room() > 0
    assert not left.exists()


def blind_to_files(hashes: object, *options: object) -> str:
    """Name all cases on disk by the options alone."""
    return key_of(*options)


def blind_to_options(hashes: object, *options: object) -> str:
    """Name a case on disk by its files alone."""
    return key_of(hashes)


@promise("Data", "a file or an ...")
@without("unet3d.data.prepare.key_of", blind_to_files)
@without("unet3d.data.prepare.key_of", blind_to_options)
def test_files_and_options_that_change_have_other_entries(data: Data) -> None:
    for seed, count in ((0, 2), (9, 3), (0, 3)):
        write(Path(data.root or "") / "imagesTr/a.nii.gz", image(SHAPE, seed))
        assert are_as_prepared(data)
        assert len(entries(data)) == count
    for count, (name, value) in enumerate((("intensity", "none"), ("ignore", 200), ("affine", "qform")), start=1):
        data = replace(data, **{name: value})
        assert are_as_prepared(data)
        assert len(entries(data)) == 3 + 2 * count


@promise("Data", "a file or an ...")
@without("unet3d.data.prepare.have_changed", no)
def test_a_file_that_changes_while_it_is_prepared_is_not_kept(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, hash and voxels are of the same file."""
    read = prepare.read_volume

    def then_changed(one: Case, *of: Any) -> object:
        volume = read(one, *of)
        if one.id == "b":
            write(one.images[0], image(SHAPE, seed=9))
        return volume

    monkeypatch.setattr(prepare, "read_volume", then_changed)
    with pytest.raises(UserError, match=r"^b: .*imagesTr/b\.nii\.gz: changed [^\n]*; start again$"):
        prepare_data(data)
    assert len(entries(data)) == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def smaller(path: Path, name: str) -> None:
    """Cut one of the arrays, with digests that are right."""
    shapes = {"image": (1, *SHAPE), "label": SHAPE, "centres": (None, 4), "replaced": (), "digest": (DIGEST,)}
    store = DiskCache(path.parent, full=False)
    arrays = store.read(path.stem, shapes, dict)
    store._write(path.stem, arrays | {name: arrays[name][..., :3]}, shapes)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flip": flip,
    "empty": lambda path: path.write_bytes(b""),
    "absent": Path.unlink,
    "pipe": lambda path: replaced(path, os.mkfifo),
    "link": lambda path: replaced(path, lambda path: path.symlink_to("/dev/zero")),
    "small image": partial(smaller, name="image"),
    "small label": partial(smaller, name="label"),
    "small centres": partial(smaller, name="centres"),
    "small digest": partial(smaller, name="digest"),
}


@promise("data sets", "no link in `data.cache_root` ...")
@promise(
    "Data",
    "a prepared file that is truncated, changed, replaced by another, a pipe or a link, or removed, also "
    "during a run; arrays of another size",
    "prepared again",
)
@without("unet3d.data.cache.DiskCache._compare", nothing, only="flip")
@pytest.mark.parametrize("kind", [*DAMAGE])
def test_a_damaged_file_is_made_again(data: Data, kind: str) -> None:
    prepare_data(data)
    for name in entries(data):
        DAMAGE[kind](Path(data.cache_root or "") / name)
    damaged = entries(data)
    assert are_as_prepared(data)
    assert len(entries(data)) == 2 and not {*damaged.values()} & {*entries(data).values()}


def seal(content: bytes) -> bytes:
    """Return content behind digests that are right."""
    file = io.BytesIO(bytes(2 * cache.DIGEST) + content)
    return cache._digest(file, full=False) + cache._digest(file, full=True) + content


class Command:
    """Runs where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("pickle-ran",)


def loaded(file: IO[bytes], shapes: object) -> dict[str, np.ndarray]:
    """Read a file as numpy does when it is told to trust it."""
    file.seek(2 * cache.DIGEST)
    return {"voxels": np.load(file, allow_pickle=True)}


FORGED = [np.array(shape, np.int64).tobytes() for shape in ((-1, 20), (2**62, 2**62), (2, 2**20), ())]


@promise(
    "data sets",
    "files of `data.cache=disk` are mapped as numbers; archives, pickles, objects and arrays of other "
    "sizes are not used, whatever their digests say",
)
@without("unet3d.data.cache._mapped", loaded, only="pickle")
@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Command()), *FORGED],
    ids=["pickle", "negative", "overflow", "beyond", "none"],
)
def test_digests_of_a_stranger_cannot_make_it_load_objects_or_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{KEY}.arrays").write_bytes(seal(content))
    found = DiskCache(tmp_path, full=True).read(KEY, ONE, lambda: NUMBERS)["voxels"]
    assert np.array_equal(found, NUMBERS["voxels"])
    assert not Path("pickle-ran").exists()


@promise(
    "data sets",
    "no link in `data.cache_root` is followed: nothing outside is read, written or removed; a pipe is not waited for",
)
@promise("Data", "a link or a folder in place of a prepared case", "replaced; refused; nothing behind it is touched")
def test_a_link_is_replaced_and_what_is_behind_it_stays(tmp_path: Path) -> None:
    """Whoever may write to a cache that is shared may not make others read and write files of their own."""
    store, victim, path = DiskCache(tmp_path, full=False), tmp_path / "mine", tmp_path / f"{KEY}.arrays"
    store.read(KEY, ONE, lambda: {"voxels": NUMBERS["voxels"] + 1})
    path.rename(victim)
    before = victim.read_bytes()
    path.symlink_to(victim)
    assert np.array_equal(store.read(KEY, ONE, lambda: NUMBERS)["voxels"], NUMBERS["voxels"])
    assert victim.read_bytes() == before and not path.is_symlink()
    replaced(path, Path.mkdir)
    with pytest.raises(UserError, match=r"^data\.cache=disk: .* \(Is a directory\); .*data\.cache_root=PATH$"):
        store.read(KEY, ONE, lambda: NUMBERS)


digest = cache._digest


def of_samples(file: IO[bytes], full: bool) -> bytes:
    """Take the digest of a sample of the bytes for that of all."""
    return digest(file, full=False)


@promise("Data", "a prepared file that ...")
@without("unet3d.data.cache._digest", of_samples)
def test_bytes_between_the_sampled_ones_are_compared_on_request(tmp_path: Path) -> None:
    arrays = {"voxels": np.zeros((2, 10**6), np.float32)}
    for full in (False, True):
        DiskCache(tmp_path, full).read(KEY, ONE, lambda: arrays)
        with (tmp_path / f"{KEY}.arrays").open("r+b") as file:
            file.seek(10**5)
            file.write(b"\xff")
        assert DiskCache(tmp_path, full).read(KEY, ONE, lambda: arrays)["voxels"].any() != full


@promise("Data", "a prepared file that ...")
def test_a_cache_that_is_removed_during_a_run_is_made_again(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "can_stay_mapped", no)
    found = prepare_data(data)
    before = found.read(found.train[0])
    for name in entries(data):
        (Path(data.cache_root or "") / name).unlink()
    again = found.read(found.train[0])
    assert again is not before and equal(again, before)


@promise("Data", "a cache's disk that ...")
def test_a_disk_that_fills_while_preparing_is_one_line_and_nothing_half(
    data: Data, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.cache_root = str(small_disk / "cache")
    monkeypatch.setattr(cache, "write_array", cache.write_array)
    call(cache, "write_array", ARRAYS + 2, lambda: fill(small_disk))  # as the second case is written
    wanted = rf"^data\.cache=disk: {small_disk}/cache: .*\(No space left on device\); .*data\.cache_root=PATH$"
    with pytest.raises(UserError, match=wanted):
        prepare_data(data)
    assert len(entries(data)) == 1 and all(name.endswith(".arrays") for name in entries(data))
    (small_disk / "filler").unlink()
    assert are_as_prepared(data)


def endless(cache: DiskCache) -> int:
    """Return more bytes than a disk has."""
    return 2**60


@promise("Data", "a cache's disk that is full; a folder that cannot be used", "one line, and no unfinished case")
@without("unet3d.data.cache.DiskCache.room", endless)
def test_too_small_a_disk_is_refused_before_a_case_is_written(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=2**9))
    with pytest.raises(UserError, match=r"^data\.cache=disk: .*/cache: 0\.1 MiB .* 0\.0 MiB .*data\.cache_root$"):
        prepare_data(data)
    assert not entries(data)


@promise("Data", "a cache's disk that ...")
def test_a_folder_that_cannot_be_used_is_one_line(data: Data) -> None:
    data.cache_root = f"{data.root}/dataset.json"
    with pytest.raises(UserError, match=r"^data\.cache=disk: .*json: .*\(File exists\); .*data\.cache_root=PATH$"):
        prepare_data(data)


make_folder = Path.mkdir


def open_to_all(path: Path, mode: int = 0o777, **named: bool) -> None:
    """Make a folder that anybody may read."""
    make_folder(path, **named)


@promise("data sets", "the default folder of `data.cache=disk` is made for its owner alone")
@without("pathlib.Path.mkdir", open_to_all)
def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder(None) == tmp_path / "unet3d" and cache.folder("a") == Path("a")
    DiskCache(cache.folder(None), full=False)
    assert (tmp_path / "unet3d").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(("written", "now"), [("true", "memory"), ("false", "off"), ("disk", "disk")])
def test_off_may_be_what_yaml_makes_of_it(written: str, now: str) -> None:
    assert compose.compose([f"data.cache={written}"]).data.cache == now
