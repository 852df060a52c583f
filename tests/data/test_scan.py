"""One scan of a data set: a run reads each header and then each volume once, of the same bytes."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guards import without
from nifti_files import decathlon, image, write
from training import PLAIN, TINY, train

from unet3d.base.errors import UserError
from unet3d.base.files import NIFTI_ENDINGS
from unet3d.data import check, nifti, prepare
from unet3d.data.check import DatasetCheck
from unet3d.data.prepare import prepare_data

NAMES = ("a", "b", "c", "d", "e", "f")


def count_openings() -> None:
    """Note each file of the data set that this process opens, and each that it reads voxels of, in files beside it."""
    root = Path("../set").resolve()
    openings = Counter[str]()
    reads = Counter[str]()
    read_array = nifti.read_array

    def audit(event: str, arguments: Sequence[object]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = Path(os.path.abspath(arguments[0]))
            if path.is_relative_to(root) and path.name.endswith(NIFTI_ENDINGS):
                openings[str(path.relative_to(root))] += 1
                (root.parent / "openings.json").write_text(json.dumps(openings))

    def counted(file: nifti.OpenFile) -> np.ndarray:
        if file.path.is_relative_to(root):
            reads[str(file.path.relative_to(root))] += 1
            (root.parent / "reads.json").write_text(json.dumps(reads))
        return read_array(file)

    nifti.read_array = counted
    sys.addaudithook(audit)


@pytest.mark.parametrize("fingerprint", ["sample", "full"])
def test_a_run_reads_each_volume_once(tmp_path: Path, fingerprint: str) -> None:
    """Four steps on six CT cases, whose scale follows from all training cases; also by the report and its pictures."""
    decathlon(tmp_path / "set", NAMES, shape=(20, 20, 16))
    words = [word for word in TINY if not word.startswith("data.phantom")]
    words += [*PLAIN, "data=decathlon", "data.intensity=ct", f"data.root={tmp_path / 'set'}"]
    words += [f"data.fingerprint={fingerprint}"]
    done = train(tmp_path / "run", *words, hook=count_openings, frills=fingerprint == "sample")
    assert done.code == 0, done.err
    files = {f"{kind}sTr/{name}.nii.gz": 1 for kind in ("image", "label") for name in NAMES}
    openings = json.loads((tmp_path / "openings.json").read_text())
    assert openings == dict.fromkeys(files, 4), "for the header, the hash, the voxels, and to compare the hash"
    assert json.loads((tmp_path / "reads.json").read_text()) == files


def test_ct_is_scaled_as_if_each_case_were_read_again(tmp_path: Path) -> None:
    """The rule is applied in place to what was read to find it; without a cache, cases are read again."""
    data = decathlon(tmp_path, NAMES)
    kept = prepare_data(data)
    data.cache = "off"
    read_again = prepare_data(data)
    assert kept.read.intensity == read_again.read.intensity and kept.read.intensity[0].kind == "ct"
    for one in (*kept.train, *kept.val):
        assert np.array_equal(kept.read(one).image, read_again.read(one).image)


@without("unet3d.data.prepare.have_changed", lambda *_: False)
def test_a_file_that_is_replaced_after_the_scan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, hash and voxels are of the same file."""

    def then_replaced(*scanned: Any) -> DatasetCheck:
        found = check.check_cases(*scanned, hashes=True)
        write(tmp_path / "imagesTr" / "a.nii.gz", image(seed=9))
        return found

    data = decathlon(tmp_path)
    monkeypatch.setattr(prepare, "check_cases", lambda *scanned, hashes: then_replaced(*scanned))
    with pytest.raises(UserError, match=r"^a: .*imagesTr/a\.nii\.gz: changed [^\n]*; start again$"):
        prepare_data(data)
