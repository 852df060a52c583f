"""Normalisation per channel."""

import numpy as np
import pytest

from unet3d.data.preprocess import Intensity, intensity_rules, normalise


def test_auto_treats_ct_as_ct_and_the_rest_by_z_score() -> None:
    foreground = iter([np.array([[0.0, 1.0, 2.0], [-1000.0, 50.0, 3000.0]])])
    found = intensity_rules("auto", ("MRI", "ct"), foreground)
    assert [r.kind for r in found] == ["zscore", "ct"]
    assert -1000 < found[1].low < found[1].high < 3000


def test_z_score_needs_no_training_set() -> None:
    def explode():
        raise AssertionError("read the training set for nothing")
        yield

    assert intensity_rules("auto", ("MRI",), explode()) == (Intensity("zscore"),)


def test_z_score_is_per_volume_and_channel() -> None:
    image = np.stack([np.arange(27.0).reshape(3, 3, 3), 1e4 + 5 * np.arange(27.0).reshape(3, 3, 3)]).astype(np.float32)
    found = normalise(image, (Intensity("zscore"), Intensity("zscore")))
    assert found.mean((1, 2, 3)) == pytest.approx([0, 0], abs=1e-5)
    assert found.std((1, 2, 3)) == pytest.approx([1, 1], abs=1e-5)


def test_z_score_knows_no_unit() -> None:
    """A diffusion coefficient in m^2/s is a ten-billionth."""
    image = np.random.default_rng(0).normal(7, 1, (1, 4, 4, 4)).astype(np.float32)
    found = [normalise(image * scale, (Intensity("zscore"),)) for scale in (1, np.float32(1e-12))]
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_a_constant_channel_becomes_zero() -> None:
    found = normalise(np.full((1, 2, 2, 2), 7, np.float32), (Intensity("zscore"),))
    assert (found == 0).all()


def test_ct_clips_and_uses_the_training_sets_scale() -> None:
    image = np.array([-2000, 0, 100, 9000], np.float32).reshape(1, 4, 1, 1)
    found = normalise(image, (Intensity("ct", low=-100, high=300, mean=100, std=50),))
    assert found.ravel().tolist() == [-4, -2, 0, 4]
    assert found.dtype == np.float32
