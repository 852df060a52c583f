"""A data layout is one file: that of docs/extending.md, put into a copy of the package, is checked and planned for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nifti_files import image, label, write

from unet3d.config.schema import FACTS, GENERATED, LAYOUTS

ROOT = Path(__file__).resolve().parents[2]


def documented() -> tuple[str, str]:
    """The place and the text of the layout in docs/extending.md."""
    found = re.search(
        r"```python\n# (unet3d/data/layouts/\w+\.py)\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.S
    )
    assert found is not None
    return found[1], found[2]


def test_the_layout_of_the_docs_is_a_file_and_nothing_else(tmp_path: Path) -> None:
    for name in ("unet3d", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    place, text = documented()
    (tmp_path / place).write_text(text)
    for number, name in enumerate("ab"):
        write(tmp_path / "set" / name / "image.nii.gz", image((12, 12, 12), number))
        write(tmp_path / "set" / name / "label.nii.gz", label((12, 12, 12), seed=number))
    command = [sys.executable, "-m", "unet3d", "check-data", "data.format=case_folders", "data.root=set"]
    command += ["data.patch=[16,16,16]"]
    without_names = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert without_names.returncode == 2 and "data.classes is not set: data=case_folders needs" in without_names.stderr
    command += ["data.classes=[background,organ,tumour]"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "set: 2 cases: 1 train, 1 val, 0 without labels" in done.stdout and "no problems" in done.stdout


def test_what_layouts_say_of_themselves_is_read_without_loading_them() -> None:
    assert GENERATED == ("phantom", "mni152") and {*LAYOUTS} >= {*GENERATED, "decathlon", "nnunet", "folders"}
    assert FACTS["data.format"]["among"] == tuple(LAYOUTS)
    program = "import sys, unet3d.config.schema; print([name for name in ('torch', 'nibabel') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
