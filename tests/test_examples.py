"""The loops of examples/, as written, on a small phantom: they train as without `unet3d.recompute`, in less memory."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from allocator import peak_bytes, recorded
from training import forked

from unet3d.config.schema import Phantom
from unet3d.data.layouts import generated as synthetic
from unet3d.recomputing import search

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRATCH = ("aten::convolution", "aten::convolution_backward")  # of kernels, also in validation
FEW_TRIES = 100  # to find a schedule: which is found makes no difference here
ROUNDING = 1e-4  # relative, of a loss after some steps in float32
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of libraries; what they warn of is theirs
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in Decathlon's layout."""
    return synthetic.ensure_phantom(Phantom(cases=6, shape=(24, 24, 24)), tmp_path_factory.mktemp("phantom"))


OPTIONS = {
    "monai_loop": "--steps 3 --patch 32 32 32 --filters 8 --validation-cases 2",
    "lightning_module": "--steps 6 --patch 24 24 24 --filters 8 16 32 --validation-cases 2",
}
WORDS = {name: options.split() for name, options in OPTIONS.items()}
PLANS = ("none", "lean")


def record(name: str, words: list[str], out: Path) -> None:
    """Train without and with recompute in this process, forked from the server of trainings.

    Losses and the peak of each are left in a file.
    """
    torch.set_num_threads(1)
    search.TRIES = FEW_TRIES
    results = []
    for plan in PLANS:
        losses: list[float] = []
        given = [*words, "--plan", plan]
        peak = peak_bytes(recorded(lambda losses=losses, given=given: losses.extend(main_of(name)(given))), SCRATCH)
        results.append([losses, peak])
    out.write_text(json.dumps(results))


def main_of(name: str) -> Callable[[list[str]], list[float]]:
    """Return the `main` of an example."""
    sys.path.insert(0, str(EXAMPLES))
    main: Callable[[list[str]], list[float]] = importlib.import_module(name).main
    return main


@pytest.mark.parametrize("name", WORDS)
def test_losses_are_those_without_recompute_and_the_peak_is_smaller(name: str, data: Path, tmp_path: Path) -> None:
    """Lightning's six steps are more than an epoch of four: a validation lies between them."""
    if name == "lightning_module":
        pytest.importorskip("lightning", reason="needs lightning, of the extra bench")
    out = tmp_path / "results.json"
    process = forked(record, name, ["--data", str(data), *WORDS[name]], out)
    process.start()
    process.join()
    assert process.exitcode == 0
    (plain, plain_peak), (lean, lean_peak) = json.loads(out.read_text())
    assert lean == pytest.approx(plain, rel=ROUNDING)
    assert lean_peak < 0.75 * plain_peak


def test_the_loop_trains_over_two_ranks(data: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(EXAMPLES / "monai_loop.py"), "--data", str(data), *WORDS["monai_loop"], "--plan", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("mean Dice of 2 cases") == 1, done.stderr


def test_nnunets_trainer(data: Path, tmp_path: Path) -> None:
    """By the script that measures both; the checkpoint loads in nnU-Net's own trainer and predicts."""
    pytest.importorskip("nnunetv2", reason="needs nnunetv2, of the extra bench")
    out = tmp_path / "nnunet"
    script = ROOT / "benchmarks" / "nnunet_trainer.py"
    few = ["--iterations", "3", "--val-batches", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(script), "--data", str(data), "--out", str(out), *few], env=environment, check=True
    )
    plain, lean = (json.loads((out / f"{plan}.json").read_text()) for plan in ("plain", "lean"))
    assert lean["losses"] == pytest.approx(plain["losses"], rel=ROUNDING)
    assert lean["peak"] < 0.75 * plain["peak"]
    folders = {f"nnUNet_{name}": str(out / name) for name in ("raw", "preprocessed", "results")}
    environment |= folders | {"nnUNet_extTrainer": str(EXAMPLES / "nnunet"), "nnUNet_n_proc_DA": "1"}
    for code in (LOAD, PREDICT):
        subprocess.run([sys.executable, "-c", code, lean["folder"]], env=environment, check=True)


LOAD = """
import sys, torch
from nnunetv2.run.run_training import get_trainer_from_args
trainer = get_trainer_from_args("1", "3d_fullres", 0, device=torch.device("cpu"))
trainer.load_checkpoint(sys.argv[1] + "/checkpoint_final.pth")
assert trainer.optimizer.state_dict()["state"]
"""
PREDICT = """
import os, sys, torch
import numpy as np
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
predictor = nnUNetPredictor(device=torch.device("cpu"), use_mirroring=False)
predictor.initialize_from_trained_model_folder(os.path.dirname(sys.argv[1]), (0,))
image = np.random.default_rng(0).random((1, 24, 24, 24), dtype=np.float32)
labels = predictor.predict_single_npy_array(image, {"spacing": (1, 1, 1)})
assert labels.shape == (24, 24, 24)
"""
