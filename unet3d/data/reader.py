"""From a case on disk to tensors ready for the network, kept in memory if there is room."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from unet3d import progress
from unet3d.data.cases import Case, Task
from unet3d.data.intensity import Intensity, normalise, rules
from unet3d.data.nifti import open_image
from unet3d.data.patches import Prepared, prepare, remembered, some
from unet3d.data.volumes import Volume, read_volume, target_grid
from unet3d.data.voxels import STRICT, Leniency, replacement
from unet3d.errors import UserError
from unet3d.table import mib

SAMPLED = 10_000  # about as many foreground voxels a case settle the scale of CT


@dataclass
class Reader:
    """Call it with a case. `cache` None: read from disk each time."""

    task: Task
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, Prepared] | None = field(default_factory=dict, repr=False)
    leniency: Leniency = STRICT
    told: set[str] = field(default_factory=set, repr=False)  # cases whose replaced voxels were told

    def __call__(self, case: Case) -> Prepared:
        return remembered(self.cache, case, self._prepare)

    def raw(self, case: Case) -> Volume:
        """The volume as stored, but for orientation and spacing."""
        volume = read_volume(case, len(self.task.classes), self.task.ignore, self.spacing, self.leniency)
        if volume.replaced and case.id not in self.told:
            self.told.add(case.id)
            print(f"warning: {case.id}: {replacement(volume.replaced)}", file=sys.stderr)
        return volume

    def refuse_more_than_memory(self, maps: Mapping[Case, int]) -> None:
        """Say what the prepared cases take, each with so many label maps; their headers tell.

        Raises UserError where it is all memory or more.
        """
        needed = 0
        for case, labels in maps.items():
            grid = target_grid(case, open_image(case.id, case.images[0]), self.spacing)
            needed += prod(grid.shape) * (4 * len(self.task.channels) + 2 * labels)  # float32, and int16
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        said = f"{len(maps)} cases kept in memory: {mib(needed)} MiB (predicted)"
        if needed >= there:
            raise UserError(f"{said}, of {mib(there)} MiB; add data.cache=false to read each when its turn comes")
        print(said, flush=True)

    def fit_intensity(self, choice: str, train: Sequence[Case]) -> None:
        """Settle the normalisation from the training cases."""
        self.intensity = rules(choice, self.task.channels, self._foreground(train))

    def fill(self, cases: Sequence[Case]) -> None:
        """Read every case now. Raises UserError that lists all that cannot be used."""
        problems = []
        with progress.counting("reading cases", len(cases)) as counter:
            for case in cases:
                try:
                    self(case)
                except UserError as error:
                    problems.append(str(error))
                counter.advance()
        _refuse(problems)

    def _prepare(self, case: Case) -> Prepared:
        volume = self.raw(case)
        assert volume.label is not None, case.id
        image = normalise(volume.image, self.intensity)
        return prepare(volume.case, image, volume.label, volume.spacing, self.task.ignore)

    def _foreground(self, cases: Sequence[Case]) -> Iterator[np.ndarray]:
        problems = []
        for case in progress.track(cases, "measuring intensities", len(cases)):
            try:
                volume = self.raw(case)
            except UserError as error:
                problems.append(str(error))
                continue
            assert volume.label is not None, case.id
            learned = volume.label > 0
            if self.task.ignore is not None:
                learned &= volume.label != self.task.ignore
            voxels = volume.image[:, learned]
            yield voxels[:, some(voxels.shape[1], SAMPLED)]
        _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))
