"""Where a header says that voxels lie: by its sform, its qform, or by pixdim, the voxel sizes alone."""

from collections.abc import Iterator, Sequence
from itertools import product

import nibabel as nib
import numpy as np
from nibabel.affines import apply_affine
from nibabel.spatialimages import HeaderDataError

FORMS = ("sform", "qform", "pixdim")  # the first that a header has counts, as in nibabel
GUESS = "which side is left is a guess"
DECIDES = "data.affine=sform, qform or pixdim decides"
SMALLEST = 1e-7  # mm, below a nanometre: squares of less vanish
LARGEST = 1e7  # mm, above a kilometre: squares of more overflow
SAME_PLACE = 0.01  # mm: largest difference between sform and qform that counts as none
SAME_SIZE = 0.01  # relative difference of voxel sizes that is rounding


def form_taken(header: nib.Nifti1Header, form: str) -> str:
    """Return which of FORMS an affine is read by: the one that is asked for, if the header has it, else the first."""
    has = {"sform": header["sform_code"] > 0, "qform": header["qform_code"] > 0, "pixdim": True}
    return next(name for name in (form, *FORMS) if has.get(name))


def affine_of(header: nib.Nifti1Header, form: str) -> np.ndarray:
    """Return the affine (4, 4), to mm, that a header states in this form, or the first that it has.

    pixdim states lengths alone: axes then run as the sform, or the qform, says. Raises ValueError, HeaderDataError for
    a qform that is no rotation.
    """
    taken = form_taken(header, form)
    if taken == "qform":
        qform: np.ndarray = header.get_qform()
        return qform
    affine: np.ndarray = header.get_best_affine()
    if taken == "pixdim":
        with np.errstate(all="ignore"):  # an axis of no length is refused later
            affine[:3, :3] *= header["pixdim"][1:4] / np.linalg.norm(affine[:3, :3], axis=0)
    return affine


def form_faults(header: nib.Nifti1Header, form: str, zooms: np.ndarray) -> Iterator[str]:
    """Yield what is wrong with the affine of a form, and with the voxel sizes (mm) that the header states."""
    if not np.isfinite(zooms).all() or not zooms.all():
        yield f"has voxel sizes {zooms.tolist()} mm; write the true ones into its header"
    fault = _affine_fault(header, form)
    if fault:
        taken = form_taken(header, form)
        wrong = form_taken(header, "auto") if taken == "pixdim" else taken  # which says how axes run
        yield f"{fault}; correct its {wrong}{_other_forms(header, taken)}"


def _other_forms(header: nib.Nifti1Header, taken: str) -> str:
    """Return the option that takes another form of the header, if that one maps a volume."""
    for form in FORMS:
        if form != taken and form_taken(header, form) == form and not _affine_fault(header, form):
            return f", or take data.affine={form}"
    return ""


def _affine_fault(header: nib.Nifti1Header, form: str) -> str:
    """Return why the affine of a form maps no volume; "" where it does."""
    try:
        affine = affine_of(header, form)
    except (ValueError, HeaderDataError) as error:
        return f"has a qform that is no rotation ({error})"
    with np.errstate(all="ignore"):  # an overflow is refused below
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        is_regular = abs(np.linalg.det(affine[:3, :3])) > 1e-6 * sizes.prod()
    if not is_regular or not np.isfinite(affine).all():
        return f"has the affine {affine.tolist()}, which maps no volume"
    if sizes.min() < SMALLEST or np.abs(affine).max() > LARGEST:
        return f"has the affine {affine.tolist()} (mm), too small or large"
    return ""


def affine_if_sound(header: nib.Nifti1Header, form: str) -> np.ndarray | None:
    """Return the affine of a form; None where it maps no volume."""
    return None if _affine_fault(header, form) else affine_of(header, form)


def two_sizes(header: nib.Nifti1Header, form: str) -> str:
    """Return the voxel sizes of a header that states two, and which counts, or that it places no voxel.

    "" for one, or where `form` is chosen. A qform has the voxel sizes of pixdim, so that only a sform can differ.
    """
    taken = form_taken(header, form)
    if form == "auto" and taken == "pixdim":
        return f"has neither sform nor qform: {GUESS}"
    if header["sform_code"] <= 0 or taken == form:
        return ""
    by_sform = np.linalg.norm(header.get_sform()[:3, :3], axis=0)
    by_pixdim = header["pixdim"][1:4]
    if np.allclose(by_sform, by_pixdim, rtol=SAME_SIZE, atol=0):
        return ""
    other = "qform and pixdim" if header["qform_code"] > 0 else "pixdim"
    has = "has" if form == "auto" else f"has no {form}, but"
    what = f"{has} voxels of {_lengths(by_sform)} mm by its sform, of {_lengths(by_pixdim)} mm by its {other}"
    return f"{what}; the {taken} is taken"


def two_places(header: nib.Nifti1Header, form: str) -> str:
    """Return how sform and qform place voxels of one size apart, and which counts; "" where they, or `form`, agree."""
    taken = form_taken(header, form)
    if header["sform_code"] <= 0 or header["qform_code"] <= 0 or taken == form or _affine_fault(header, "qform"):
        return ""
    affines = affine_of(header, "sform"), affine_of(header, "qform")
    if two_sizes(header, form) or np.allclose(*affines, rtol=1e-5, atol=SAME_PLACE):
        return ""
    corners = np.array(list(product(*((0, length - 1) for length in header.get_data_shape()[:3]))))
    distances = np.linalg.norm(apply_affine(affines[0], corners) - apply_affine(affines[1], corners), axis=1)
    axes = ["".join(nib.aff2axcodes(affine)) for affine in affines]
    turned = "" if axes[0] == axes[1] else f", with the axes {axes[0]} and {axes[1]}"
    what = f"sform and qform place voxels up to {distances.max():.3g} mm apart{turned}"
    return f"{what}; the {taken} is taken"


def in_one_line(lines: Sequence[str], remedy: str = DECIDES) -> list[str]:
    """Return a line for all files that state where their voxels lie twice, and one for those that do not state it."""
    guesses = [line for line in lines if line.endswith(GUESS)]
    others = [line for line in lines if not line.endswith(GUESS)]
    result = []
    for some, remedy_of in ((guesses, "set one"), (others, remedy)):
        if some:
            count = f" ({len(some):,} such files)" if len(some) > 1 else ""
            result.append(f"{some[0]}{count}; {remedy_of}")
    return result


def _lengths(sizes: Sequence[float]) -> str:
    """Return `1.3158 x 1.3158 x 10`."""
    return " x ".join(f"{size:.5g}" for size in sizes)
