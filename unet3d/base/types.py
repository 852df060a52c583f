"""Small types that all packages share: batches, strips of a volume, tables of text, sizes."""

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from unet3d.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # a voxel without label, in label tensors: torch's own default for cross-entropy
MIB = 2**20


def budget_bytes(text: str) -> int:
    """Bytes of `8GiB`, `900 MiB`, `1.5GB`. Raises UserError."""
    units = {"MIB": MIB, "GIB": 2**30, "MB": 10**6, "GB": 10**9}
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,20})?)\s*([MG]i?B)", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise UserError(f"budget={text}: give an amount and a unit, MiB or GiB, e.g. budget=8GiB")
    return int(float(found[1]) * units[found[2].upper()])


def host_bytes() -> int:
    """All memory of this machine; a container or a scheduler may allow less."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Table(NamedTuple):
    """Headings with their units, and rows of text."""

    columns: list[str]
    rows: list[list[str]]


def mib(size: float) -> str:
    """Bytes as MiB (2^20 bytes), to a tenth."""
    return f"{size / MIB:,.1f}"


def percent(part: float, whole: float) -> str:
    """A share of `whole`; "" where that is 0."""
    return f"{part / whole:.1%}" if whole else ""


class Batch(NamedTuple):
    """Patches and their label maps, on any device."""

    image: "Tensor"  # N C D H W, float32
    label: "Tensor"  # N D H W, integers
    cases: tuple[str, ...] = ()  # one id for each patch


class ProbabilityBlock(NamedTuple):
    """Class probabilities of a box of a volume. The next strip takes its memory: use it, then ask for the next."""

    sizes: tuple[int, int, int]  # of the volume, voxels
    axes: tuple[int, int, int]  # strips follow along the second, slabs of strips along the first
    corner: tuple[int, int, int]  # where it begins in the volume
    probabilities: "Tensor"  # K X Y Z, float32

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it lies in the volume."""
        return tuple(slice(at, at + n) for at, n in zip(self.corner, self.probabilities.shape[1:], strict=True))
