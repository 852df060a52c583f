"""Kernels' scratch: what is measured closes the gap to the allocator, and what is only bounded holds it within.

`test_truth.py` holds both against the allocator's own record, row by row.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_truth import allocators_record, config, peak
from torch import nn

from unet3d.errors import UserError
from unet3d.memory import kernels
from unet3d.memory.bounds import most
from unet3d.memory.dry import dry
from unet3d.memory.kernels import Transient, bracket, key, measure, place, probe, read, write
from unet3d.memory.ledger import Ledger, Site, levels
from unet3d.memory.look import Look

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_onednn() -> Iterator[None]:
    """As `torch.backends.mkldnn.flags(enabled=False)`, which also touches a switch that warns."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


def test_without_onednn_the_bracket_holds_the_columns(tmp_path: Path, no_onednn: None) -> None:
    options = config("model=unet_tiny", "data.patch=[16,16,16]")
    ledger = Look("", options, options.model).ledger
    truth, _ = peak(allocators_record(options))
    found = bracket(ledger, {})
    assert 2 * found.low < truth <= found.high


def test_a_call_that_the_table_lacks_widens_the_bracket() -> None:
    ledger = Ledger()
    with dry(), ledger:
        x, one, two = (torch.empty(shape) for shape in ((2, 16, 8, 8, 8), (4, 16, 1, 1, 1), (8, 4, 3, 3, 3)))
        y = nn.functional.conv3d(x, one)
        z = nn.functional.conv3d(y, two)
    first, second = ledger.sites
    alive = x.nbytes + one.nbytes + two.nbytes
    later = alive + y.nbytes
    assert max(levels(ledger)) == later + z.nbytes
    found = bracket(ledger, {key(second): Transient(10**6, 2 * 10**6)})
    assert most(first) < 10**6
    assert found == (later + 10**6, later + 10**6, 1, 1)
    found = bracket(ledger, {key(first): Transient(10**5, 10**5)})
    assert found == (max(alive + 10**5, later + z.nbytes), later + most(second), 1, 1)
    assert bracket(ledger, {key(site): Transient(0, 0) for site in ledger.sites}).low == later + z.nbytes


def sites(layer: type[nn.Module], dtype: torch.dtype, shape: tuple[int, ...], **options: Any) -> list[Site]:
    """A layer's two calls: forward, and backward to its input."""
    ledger = Ledger()
    with dry(), ledger:
        y = layer(shape[1], **options, dtype=dtype)(torch.empty(shape, dtype=dtype, requires_grad=True))
        y.backward(torch.empty_like(y))
    return ledger.sites


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.Conv3d, {"out_channels": 8, "kernel_size": 3, "padding": 1}),
        (nn.Conv3d, {"out_channels": 3, "kernel_size": 1}),
        (nn.Conv3d, {"out_channels": 8, "kernel_size": 3, "stride": 2, "bias": False}),
        (nn.Conv3d, {"out_channels": 8, "kernel_size": 3, "groups": 4}),
        (nn.Conv3d, {"out_channels": 4, "kernel_size": 3, "groups": 4}),
        (nn.Conv3d, {"out_channels": 8, "kernel_size": 3, "dilation": 2}),
        (nn.Conv3d, {"out_channels": 8, "kernel_size": 5}),
        (nn.ConvTranspose3d, {"out_channels": 8, "kernel_size": 2, "stride": 2}),
        (nn.ConvTranspose3d, {"out_channels": 8, "kernel_size": 3, "output_padding": 1, "stride": 2, "groups": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 2])
def test_any_convolution_is_measured_and_within_its_bound(
    layer: type[nn.Module], options: dict[str, int], dtype: torch.dtype, batch: int
) -> None:
    forward, backward = sites(layer, dtype, (batch, 4, 9, 9, 9), **options)
    assert (forward.operation, backward.operation) == ("convolution", "convolution_backward")
    with dry():
        made = layer(4, **options, dtype=dtype)
        result = made(torch.empty(batch, 4, 9, 9, 9, dtype=dtype))
        outputs = result.nbytes, sum(p.nbytes for p in made.parameters()) + batch * 4 * 9**3 * dtype.itemsize
    for site, least in zip((forward, backward), outputs, strict=True):
        found = measure(site, CPU)
        assert least <= found.bytes == found.first_bytes <= most(site)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bound_holds_where_maps_are_the_least_of_it(dtype: torch.dtype) -> None:
    """Weights in deep layers; and buffers of the kernel's own, of one size for any map."""
    deep = sites(nn.Conv3d, dtype, (2, 128, 4, 4, 4), out_channels=128, kernel_size=3, padding=1)
    thin = sites(nn.ConvTranspose3d, dtype, (1, 8, 4, 4, 4), out_channels=8, kernel_size=(1, 3, 3), groups=8, stride=2)
    for site in (*deep, *thin):
        assert measure(site, CPU).bytes <= most(site)


def test_strides_are_part_of_the_key_and_are_measured() -> None:
    ledger = Ledger()
    with dry(), ledger:
        weight, image = torch.empty(8, 4, 3, 3, 3), torch.empty(2, 4, 8, 8, 8)
        for memory_format in (torch.contiguous_format, torch.channels_last_3d):
            nn.functional.conv3d(image.to(memory_format=memory_format), weight)
    plain, last = ledger.sites
    assert key(plain) != key(last)
    assert measure(last, CPU).bytes >= 4 * 2 * 8 * 6**3


def test_what_is_known_is_not_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def note(site: Site, device: torch.device) -> Transient:
        measured.append(key(site))
        return Transient(2 * len(measured), 3 * len(measured))

    monkeypatch.setattr(kernels, "measure", note)
    few = sites(nn.Conv3d, torch.float32, (1, 4, 5, 5, 5), out_channels=2, kernel_size=3)
    more = sites(nn.Conv3d, torch.float32, (2, 4, 5, 5, 5), out_channels=2, kernel_size=3)
    table = probe([*few, *few], CPU)
    assert measured == [key(site) for site in few]
    assert probe(few, CPU) == table and len(measured) == 2
    assert probe([*more, *few], CPU) == table | dict(zip(measured[2:], [(6, 9), (8, 12)], strict=True))
    assert measured == [key(site) for site in (*few, *more)]
    assert [path.name for path in (cache / "unet3d").iterdir()] == [place(CPU).name]  # nothing half-written


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernels.json"
    assert read(path) == {}
    table = {'["convolution",[]]': Transient(0, 1), "other": Transient(2**50, 2**40)}
    write(path, table)
    assert read(path) == table
    assert all(isinstance(entry, Transient) for entry in read(path).values())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"a": [1, 2]',
        b"[" * 100_000,
        b"\xff\xfe",
        b"[1, 2]",
        *(json.dumps({"a": [1, 2], "b\nc": entry}).encode() for entry in (3, [1], [1, 2, 3], [1.0, 2], [True, 2])),
        *(json.dumps({"b": entry}).encode() for entry in ([-1, 2], [1, 2**50 + 1], ["1", 2], {"bytes": 1})),
        b'{"a": [1, ' + b"9" * 5000 + b"]}",
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_a_damaged_table_is_named_in_one_line(cache: Path, text: bytes) -> None:
    path = place(CPU)
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        probe([], CPU)
    message = str(caught.value)
    assert message.startswith(f"{path}: not a table of kernels' memory (") and "Delete it" in message
    assert "\n" not in message
    assert path.read_bytes() == text


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    (cache / "unet3d").write_text("in the way")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        write(place(CPU), {})


def test_a_table_is_for_one_kind_of_machine_and_its_settings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = place(CPU).name
    assert place(CPU).parent == cache / "unet3d"
    assert f"torch-{torch.__version__.lower().replace('+', '-')}" in name
    assert name.endswith("-threads-1.json")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert place(CPU).name.endswith("-threads-2.json")
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert place(CPU).parent == Path.home() / ".cache" / "unet3d"


def test_without_onednn_the_table_is_another(no_onednn: None) -> None:
    assert "-no-onednn-" in place(CPU).name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_both_calls_are_measured() -> None:
    device = torch.device("cuda")
    for site in sites(nn.Conv3d, torch.float32, (2, 16, 16, 16, 16), out_channels=16, kernel_size=3, padding=1):
        found = measure(site, device)
        assert 4 * 2 * 16 * 16**3 <= found.bytes <= found.first_bytes
    assert "cudnn" in place(device).name
