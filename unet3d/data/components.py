"""Connected components of label maps: all but the largest of a class become background."""

from collections.abc import Sequence

import numpy as np

BACKGROUND = 0


def largest_components(labels: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Return labels (X, Y, Z) in which each of these classes has its largest component alone.

    Voxels are connected by faces, edges and corners. Of equally large components the first stays. The given array
    does not change.
    """
    if not classes:
        return labels
    from scipy.ndimage import find_objects

    cleaned = labels.copy()
    for number, bounds in enumerate(find_objects(labels, max_label=max(classes)), start=1):
        if number in classes and bounds is not None:
            cleaned[bounds][_stray(labels[bounds] == number)] = BACKGROUND
    return cleaned


def _stray(mask: np.ndarray) -> np.ndarray:
    """Return the voxels of a mask (X, Y, Z) that are not in its largest component."""
    from scipy.ndimage import generate_binary_structure, label

    components, count = label(mask, generate_binary_structure(3, 3))
    if count < 2:
        return np.zeros_like(mask)
    sizes = np.bincount(components.ravel())
    sizes[BACKGROUND] = 0
    stray: np.ndarray = mask & (components != sizes.argmax())
    return stray
