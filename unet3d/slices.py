"""Three orthogonal planes through a volume, and what is drawn of them. matplotlib is the caller's."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDS = "RAS"  # where the axes of a canonical volume lead: right, anterior, superior

Array = NDArray[Any]


class Plane(NamedTuple):
    """A cut across one axis of a volume, with the axes that it shows to the right and upwards.

    Volumes are (X, Y, Z) on canonical axes, `where` is the voxel that the plane goes through, `size` the volume's
    lengths in mm: a plane is drawn in its true proportions.
    """

    name: str
    axis: int
    right: int
    up: int

    def cut(self, volume: Array, where: Sequence[int]) -> Array:
        """The plane, rows from bottom to top."""
        cut: Array = np.take(volume, where[self.axis], self.axis).T
        return cut

    def extent(self, size: Sequence[float]) -> tuple[float, float, float, float]:
        return 0, size[self.right], 0, size[self.up]

    def draw_image(self, row: "Sequence[Axes]", image: Array, where: Sequence[int], size: Sequence[float]) -> None:
        """The image in every cell of a row, the first one with the plane's name and directions."""
        low, high = np.percentile(image, (0.5, 99.5))
        for axes in row:
            cut = self.cut(image, where)
            axes.imshow(cut, cmap="gray", vmin=low, vmax=high, origin="lower", extent=self.extent(size))
            axes.set(xticks=[], yticks=[])
        label = f"{self.name}\n{'xyz'[self.axis]} = {where[self.axis]}"
        row[0].set_ylabel(label, rotation=0, ha="right", va="center")
        _mark(row[0], ENDS[self.right], (1, 0.5), (-10, 0))
        _mark(row[0], ENDS[self.up], (0.5, 1), (0, -10))

    def draw_classes(
        self, axes: "Axes", labels: Array, where: Sequence[int], size: Sequence[float], palette: Mapping[int, Any]
    ) -> None:
        """The label values that have a colour, see-through."""
        from matplotlib.colors import to_rgba

        cut = self.cut(labels, where)
        overlay = np.zeros((*cut.shape, 4))
        for index, colour in palette.items():
            overlay[cut == index] = to_rgba(colour, 0.6)
        axes.imshow(overlay, origin="lower", extent=self.extent(size), interpolation="nearest")


PLANES = (Plane("sagittal", 0, 1, 2), Plane("coronal", 1, 0, 2), Plane("axial", 2, 0, 1))


def centre(mask: NDArray[np.bool_]) -> list[int]:
    """The voxel that halves the mask along each axis, so that its planes hold some of it; the middle of no mask."""
    if not mask.any():
        return [length // 2 for length in mask.shape]
    below = [mask.sum(axis=tuple({0, 1, 2} - {axis})).cumsum() for axis in range(3)]
    return [int(np.searchsorted(counts, counts[-1] / 2)) for counts in below]


def _mark(axes: "Axes", letter: str, at: tuple[float, float], inwards: tuple[float, float]) -> None:
    """A letter at the edge of a picture, legible on any grey; `inwards` in points."""
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}
    style: dict[str, Any] = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", "bbox": shade}
    axes.annotate(letter, at, inwards, "axes fraction", "offset points", **style)
