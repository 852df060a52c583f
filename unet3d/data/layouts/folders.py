"""Two folders with equal names; an image may be split into <case>_0000, <case>_0001 ..., one a channel."""

from pathlib import Path
from statistics import mode

from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo, inside, layout, sorted_cases, with_classes
from unet3d.data.file_names import by_stem, images_by_case, in_order, volumes_in
from unet3d.data.labels import asked_regions


@layout(names_classes=False)
def folders(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of the folders data.images and data.labels below `root`. Raises UserError."""
    regions = asked_regions(data)
    images = root / data.images
    labels = root / data.labels
    # A folder that the command line puts outside of the root is outside on purpose.
    outside = [folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts]
    cases = inside(_cases(images, labels), (root, *outside), data.allow_outside)
    count = mode(len(case.images) for case in cases)  # the others lack a channel, or have one too many
    if count == 1:
        first = next(case for case in cases if len(case.images) == count)
        count = nifti.channels(nifti.open_image(first.id, first.images[0], data.affine))
    names = dict[int, str]()
    if regions is not None:
        names = {0: "background"} | regions.label_names()
    elif data.classes is not None and data.label_map is None:  # else they are of the new labels
        names = dict(enumerate(data.classes))
    where = "data.classes" if regions is None else "data.regions"
    dataset = DatasetInfo(root.name, tuple(f"channel_{channel}" for channel in range(count)), cases, data.ignore)
    return with_classes(dataset, names, data, where, regions)


def _cases(images: Path, labels: Path) -> tuple[Case, ...]:
    """Return the cases of a folder of images and one of label maps. Raises UserError."""
    maps = by_stem(volumes_in(labels))
    sorted_cases((Case(name, (), path) for name, path in maps.items()), labels)
    grouped = images_by_case(images, maps)
    return sorted_cases((Case(name, in_order(name, paths), maps.get(name)) for name, paths in grouped.items()), images)
