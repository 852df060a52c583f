"""Small types that all packages share: batches, strips of a volume, regions of classes, tables of text, sizes."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unet3d.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # a voxel without label, in label tensors: torch's own default for cross-entropy
MIB = 2**20
THRESHOLD = 0.5  # a voxel belongs to a region where its probability is above


def budget_bytes(text: str, option: str = "budget=") -> int:
    """Return the bytes of `8GiB`, `900 MiB`, `1.5GB`, given by `option`. Raises UserError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,20})?)\s*([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        advice = f"give an amount in digits and a unit, KiB, MiB, GiB or TiB, e.g. {option}8GiB"
        if re.match(r"\s*\d+,\d", text):
            advice = f"the decimal sign is a point: {option}{text.replace(',', '.')}"
        raise UserError(f"{option}{text}: {advice}")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2].upper())))


def host_bytes() -> int:
    """Return all memory of this machine; a container or a scheduler may allow less."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Table(NamedTuple):
    """A table of text: headings with their units, and rows."""

    columns: list[str]
    rows: list[list[str]]


def tabulated(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return all columns of these rows, and the rows as lists; None where a row has no such column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def mib(size: float) -> str:
    """Return bytes as MiB (2^20 bytes), to a tenth."""
    return f"{size / MIB:,.1f}"


def sizes_text(sizes: Sequence[float]) -> str:
    """Return `32x48x32`."""
    return "x".join(f"{size:g}" for size in sizes)


def percent(part: float, whole: float) -> str:
    """Return a share of `whole` in per cent; "" where `whole` is 0."""
    return f"{part / whole:.1%}" if whole else ""


class Batch(NamedTuple):
    """Patches and their label maps, on any device."""

    image: "Tensor"  # N C D H W, float32
    label: "Tensor"  # N D H W, integers
    cases: tuple[str, ...] = ()  # one id for each patch


class ProbabilityBlock(NamedTuple):
    """Class probabilities of a box of a volume. The buffer is reused by the next block."""

    sizes: tuple[int, int, int]  # Sizes of the volume, voxels.
    axes: tuple[int, int, int]  # strips follow along the second, slabs of strips along the first
    corner: tuple[int, int, int]  # Where it begins in the volume.
    probabilities: "Tensor"  # K X Y Z, float32

    @property
    def box(self) -> tuple[slice, ...]:
        """Return the slices of the box in the volume."""
        sizes = self.probabilities.shape[1:]
        return tuple(slice(start, start + size) for start, size in zip(self.corner, sizes, strict=True))


class Regions(NamedTuple):
    """The regions of a network, in the order of its outputs: classes that may overlap, each of one label or several.

    Together they hold all labels but 0, the background; label maps hold what is drawn.
    """

    labels: tuple[tuple[int, ...], ...]  # Labels of each region, ascending.
    drawn: tuple[int, ...]  # what each region is drawn as in a label map, later regions over earlier ones

    @property
    def label_count(self) -> int:
        """Return the number of labels, background with them."""
        return 1 + max(map(max, self.labels))

    def hidden(self) -> tuple[int, int] | None:
        """Return the first region that is never seen in a label map, and the later one that is drawn over all of it."""
        for inner, held in enumerate(self.labels):
            for outer in range(inner + 1, len(self.labels)):
                if {*held} <= {*self.labels[outer]} and self.drawn[outer] not in held:
                    return inner, outer
        return None

    def shown_as(self) -> dict[int, int]:
        """Return what a label map shows of a voxel of each label, where every region is found."""
        return {label: drawn for labels, drawn in zip(self.labels, self.drawn, strict=True) for label in labels}

    def table(self) -> list[list[bool]]:
        """Return for each region which labels it holds, 0 first."""
        return [[label in labels for label in range(self.label_count)] for labels in self.labels]
