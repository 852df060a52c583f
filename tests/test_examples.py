"""The loops of examples/, as written, on a small phantom: they train as without `unet3d.recompute`, in less memory."""

import importlib
import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest
import torch
from allocator import peak_bytes, recorded

from unet3d.config.schema import Phantom
from unet3d.data import synthetic

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
ROUNDING = 1e-4  # relative, of a loss after some steps in float32
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of libraries; what they warn of is theirs
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in Decathlon's layout."""
    return synthetic.ensure_phantom(Phantom(cases=6, shape=(24, 24, 24)), tmp_path_factory.mktemp("phantom"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module of an example, whose libraries are installed."""
    if request.param == "lightning_module":
        pytest.importorskip("lightning", reason="needs lightning, of the extra bench")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(request.param)


WORDS = {
    "monai_loop": ["--steps", "3", "--patch", "24", "24", "24", "--filters", "8", "--validation-cases", "2"],
    "lightning_module": ["--steps", "6", "--patch", "24", "24", "24", "--filters", "8", "16", "--validation-cases", "2"],
}


@pytest.mark.parametrize("example", WORDS, indirect=True)
def test_losses_are_those_without_recompute_and_the_peak_is_smaller(example: ModuleType, data: Path) -> None:
    """Lightning's six steps are more than an epoch of four: a validation lies between them."""
    losses: dict[str, list[float]] = {}
    peaks = {}
    for plan in ("none", "lean"):
        words = ["--data", str(data), "--plan", plan, *WORDS[example.__name__]]
        peaks[plan] = peak_bytes(recorded(lambda: losses.update({plan: example.main(words)})))
    assert losses["lean"] == pytest.approx(losses["none"], rel=ROUNDING)
    assert peaks["lean"] < 0.75 * peaks["none"]


def train_as_rank(rank: int, port: int, words: list[str], out: Path) -> None:
    """Train in this process, of two."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    sys.path.insert(0, str(EXAMPLES))
    losses = importlib.import_module("monai_loop").main(words)
    (out / f"{rank}.json").write_text(json.dumps(losses))


@pytest.mark.parametrize("example", ["monai_loop"], indirect=True)
def test_two_ranks(example: ModuleType, data: Path, tmp_path: Path) -> None:
    results = []
    for plan in ("none", "lean"):
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store
        words = ["--data", str(data), "--plan", plan, *WORDS["monai_loop"]]
        context = get_context("fork")
        ranks = [context.Process(target=train_as_rank, args=(rank, port, words, tmp_path)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        results.append([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])
    for losses, expected in zip(*results, strict=True):
        assert losses == pytest.approx(expected, rel=ROUNDING)


def test_nnunets_trainer(data: Path, tmp_path: Path) -> None:
    """By the script that measures both; the checkpoint loads in nnU-Net's own trainer and predicts."""
    pytest.importorskip("nnunetv2", reason="needs nnunetv2, of the extra bench")
    out = tmp_path / "nnunet"
    script = ROOT / "tests" / "bench" / "nnunet_trainer.py"
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
