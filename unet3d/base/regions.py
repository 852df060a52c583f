"""Regions: classes that may overlap. Each is the voxels of one label or several, and label maps hold what is drawn."""

from typing import NamedTuple

THRESHOLD = 0.5  # a voxel belongs to a region where its probability is above


class Regions(NamedTuple):
    """The regions of a network, in the order of its outputs; together they hold all labels but 0, the background."""

    labels: tuple[tuple[int, ...], ...]  # of each region, ascending
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
