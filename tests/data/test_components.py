"""The largest component of a class stays, and everything else as it was."""

import numpy as np

from unet3d.data.restore import largest_components


def volume() -> np.ndarray:
    """Class 1 with parts of 8, 3 and 1 voxels, class 2 with parts of 4 and 2; corners touch in the largest of 1."""
    labels = np.zeros((12, 10, 8), np.uint8)
    labels[0:2, 0:2, 0] = 1
    labels[2:4, 2:4, 1] = 1  # by a corner
    labels[8, 8, 3:6] = 1
    labels[11, 0, 0] = 1
    labels[6, 0:4, 6] = 2
    labels[9, 2, 0:2] = 2
    return labels


def test_only_the_largest_component_of_the_named_classes_stays() -> None:
    labels = volume()
    cleaned = largest_components(labels, [1])
    assert np.count_nonzero(cleaned == 1) == 8 and cleaned[8, 8, 4] == cleaned[11, 0, 0] == 0
    assert np.array_equal(cleaned == 2, labels == 2) and np.array_equal(labels, volume())
    both = largest_components(labels, [1, 2])
    assert np.count_nonzero(both == 2) == 4 and np.array_equal(both == 1, cleaned == 1)


def test_a_class_without_voxels_and_no_class_change_nothing() -> None:
    labels = volume()
    assert np.array_equal(largest_components(labels, [3]), labels)
    assert np.array_equal(largest_components(labels, []), labels)


def test_of_equal_components_one_stays() -> None:
    labels = np.zeros((5, 1, 1), np.uint16)
    labels[0] = labels[4] = 1
    assert largest_components(labels, [1]).ravel().tolist() == [1, 0, 0, 0, 0]


def test_a_part_within_the_bounds_of_another_class_is_kept() -> None:
    labels = np.full((5, 5, 5), 2, np.uint8)
    labels[2, 2, 2] = 1
    assert np.array_equal(largest_components(labels, [1, 2]), labels)
