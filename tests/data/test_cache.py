"""data.cache=disk: the patches of data.cache=memory to the bit, whole files or none, and the memory of a patch."""

import functools
import io
import itertools
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from guards import nothing, without
from nifti_files import decathlon, image, rewrite, told, write
from promises import promise
from training import TINY, Ended, call, fill, records, same, send, status, train

from unet3d.base import files
from unet3d.base.errors import UserError
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Augment, Config, Data
from unet3d.data import cache, loader, prepare
from unet3d.data.cache import DiskCache, key_of
from unet3d.data.cases import Case
from unet3d.data.check import DIGEST
from unet3d.data.patches import Patches, PreparedCase, crop
from unet3d.data.prepare import PreparedData, prepare_data
from unet3d.run import run as job

SHAPE = (21, 18, 13)
ARRAYS = 5  # of a case
SEMI = {"semi": True, "sparse": [3, 3, 2], "scored": [2, 2, 2]}
ALWAYS = {f"{name}_p": 1.0 for name in ("spatial", "noise", "blur", "contrast", "gamma", "low_resolution")}


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Four cases, kept in tmp_path/cache."""
    found = decathlon(tmp_path / "set", shape=SHAPE)
    found.patch, found.cache, found.cache_root = [12, 12, 8], "disk", str(tmp_path / "cache")
    return found


def ready(data: Data) -> PreparedData:
    return prepare_data(data)


def stream(data: Data, workers: int, tile: list[int]) -> list[list[Batch]]:
    """Three steps of a run."""
    config = Config(data=data, workers=workers, batch=2)
    found = prepare_data(config.data)
    patches = Patches(lambda index: found.read_train(found.train[index]), data, 3, tile)
    return list(islice(loader.batches(patches, [one.id for one in found.train], config), 3))


def equal(a: PreparedCase, b: PreparedCase) -> bool:
    voxels = np.array_equal(a.centres, b.centres) and a.centres.dtype == b.centres.dtype
    return torch.equal(a.image, b.image) and torch.equal(a.label, b.label) and voxels and a.spacing == b.spacing


def entries(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with what changes when it is written again."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): ((found := path.stat()).st_ino, found.st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    ("workers", "changes", "tile"),
    [
        (0, {"augment": Augment(spatial_p=0, mirror=[])}, [12, 12, 8]),
        (2, {"augment": Augment(elastic=2, **ALWAYS), "spacing": [1.2, 1.2, 2.0]}, [12, 12, 8]),
        (0, {"patch": [24, 24, 24], "foreground": 1.0, "intensity": "zscore"}, [24, 24, 24]),
        (0, {"patch": [16, 16, 16], "augment": Augment(spatial_p=0.5)}, [8, 8, 8]),
        (0, {**SEMI, "ignore": 9}, [12, 12, 8]),
        (2, {**SEMI, "ignore": 9}, [12, 12, 8]),
    ],
    ids=["crop", "augmented", "beyond the border", "mirrored context", "sparse", "sparse with workers"],
)
def test_patches_are_the_same_to_the_bit_wherever_cases_are_kept(
    data: Data, workers: int, changes: dict[str, Any], tile: list[int]
) -> None:
    for name, value in changes.items():
        setattr(data, name, value)
    found = []
    for data.cache in ("memory", "off", "disk", "disk"):
        found.append([batch for step in stream(data, workers, tile) for batch in step])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.image, b.image) and torch.equal(a.label, b.label) and a.cases == b.cases


def from_disk(finished: Path, place: Path) -> list[str]:
    """Return the options of the run `finished`, which keeps its cases in memory, but with a cache in `place`."""
    words = [*TINY, "amp=true", "ckpt=2", f"data.root={finished.parent / 'data/phantom'}"]
    return [*words, "data.cache=disk", f"data.cache_root={place / 'cache'}"]


def size_lines(done: Ended, root: Path) -> list[str]:
    """Return what the run printed of the cache in `root`."""
    return [line for line in done.out.splitlines() if str(root) in line]


@pytest.mark.slow
def test_a_run_has_the_same_weights_and_scores(finished: Path, tmp_path: Path) -> None:
    done = train(tmp_path, *from_disk(finished, tmp_path), "workers=1", "hydra.run.dir=run")
    assert done.code == 0, done.err
    assert same(tmp_path / "run", finished)
    assert (tmp_path / "run/scores.csv").read_bytes() == (finished / "scores.csv").read_bytes()
    assert told(size_lines(done, tmp_path / "cache"), [["4 ", " 0.1 MiB ", " 4 "]])


def test_nothing_is_read_or_written_again_by_the_next_run(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    first, before = ready(data), entries(Path(data.cache_root or ""))
    monkeypatch.setattr(prepare, "read_volume", lambda *of: pytest.fail("a volume is read"))
    second = ready(data)
    assert entries(Path(data.cache_root or "")) == before
    assert all(equal(first.read(one), second.read(one)) for one in first.train)


def test_other_numbers_need_another_format(data: Data) -> None:
    """Where this fails, prepared cases have changed: raise FORMAT, so that no older file is read, then correct it."""
    data.spacing, data.ignore = [1.3, 1.1, 2.0], 2
    found = ready(data)
    one = found.read(found.train[0])
    ramp = torch.linspace(-1, 1, one.label.numel(), dtype=torch.float64)
    image = (one.image.double().flatten() * ramp).sum().item()
    voxels = [int(one.centres_of(number).astype(np.int64).sum()) for number in range(one.classes)]
    assert (cache.FORMAT, one.spacing, int(one.label.sum()), voxels) == (4, (1.3, 1.1, 2.0), -210_031, [57_369])
    assert image == pytest.approx(-119.06, rel=1e-3)


def test_replaced_voxels_are_reported_by_every_run(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    stored = image(SHAPE)
    stored[1, 2, 3] = np.nan
    write(Path(data.root or "") / "imagesTr/a.nii.gz", stored)
    data.nonfinite = "zero"
    for _ in range(2):
        ready(data)
        assert told(capsys.readouterr().err.splitlines(), [["warning: a: 1 ", "NaN", "data.nonfinite=zero"]])


def touched(address: int) -> int:
    """Bytes of the mapping at this address that are in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        low, _, high = line.split()[0].partition("-")
        if high and int(low, 16) <= address < int(high, 16):
            return next(int(words[1]) * 2**10 for words in map(str.split, lines) if words[0] == "Rss:")
    raise AssertionError("no such mapping")


@promise("Data", "prepared cases that do ...")
@pytest.mark.parametrize("mirror", [False, True])
def test_a_patch_touches_its_own_bytes_alone(tmp_path: Path, mirror: bool) -> None:
    """Rows of 8 MiB: the system maps up to 2 MiB around what is read."""
    shape = (2, 2, 2**21)
    arrays = {"image": np.ones((1, *shape), np.float32), "label": np.zeros(shape, np.int16)}
    shapes = {name: array.shape for name, array in arrays.items()}
    found = DiskCache(tmp_path, full=False).read(key_of("a"), shapes, lambda: arrays)
    volume, classes = torch.from_dlpack(found["image"]), torch.from_dlpack(found["label"])
    crop(volume, classes, np.array([0.5, 0.5, 2.0**20]), [4, 4, 16], mirror)
    assert 0 < touched(volume.data_ptr()) <= volume.nbytes / 2


ROOM = 100 * 2**20


def limit(kind: int, field: str) -> None:
    """This process may take ROOM more than it has."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    most = int(line.split()[1]) * 2**10 + ROOM
    resource.setrlimit(kind, (most, most))


def limit_addresses() -> None:
    call(job, "prepare_data", 1, lambda: limit(resource.RLIMIT_AS, "VmSize"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """34 cases of 88^3 voxels, 6 bytes each once prepared: a third more than ROOM."""
    root, shape = tmp_path_factory.mktemp("large"), (88, 88, 88)
    names = [f"case{number}" for number in range(34)]
    decathlon(root, ())
    rewrite(root, training=[{"image": f"./imagesTr/{n}.nii", "label": f"./labelsTr/{n}.nii"} for n in names])
    voxels = np.random.default_rng(0).integers(0, 1000, shape, np.int16)
    for number, name in enumerate(names):
        voxels[0, 0, 0] = 2000 + number  # no two cases are the same
        write(root / "imagesTr" / f"{name}.nii", voxels)
        write(root / "labelsTr" / f"{name}.nii", (voxels > 900).astype(np.uint8))
    return root


def learn(place: Path, root: Path, cache: str, hook: Callable[[], None] | None, *more: str) -> Ended:
    words = ["data=decathlon", f"data.root={root}", f"data.cache={cache}", f"data.cache_root={root}/cache"]
    words += [word for word in TINY if "phantom" not in word] + ["data.intensity=zscore", "data.val_fraction=0.01"]
    words += ["eval_every=0", "inference.overlap=0", "batch=4", "steps=9"]
    return train(place, *words, *more, f"hydra.run.dir={cache}", hook=hook)


@promise(
    "Data",
    "prepared cases that do not fit into memory",
    "refused; with `data.cache=disk` they train, whatever `ulimit -d` and `ulimit -v` allow",
)
@pytest.mark.slow
def test_more_data_than_the_process_may_take_trains_from_disk(tmp_path: Path, large: Path) -> None:
    """Every case is visited, and no map stays open: addresses are limited."""
    done = learn(tmp_path, large, "memory", limit_addresses)
    assert done.code == 5, done.err
    done = learn(tmp_path, large, "disk", limit_addresses)
    assert done.code == 0, done.err
    assert sum("train/loss" in record for record in records(tmp_path / "disk")) == 9


def at_half(count: int, act: Callable[[], None]) -> None:
    """`act` when half of the count-th array is written."""
    write, calls = cache.write_array, itertools.count(1)

    def half(file: IO[bytes], array: np.ndarray) -> None:
        content = io.BytesIO()
        write(content, array)
        file.write(content.getvalue()[: content.tell() // 2])
        file.flush()
        if next(calls) == count:
            act()
        file.write(content.getvalue()[content.tell() // 2 :])

    cache.write_array = half


def kill_within_a_file() -> None:
    at_half(ARRAYS * 2 + 1, lambda: send(signal.SIGKILL))


@promise(
    "Data",
    "SIGKILL while cases are prepared on disk",
    "whole cases stay, half files do not count, and the next run continues; living writers are left alone",
)
@pytest.mark.slow
def test_killed_while_preparing_the_next_run_goes_on(finished: Path, tmp_path: Path) -> None:
    words = from_disk(finished, tmp_path)
    assert train(tmp_path, *words, "hydra.run.dir=a", hook=kill_within_a_file).code == -signal.SIGKILL
    before = entries(tmp_path / "cache")
    whole = {name: found for name, found in before.items() if name.endswith(".arrays")}
    assert len(whole) == 2 < len(before)
    done = train(tmp_path, *words, "hydra.run.dir=b")
    assert done.code == 0 and told(size_lines(done, tmp_path / "cache"), [["4 ", " 2 "]]), done.err
    after = entries(tmp_path / "cache")
    assert whole.items() <= after.items() and len(after) == 4 and all(name.endswith(".arrays") for name in after)
    assert same(tmp_path / "b", finished)


ONE = {"voxels": (2, None)}
NUMBERS = {"voxels": np.arange(10, dtype=np.float32).reshape(2, 5)}
Queue = multiprocessing.SimpleQueue


def make_half(root: Path, key: str, reached: "Queue[str]", go: "Queue[str]") -> None:
    """Make the key, half-way until `go`."""
    at_half(1, lambda: [reached.put("half"), go.get()][0])
    DiskCache(root, full=False).read(key, ONE, lambda: NUMBERS)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[tuple[multiprocessing.process.BaseProcess, str, "Queue[str]"]]:
    """A living process that is half-way through the file of a key."""
    context = multiprocessing.get_context("fork")
    reached, go, key = context.SimpleQueue(), context.SimpleQueue(), key_of("made")
    child = context.Process(target=make_half, args=(tmp_path, key, reached, go))
    child.start()
    assert reached.get() == "half"
    yield child, key, go
    child.kill()
    child.join()


@promise("Data", "SIGKILL while cases are ...")
@without("unet3d.data.cache.remove_abandoned", nothing)
def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path, maker: tuple) -> None:
    child, _, _ = maker
    cache, unfinished = DiskCache(tmp_path, full=False), [*tmp_path.glob(".*.tmp")]
    cache.room()
    assert len(unfinished) == 1 and unfinished[0].exists()
    child.kill()
    child.join()
    files.remove_abandoned.cache_clear()  # as in another process
    cache.room()
    assert not [*tmp_path.iterdir()]


@promise(
    "Data",
    "several processes that prepare the same cases",
    "a case may be prepared twice, with the same bytes; files are whole at any moment",
)
def test_two_that_make_a_key_at_once_both_have_it_whole(tmp_path: Path, maker: tuple) -> None:
    child, key, go = maker
    cache = DiskCache(tmp_path, full=True)
    assert not cache.holds(key)
    first = cache.read(key, ONE, lambda: NUMBERS)["voxels"]
    go.put("on")
    child.join()
    second = DiskCache(tmp_path, full=True).read(key, ONE, lambda: pytest.fail("made again"))["voxels"]
    assert child.exitcode == 0 and np.array_equal(first, second) and np.array_equal(first, NUMBERS["voxels"])
    assert [path.name for path in tmp_path.iterdir()] == [f"{key}.arrays"]


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
    root = Path(data.cache_root or "")
    data.intensity = "none"
    first = ready(data)
    old, count = first.read(first.train[0]), len([*root.iterdir()])
    write(Path(data.root or "") / "imagesTr/a.nii.gz", image(SHAPE, seed=9))
    second = ready(data)
    assert np.array_equal(second.read(second.train[0]).image[0], image(SHAPE, seed=9)[::-1, ::-1])
    assert len([*root.iterdir()]) == count + 1
    write(Path(data.root or "") / "imagesTr/a.nii.gz", image(SHAPE, seed=0))
    third = ready(data)
    assert equal(third.read(third.train[0]), old) and len([*root.iterdir()]) == count + 1
    data.intensity = "zscore"
    fourth = ready(data)
    assert abs(fourth.read(fourth.train[0]).image.mean()) < 1e-5 and len([*root.iterdir()]) == count + 5
    data.ignore = 200
    ready(data)
    assert len([*root.iterdir()]) == count + 9
    data.affine = "qform"
    ready(data)
    assert len([*root.iterdir()]) == count + 13


def test_the_scale_of_ct_follows_the_training_cases(data: Data) -> None:
    """So does every image; its training cases are not read again for it."""
    first = ready(data)
    assert first.read.intensity[0].kind == "ct"
    data.fold, data.folds = 0, 2
    second = ready(data)
    data.cache = "off"
    third = ready(data)
    assert second.read.intensity == third.read.intensity != first.read.intensity
    assert all(equal(second.read(one), third.read(one)) for one in second.train)


@promise("Data", "a file or an ...")
def test_a_file_that_changes_while_it_is_prepared_is_not_kept(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    read = prepare.read_volume

    def then_changed(one: Case, *of: object) -> object:
        volume = read(one, *of)  # type: ignore[arg-type]
        if one.id == "b":
            write(one.images[0], image(SHAPE, seed=9))
        return volume

    data.intensity = "zscore"
    monkeypatch.setattr(prepare, "read_volume", then_changed)
    with pytest.raises(UserError, match=r"^b: .*imagesTr/b\.nii\.gz: [^\n]*$"):
        ready(data)
    assert len(entries(Path(data.cache_root or ""))) == 3


class Command:
    """Runs where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("pickle-ran",)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def be_a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Command()))


def hold_objects(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Command()], object), allow_pickle=True)


def pair_of(root: Path, cache: str) -> Data:
    """Return the two cases of `pair`, in a copy of its folder."""
    return Data("decathlon", str(root / "set"), cache=cache, cache_root=str(root / "cache"), intensity="zscore")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two cases, and with what is kept of them on disk: copy it to change it."""
    root = tmp_path_factory.mktemp("pair")
    decathlon(root / "set", ("a", "b"), SHAPE)
    ready(pair_of(root, "disk"))
    return root


def seal(content: bytes) -> bytes:
    """Return content behind digests that are right."""
    file = io.BytesIO(bytes(2 * cache.DIGEST) + content)
    return cache._digest(file, full=False) + cache._digest(file, full=True) + content


def empty(path: Path) -> None:
    path.write_bytes(b"")


def be_a_foreign_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@promise("data sets", "no link in `data.cache_root` ...")
@promise(
    "Data",
    "a prepared file that is truncated, changed, replaced by another, a pipe or a link, or removed, also "
    "during a run; arrays of another size",
    "prepared again",
)
@without("unet3d.data.cache.DiskCache._compare", nothing, only="flip")
@pytest.mark.parametrize(
    "damage",
    [cut, flip, empty, be_a_pickle, hold_objects, be_a_foreign_array, Path.unlink, be_a_pipe, be_a_link],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_made_again_and_never_run(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "cache"
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    sound = ready(pair_of(tmp_path, "memory"))
    for path in [*root.glob("*.arrays")]:
        damage(path)
    saved, rebuilt = entries(root), ready(pair_of(tmp_path, "disk"))
    assert all(equal(rebuilt.read(one), sound.read(one)) for one in (*sound.train, *sound.val))
    assert not (tmp_path / "pickle-ran").exists() and len(entries(root)) == 2
    assert not {*saved.values()} & {*entries(root).values()}


def loaded(file: IO[bytes], shapes: object) -> dict[str, np.ndarray]:
    """Read an array as numpy does when it is told to trust the file."""
    file.seek(2 * cache.DIGEST)
    return {"voxels": np.load(file, allow_pickle=True)}


@promise(
    "data sets",
    "files of `data.cache=disk` are mapped as numbers; archives, pickles, objects and arrays of other "
    "sizes are not used, whatever their digests say",
)
@without("unet3d.data.cache._mapped", loaded)
def test_digests_of_a_stranger_cannot_make_it_load_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"{key_of('a')}.arrays"
    for damage in (be_a_pickle, hold_objects):
        damage(path)
        path.write_bytes(seal(path.read_bytes()))
        found = DiskCache(tmp_path, full=True).read(key_of("a"), ONE, lambda: NUMBERS)["voxels"]
        assert np.array_equal(found, NUMBERS["voxels"]) and not (tmp_path / "pickle-ran").exists()


def half(array: np.ndarray) -> np.ndarray:
    return array[..., : array.shape[-1] // 2]


@promise("data sets", "files of `data.cache=disk` are ...")
@promise("Data", "a prepared file that ...")
@pytest.mark.parametrize("name", ["image", "label", "centres", "digest"])
def test_arrays_that_cannot_be_the_case_are_made_again_though_their_digests_are_right(
    pair: Path, tmp_path: Path, name: str
) -> None:
    shapes = {"image": (1, *SHAPE), "label": SHAPE, "centres": (None, 4), "replaced": (), "digest": (DIGEST,)}
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    sound = ready(pair_of(tmp_path, "memory"))
    store = DiskCache(tmp_path / "cache", full=False)
    for path in (tmp_path / "cache").glob("*.arrays"):
        with path.open("rb") as file:
            arrays = cache._mapped(file, shapes)
        store._write(path.stem, arrays | {name: half(arrays[name])}, shapes)
    rebuilt = ready(pair_of(tmp_path, "disk"))
    assert all(equal(rebuilt.read(one), sound.read(one)) for one in (*sound.train, *sound.val))


@pytest.mark.parametrize("shape", [(-1, 20), (2**62, 2**62), (2, 2**20), ()])
def test_an_array_with_a_forged_shape_is_made_again(tmp_path: Path, shape: tuple[int, ...]) -> None:
    content = np.array(shape, np.int64).tobytes()
    (tmp_path / f"{key_of('a')}.arrays").write_bytes(seal(content))
    found = DiskCache(tmp_path, full=True).read(key_of("a"), ONE, lambda: NUMBERS)["voxels"]
    assert np.array_equal(found, NUMBERS["voxels"])


@promise(
    "data sets",
    "no link in `data.cache_root` is followed: nothing outside is read, written or removed; a pipe is not waited for",
)
@promise("Data", "a link or a folder in place of a prepared case", "replaced; refused; nothing behind it is touched")
def test_a_link_is_replaced_and_what_is_behind_it_stays(tmp_path: Path) -> None:
    """Whoever may write to a cache that is shared may not make others read and write files of their own."""
    store, victim, path = DiskCache(tmp_path, full=False), tmp_path / "mine", tmp_path / f"{key_of('a')}.arrays"
    store.read(key_of("b"), ONE, lambda: {"voxels": NUMBERS["voxels"] + 1})
    (tmp_path / f"{key_of('b')}.arrays").rename(victim)
    before = victim.read_bytes()
    path.symlink_to(victim)
    assert np.array_equal(store.read(key_of("a"), ONE, lambda: NUMBERS)["voxels"], NUMBERS["voxels"])
    assert victim.read_bytes() == before and not path.is_symlink()
    (tmp_path / f"{key_of('c')}.arrays").mkdir()
    with pytest.raises(UserError, match=r"^data\.cache=disk: .* \(Is a directory\); .*data\.cache_root=PATH$"):
        store.read(key_of("c"), ONE, lambda: NUMBERS)


digest = cache._digest


def of_samples(file: IO[bytes], full: bool) -> bytes:
    """Take the digest of a sample of the bytes for that of all."""
    return digest(file, full=False)


@promise("Data", "a prepared file that ...")
@without("unet3d.data.cache._digest", of_samples)
def test_bytes_between_the_sampled_ones_are_compared_on_request(tmp_path: Path) -> None:
    arrays = {"voxels": np.zeros((2, 10**6), np.float32)}
    path = tmp_path / f"{key_of('a')}.arrays"
    for full in (False, True):
        DiskCache(tmp_path, full).read(key_of("a"), ONE, lambda: arrays)
        with path.open("r+b") as file:
            file.seek(10**5)
            file.write(b"\xff")
        found = DiskCache(tmp_path, full).read(key_of("a"), ONE, lambda: arrays)["voxels"]
        assert found.any() != full


@promise("Data", "a prepared file that ...")
def test_a_cache_that_is_removed_during_a_run_is_made_again(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "can_stay_mapped", lambda cases: False)
    found = ready(data)
    before = found.read(found.train[0])
    shutil.rmtree(data.cache_root or "")
    Path(data.cache_root or "").mkdir()
    again = found.read(found.train[0])
    assert again is not before and equal(again, before)


@promise("Data", "a cache's disk that ...")
@pytest.mark.slow
def test_a_disk_that_fills_while_preparing_is_one_line_and_nothing_half(small_disk: Path, tmp_path: Path) -> None:
    words = [*TINY, "data.phantom.cases=2", f"data.root={tmp_path / 'phantom'}", "data.cache=disk", "steps=2"]
    words += [f"data.cache_root={small_disk}/cache", "hydra.run.dir=run"]
    done = train(tmp_path, *words, hook=functools.partial(fill_at, small_disk))
    assert done.code == 2 and "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    place = f"error: data.cache=disk: {small_disk}/cache: "
    assert told([line], [[place, "(No space left on device)", "data.cache_root=PATH"]])
    assert status(tmp_path / "run").startswith(line)
    left = entries(small_disk / "cache")
    assert len(left) == 1 and all(name.endswith(".arrays") for name in left)
    (small_disk / "filler").unlink()
    assert train(tmp_path, *words).code == 0


def fill_at(disk: Path) -> None:
    """The disk is full as the second case is written."""
    call(cache, "write_array", ARRAYS + 2, lambda: fill(disk))


def endless(cache: DiskCache) -> int:
    """Return more bytes than a disk has."""
    return 2**60


@promise("Data", "a cache's disk that is full; a folder that cannot be used", "one line, and no unfinished case")
@without("unet3d.data.cache.DiskCache.room", endless)
def test_too_small_a_disk_is_refused_before_a_case_is_written(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    data.intensity = "zscore"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=2**9))
    with pytest.raises(UserError, match=r"^data\.cache=disk: .*/cache: 0\.1 MiB .* 0\.0 MiB .*data\.cache_root$"):
        ready(data)
    assert not entries(Path(data.cache_root or ""))


@promise("Data", "a cache's disk that ...")
def test_a_folder_that_cannot_be_used_is_one_line(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data.cache_root = str(tmp_path / "file")
    with pytest.raises(UserError, match=r"^data\.cache=disk: .*/file: .*\(File exists\); .*data\.cache_root=PATH$"):
        ready(data)


make_folder = Path.mkdir


def open_to_all(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
    """Make a folder that anybody may read."""
    make_folder(path, parents=parents, exist_ok=exist_ok)


@promise("data sets", "the default folder of `data.cache=disk` is made for its owner alone")
@without("pathlib.Path.mkdir", open_to_all)
def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder(None) == tmp_path / "unet3d" and cache.folder("a") == Path("a")
    DiskCache(cache.folder(None), full=False)
    assert (tmp_path / "unet3d").stat().st_mode & 0o77 == 0, "for its owner alone"


@pytest.mark.parametrize(("written", "now"), [("true", "memory"), ("false", "off"), ("off", "off"), ("disk", "disk")])
def test_off_may_be_what_yaml_makes_of_it(written: str, now: str) -> None:
    assert compose.compose([f"data.cache={written}"]).data.cache == now
    assert Data(cache=written == "true").cache == ("memory" if written == "true" else "off")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^data\.cache=dsk: .*\bmemory, disk, off\b.*\bdisk\?$"):
        compose.compose(["data.cache=dsk"])
