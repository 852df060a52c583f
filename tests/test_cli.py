"""The command face in real processes: exit codes, one line, no torch for a typo, no litter."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from wandb_records import read_run

from unet3d import command, process, snapshot
from unet3d.config import Config
from unet3d.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    *("model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "data.phantom.shape=[20,20,16]"),
    *("data.phantom.cases=4", "batch=1", "steps=4", "eval_every=2", "device=cpu", "workers=0"),
]


def run(*arguments: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else [str(ROOT / "train.py")]), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def train(cwd: Path, *arguments: str) -> Path:
    """A finished tiny run's folder."""
    done = run(*TINY, f"hydra.run.dir={cwd / 'run'}", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "run"


@pytest.mark.parametrize("wrong", ["amp=maybe", "chkpt=2", "model=unet_smal", "data=decathlon", "ckpt=999", "amp"])
def test_k1_a_mistake_is_one_line_and_exit_2_without_a_trace(tmp_path: Path, wrong: str) -> None:
    done = run(wrong, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert wrong.split("=")[0].replace("data", "data.root") in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_k1_a_mistake_loads_neither_torch_nor_monai(tmp_path: Path) -> None:
    code = (
        "import sys; from unet3d import command; c = command.main(None); print(c, {'torch', 'monai'} & {*sys.modules})"
    )
    assert run("ckpt=-1", cwd=tmp_path, code=code).stdout == "2 set()\n"


def test_one_wrong_job_stops_a_sweep_before_it_begins(tmp_path: Path) -> None:
    done = run("-m", "ckpt=0,999", cwd=tmp_path)
    assert done.returncode == 2 and "ckpt=999" in done.stderr
    queued = run("-m", "ckpt=0,2", "requeue=true", cwd=tmp_path)
    assert queued.returncode == 2 and "requeue=true" in queued.stderr and queued.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--help"]])
def test_a_mistake_beside_a_flag_is_one_line_too(tmp_path: Path, flags: list[str]) -> None:
    done = run(*flags, "chkpt=2", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_flag_may_stand_between_overrides_and_a_failed_job_stops_no_other(tmp_path: Path) -> None:
    """Job 0 breaks its budget; job 1 is predicted all the same."""
    closed = ["model.in_channels=1", "model.classes=3", "dry_run=true"]
    done = run(*TINY, *closed, "-m", "budget=0.001MiB,1GiB", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("does not fit") == 1
    assert not (tmp_path / "sweep" / "0" / "memory.json").exists()
    assert json.loads((tmp_path / "sweep" / "1" / "memory.json").read_text())["predicted"]["peak_bytes"] > 0


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, list[list[str]]]:
    """A sweep of 2 x 2, of which one breaks its budget; its folder; pid, parent's pid and arguments of each process."""
    place = tmp_path_factory.mktemp("swept")
    said = "import os, sys; print(os.getpid(), os.getppid(), *sys.orig_argv, sep='|', file=open({!r}, 'a'))"
    (place / "sitecustomize.py").write_text(said.format(str(place / "processes")))
    words = ["ckpt=0,2", "batch=1,2", "budget=2MiB", "steps=2", f"data.root={place / 'phantom'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        done = run("-m", *TINY, *words, f"hydra.sweep.dir={place / 'sweep'}", cwd=place)
    processes = [line.split("|") for line in (place / "processes").read_text().splitlines()]
    return done, place / "sweep", [process for process in processes if "train.py" in "".join(process)]


def test_t10_a_sweep_ends_with_its_comparison_and_a_failed_job_is_a_row(swept: tuple) -> None:
    done, folder, _ = swept
    assert done.returncode == 2 and "Comparison of 4 runs" in done.stdout
    assert "run 2 failed: budget=2MiB: the step does not fit" in done.stdout
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [f"{row['run']}: {row['batch']} {row['ckpt']}" for row in rows] == ["0: 1 0", "1: 1 2", "2: 2 0", "3: 2 2"]
    assert [row["status"].partition(":")[0] for row in rows] == ["done", "done", "failed", "done"]
    assert {row["error_bytes"] for row in rows} == {"0", ""} and rows[2]["peak_measured_bytes"] == ""
    peak = json.loads((folder / "3" / "memory.json").read_text())["measured"]["peak_bytes"]
    assert int(rows[3]["peak_measured_bytes"]) == peak
    assert {path.name for path in folder.iterdir()} == {
        *("0", "1", "2", "3", "compare.csv", "compare.html", "compare.png", "multirun.yaml", "wandb")
    }


def test_each_job_of_a_sweep_has_a_process_of_its_own(swept: tuple) -> None:
    _, folder, processes = swept
    (sweep, *_), *jobs = processes
    assert len({sweep, *(pid for pid, *_ in jobs)}) == 5 and {parent for _, parent, *_ in jobs} == {sweep}
    assert [arguments[-1] for arguments in jobs] == [f"hydra.run.dir='{folder / str(job)}'" for job in range(4)]


def test_a_job_of_a_sweep_needs_what_it_needs_alone(swept: tuple, tmp_path: Path) -> None:
    _, folder, _ = swept
    words = [str(word) for word in yaml.safe_load((folder / "3" / "overrides.yaml").read_text())]
    alone = run(*words, f"hydra.run.dir={tmp_path / 'alone'}", "wandb.mode=disabled", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert (tmp_path / "alone" / "memory.json").read_text() == (folder / "3" / "memory.json").read_text()


def test_the_sweeps_wandb_run_holds_the_table(swept: tuple) -> None:
    _, folder, _ = swept
    found = read_run(folder)
    assert [record["compare._type"] for record in found.history if "compare._type" in record] == ["table-file"]
    (path,) = folder.glob("wandb/*run-*/files/media/table/compare_*.table.json")
    table = json.loads(path.read_text())
    with (folder / "compare.csv").open() as file:
        assert table["columns"] == next(csv.reader(file))
    assert [row[0] for row in table["data"]] == ["0", "1", "2", "3"] and found.exit_code == 0
    assert str(folder.parent) not in path.read_text()


def test_the_runs_of_a_sweep_can_be_compared_again(swept: tuple, tmp_path: Path) -> None:
    _, folder, _ = swept
    command = [sys.executable, "-m", "unet3d", "compare", str(folder), "-o", str(tmp_path / "again")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "Comparison of 4 runs" in done.stdout, done.stderr
    for name in ("compare.csv", "compare.html"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    nowhere = subprocess.run([*command[:4], "unet3d"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert nowhere.returncode == 2 and nowhere.stderr.count("\n") == 1 and "unet3d: not a run folder" in nowhere.stderr


def test_a_sweep_that_predicts_stays_in_one_process(tmp_path: Path) -> None:
    """Its jobs compare all the same; the one that fails in an unforeseen way ends no other."""
    code = (
        "import subprocess, sys; sys.path.insert(0, '.'); from unet3d import command; import train\n"
        "def refuse(*_, **__): raise AssertionError('a process')\n"
        "subprocess.Popen = refuse\n"
        "def job(config, folder, stop):\n"
        "    if config.ckpt == 2: raise RuntimeError('lost')\n"
        "    train.job(config, folder, stop)\n"
        "sys.exit(command.main(job))"
    )
    closed = ["model.in_channels=1", "model.classes=3", "dry_run=true", "wandb.mode=disabled"]
    done = run(*TINY, *closed, "-m", "ckpt=0,2,3", f"hydra.sweep.dir={tmp_path}", cwd=ROOT, code=code)
    assert done.returncode == 1 and "run 1 failed: RuntimeError('lost')" in done.stdout, done.stderr
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"].partition(":")[0] for row in rows] == ["predicted", "failed", "predicted"]
    assert int(rows[2]["peak_predicted_bytes"]) < int(rows[0]["peak_predicted_bytes"])
    assert not (tmp_path / "wandb").exists()


def replace_fit(folder: Path, act: str) -> None:
    """In a sweep's jobs, not in the sweep: what PYTHONPATH=folder does to a run in place of training."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('hydra.run.dir' in word for word in sys.orig_argv):\n"
        f"    sys.path.insert(0, {str(ROOT)!r})\n"
        "    from unet3d import record, run\n"
        f"    def stop(self): {act}; signal.pause()\n"
        "    run.Run.fit = stop\n"
    )


def test_an_interrupted_job_ends_the_sweep_in_good_order(tmp_path: Path) -> None:
    """Only the sweep's process is told; the job, asked by it, still writes its STATUS, and no job follows."""
    replace_fit(tmp_path, "os.kill(os.getppid(), signal.SIGINT)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        done = run("-m", *TINY, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "sweep" / "0" / "STATUS").read_text() == (
        "stopped by SIGTERM; there is no snapshot yet to go on from\nexit code 75\n"
    )
    assert not (tmp_path / "sweep" / "1").exists()
    assert f"python -m unet3d compare {tmp_path / 'sweep'}" in done.stderr


def test_the_folder_that_is_checked_is_the_one_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("multirun").touch()
    command._refuse_unwritable(["seed=0"])
    with pytest.raises(UserError, match=r"^multirun: .* give hydra.sweep.dir=FOLDER"):
        command._refuse_unwritable(["seed=0,1", "-m"])
    command._refuse_unwritable(["seed=0,1", "hydra.sweep.dir=elsewhere", "-m"])


def test_a_process_that_was_killed_is_told_by_its_signal() -> None:
    code, _ = process.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert code == 137 and process.fate(code) == "killed by SIGKILL"
    assert process.run([sys.executable, "-c", "raise SystemExit(4)"]) == (4, False)


def test_a_job_that_was_stopped_alone_does_not_end_the_sweep(tmp_path: Path) -> None:
    replace_fit(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        done = run("-m", *TINY, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 75 and "sweep interrupted" not in done.stderr, done.stderr
    for job in "01":
        assert (tmp_path / "sweep" / job / "STATUS").read_text().startswith("stopped by SIGTERM")
    assert (tmp_path / "sweep" / "compare.csv").exists()


def test_the_composed_config_can_be_shown(tmp_path: Path) -> None:
    done = run("--cfg", "job", "model=forum_mid", cwd=tmp_path)
    assert done.returncode == 0 and "trilinear" in done.stdout


def test_a_run_leaves_the_folder_of_the_design(finished: Path) -> None:
    folder = finished
    there = {path.name for path in folder.iterdir()}
    assert there >= {
        *("config.yaml", "env.json", "metrics.jsonl", "metrics.csv", "scores.csv", "memory.json", "report.html"),
        *("STATUS", "checkpoints", "figures", "memory", "predictions", "wandb"),
    }
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.pt", "last.pt", "previous.pt"}
    assert (folder / "STATUS").read_text().startswith("done")
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["parameters"] == sum(v.numel() for v in _weights(folder).values())
    assert set(memory["measured"]["phases"]) == {"data", "forward", "loss", "backward", "step"}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "train/loss" in r] == [1, 2, 3, 4]
    assert [r["step"] for r in records if "val/dice_mean" in r] == [2, 4]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run for the tests that only look."""
    return train(tmp_path_factory.mktemp("finished"), "amp=true", "ckpt=2")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]
    return weights


def _curve(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "memory/"))} for record in records]


def test_one_seed_one_run_whatever_the_workers_and_checkpointing(tmp_path: Path) -> None:
    """Dropout, augmentation and mixed precision on; equal weights and equal metrics, to the bit."""
    folders = []
    for name, extra in (("a", ["workers=0"]), ("b", ["workers=2"]), ("c", ["workers=0", "ckpt=3"])):
        (tmp_path / name).mkdir()
        root = f"data.root={tmp_path / 'phantom'}"
        folders.append(train(tmp_path / name, "amp=true", "model.dropout=0.2", "wandb.mode=disabled", root, *extra))
    first = folders[0]
    for other in folders[1:]:
        assert _curve(first) == _curve(other)
        assert all(torch.equal(a, b) for a, b in zip(_weights(first).values(), _weights(other).values(), strict=True))


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    """Stopped after step 2 of 4 by an error, then resumed with the command it was given."""
    root = f"data.root={tmp_path / 'phantom'}"
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    whole = train(tmp_path / "whole", root, "model.dropout=0.2", "optim.average=0.9", "wandb.mode=disabled")
    code = (
        "import sys; sys.path.insert(0, '.'); from unet3d import command, run; import train\n"
        "fit = run.Run._pause\n"
        "def stop(self): fit(self); raise KeyboardInterrupt\n"
        "run.Run._pause = stop\n"
        "sys.exit(command.main(train.job))"
    )
    folder = tmp_path / "parts" / "run"
    arguments = [
        *TINY,
        root,
        "model.dropout=0.2",
        "optim.average=0.9",
        "wandb.mode=disabled",
        f"hydra.run.dir={folder}",
    ]
    stopped = run(*arguments, cwd=ROOT, code=code)
    assert stopped.returncode == 130, stopped.stderr
    assert f"train.py resume={folder}" in stopped.stderr
    resumed = run(f"resume={folder}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert _curve(folder) == _curve(whole)
    assert all(torch.equal(a, b) for a, b in zip(_weights(folder).values(), _weights(whole).values(), strict=True))
    longer = run(f"resume={folder}", "steps=5", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    again = run(f"resume={folder}", cwd=tmp_path)
    assert "step 5 of 5 is done" in again.stdout, "what was added on resuming is remembered"


def test_a_folder_holds_one_run(finished: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    again = run(*TINY, f"hydra.run.dir={finished}", cwd=tmp_path)
    assert again.returncode == 2 and "holds a run already" in again.stderr
    over = run(f"resume={finished}", cwd=tmp_path)
    assert over.returncode == 0 and "nothing to do: step 4 of 4" in over.stdout
    after = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    assert json.loads(after["memory.json"]) == json.loads(before["memory.json"])
    assert after["metrics.jsonl"] == before["metrics.jsonl"] and after["STATUS"] == before["STATUS"]


def test_what_was_predicted_is_what_was_measured(finished: Path) -> None:
    memory = json.loads((finished / "memory.json").read_text())
    assert memory["error_bytes"] == 0 and memory["predicted"] == memory["measured"]
    assert "predicted less measured: 0 bytes" in (finished / "report.html").read_text()


def test_a_run_shows_where_its_memory_went(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    for said in ("The ledger&#x27;s peak, ", "of the peak (", "half the width there", "down1.conv1", "gradients"):
        assert said in page, said
    assert len(page) < 5 * 2**20
    assert page.count("<img") == 5, "prediction, curves, and memory per phase, over a step, by layer"
    assert {path.name for path in (finished / "memory").iterdir()} == {
        *("snapshot.pickle", "timeline.csv", "trace.csv", "changes.txt")
    }
    memory = json.loads((finished / "memory.json").read_text())
    with (finished / "memory" / "timeline.csv").open() as file:
        assert max(int(row["alive_bytes"]) for row in csv.DictReader(file)) == memory["measured"]["peak_bytes"]


def test_wandb_has_the_tables_and_pictures_of_memory(finished: Path) -> None:
    found = read_run(finished)
    memory = json.loads((finished / "memory.json").read_text())
    kinds = {key: value for record in found.history for key, value in record.items() if key.endswith("_type")}
    for name in ("phases", "levels", "layers"):
        assert kinds[f"memory/{name}._type"] == "table-file"
    for name in ("phases", "timeline", "layers"):
        assert kinds[f"memory/{name}_picture._type"] == "image-file"
    (path,) = finished.glob("wandb/*run-*/files/media/table/memory/layers_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"][:3] == ["module", "level", "bytes"]
    assert sum(row[2] for row in table["data"]) == memory["measured"]["peak_bytes"]
    assert found.summary["memory/advice/level"] == memory["advice"]["level"]
    assert found.summary["memory/measured/moment/words"] == memory["measured"]["moment"]["words"]


def test_the_offline_wandb_run_holds_config_scalars_memory_and_the_picture(finished: Path) -> None:
    found = read_run(finished)
    memory = json.loads((finished / "memory.json").read_text())
    assert found.config["model"]["features"] == [4, 8] and found.config["ckpt"] == 2
    losses = [record["train/loss"] for record in found.history if "train/loss" in record]
    assert losses == [record["train/loss"] for record in _curve(finished) if "train/loss" in record]
    assert found.summary["memory/measured/peak_bytes"] == memory["measured"]["peak_bytes"]
    assert found.summary["memory/predicted/phases/backward/steady"] > 0
    assert any("val/prediction._type" in record for record in found.history)
    assert any("prediction" in name and name.endswith(".png") for name in found.files)
    assert found.exit_code == 0


def test_t1_memory_that_runs_out_is_told_with_remedies_and_the_snapshot_is_kept(tmp_path: Path) -> None:
    """The address space is limited for real, after the first snapshot."""
    code = (
        "import resource, sys; sys.path.insert(0, '.'); from unet3d import command, run; import train\n"
        "pause = run.Run._pause\n"
        "def limit(self):\n"
        "    pause(self)\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))\n"
        "    self.trainer.model[0].register_forward_hook(lambda *_: __import__('torch').empty(2**28))\n"
        "run.Run._pause = limit\n"
        "job = train.job\n"
        "sys.exit(command.main(job))"
    )
    folder = tmp_path / "run"
    done = run(*TINY, f"hydra.run.dir={folder}", "wandb.mode=disabled", cwd=ROOT, code=code)
    assert done.returncode == 5, done.stderr
    for said in ("can't allocate memory", "in forward of step 3", "MiB of tensors alive", "ckpt=auto", "resume="):
        assert said in done.stderr, said
    assert (folder / "STATUS").read_text().startswith("out of memory")
    assert torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["step"] == 2


def test_resume_refuses_another_network(finished: Path, tmp_path: Path) -> None:
    done = run(f"resume={finished}", "model.features=[8,8]", cwd=tmp_path)
    assert done.returncode == 2 and "model.features: [4, 8] -> [8, 8]" in done.stderr
    assert (finished / "STATUS").read_text().startswith("done"), "the run in the folder is as it was"
    dry = run(f"resume={finished}", "dry_run=true", cwd=tmp_path)
    assert dry.returncode == 2 and "leave one of them away" in dry.stderr
    nowhere = run("resume=nowhere", cwd=tmp_path)
    assert nowhere.returncode == 2 and "resume=nowhere: no run" in nowhere.stderr


def test_a_published_snapshot_predicts_the_same_and_names_no_path(finished: Path, tmp_path: Path) -> None:
    module = [sys.executable, "-m", "unet3d"]
    whole, slim, state = tmp_path / "whole.pt", tmp_path / "net.pt", snapshot.load(finished / "checkpoints" / "best.pt")
    state["config"] |= {"resume": "/home/someone/run", "wandb": state["config"]["wandb"] | {"project": "a-secret"}}
    state["config"]["data"] |= {"images": "/home/someone/scans"}
    snapshot.save(whole, state)
    told = subprocess.run([*module, "publish", whole, "-o", slim], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert slim.stat().st_size < whole.stat().st_size / 2
    for secret in (str(finished), "imagesTr", "phantom/", "a-secret", "/home/someone"):
        assert secret.encode() not in slim.read_bytes()
    image = next((finished.parent).rglob("imagesTr/*.nii.gz"))
    for name, path in (("whole", whole), ("slim", slim)):
        subprocess.run(
            [*module, "predict", path, image, "-o", tmp_path / name], cwd=ROOT, check=True, capture_output=True
        )
    assert (tmp_path / "whole" / image.name).read_bytes() == (tmp_path / "slim" / image.name).read_bytes()
    again = subprocess.run([*module, "publish", whole, "-o", slim], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "is there already" in again.stderr


def test_a_job_of_a_sweep_that_was_refused_leaves_the_run_there_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is going on, say, or could be gone on with; one that was killed is told of."""
    status, said = tmp_path / "STATUS", tmp_path / "overrides.yaml"
    status.write_text("running\n")
    os.utime(status, ns=(1, 1))
    said.write_text("- ckpt=2\n")
    hydra = SimpleNamespace(runtime=SimpleNamespace(cwd="."))
    monkeypatch.setattr(command, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setattr(process, "run", lambda words: process.Ended(2, is_asked=False))
    assert command._job_of_sweep(lambda *_: None, Config(), tmp_path, ["ckpt=3"]) == (2, False)
    assert (status.read_text(), said.read_text()) == ("running\n", "- ckpt=2\n")
    monkeypatch.setattr(process, "run", lambda words: process.Ended(137, is_asked=False))
    assert command._job_of_sweep(lambda *_: None, Config(), tmp_path, ["ckpt=3"]) == (137, False)
    assert (status.read_text(), said.read_text()) == ("failed: killed by SIGKILL\nexit code 137\n", "- ckpt=3\n")


def test_p1_predict_writes_label_maps_on_the_inputs_grid(finished: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    affine = np.array([[0, -1.5, 0, 10], [0.9, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    image = nib.Nifti1Image(rng.normal(size=(17, 23, 9)).astype(np.float32), affine)
    image.header.set_xyzt_units("mm", "sec")
    nib.save(image, tmp_path / "scan one.nii.gz")
    (tmp_path / "broken.nii.gz").write_bytes(b"<html>")
    module = [sys.executable, "-m", "unet3d", "predict", str(finished / "checkpoints" / "last.pt")]
    inputs = [str(tmp_path / "scan one.nii.gz"), str(tmp_path / "broken.nii.gz"), "-o", str(tmp_path / "out")]
    done = subprocess.run([*module, *inputs], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "broken.nii.gz" in done.stderr and done.stderr.count("\n") == 1
    image, found = nib.load(tmp_path / "scan one.nii.gz"), nib.load(tmp_path / "out" / "scan one.nii.gz")
    assert found.shape == image.shape and found.get_data_dtype() == np.uint8
    assert np.array_equal(found.affine, image.affine)
    for field in ("pixdim", "qform_code", "sform_code", "xyzt_units", "srow_x", "quatern_b"):
        assert np.array_equal(found.header[field], image.header[field]), field
    assert set(np.unique(found.dataobj)) <= {0, 1, 2, 3}


def test_p2_what_is_there_is_left_alone_unless_it_may_be_replaced(finished: Path, tmp_path: Path) -> None:
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 9), np.float32), np.eye(4)), tmp_path / "a.nii.gz")
    made = tmp_path / "out" / "a.nii.gz"
    made.parent.mkdir()
    made.write_bytes(b"of yesterday")
    module = [sys.executable, "-m", "unet3d", "predict", str(finished / "checkpoints" / "last.pt")]
    words = [*module, str(tmp_path / "a.nii.gz"), "-o", str(made.parent)]
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0 and "left alone" in again.stdout and made.read_bytes() == b"of yesterday"
    over = subprocess.run([*words, "--overwrite"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert over.returncode == 0 and nib.load(made).shape == (9, 9, 9), over.stderr
    assert [path.name for path in made.parent.iterdir()] == ["a.nii.gz"]


def test_a_foreign_snapshot_is_exit_3(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "x.pt")
    command = [sys.executable, "-m", "unet3d", "predict", str(tmp_path / "x.pt"), ".", "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3 and done.stderr.count("\n") == 1


def test_check_data_lists_every_problem(tmp_path: Path) -> None:
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for name in "abc":
        for part in ("images", "labels"):
            data = np.zeros((4, 4, 4), np.uint8)
            nib.save(nib.Nifti1Image(data, np.eye(4)), tmp_path / part / f"{name}.nii.gz")
    nib.save(nib.Nifti1Image(np.full((4, 4, 4), 7, np.uint8), np.eye(4)), tmp_path / "labels" / "b.nii.gz")
    (tmp_path / "images" / "c.nii.gz").write_bytes(b"")
    arguments = ["data=folders", f"data.root={tmp_path}", "data.classes=[background,organ]"]
    command = [sys.executable, "-m", "unet3d", "check-data", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "b" in done.stdout and "7" in done.stdout and "c.nii.gz" in done.stdout
