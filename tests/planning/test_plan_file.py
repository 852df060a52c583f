"""plan=FILE: a group of overrides that the command line overrides, and nothing else, whoever wrote the file."""

from pathlib import Path

import pytest
import yaml
from promises import promise
from tables import says, table
from training import face, planned

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.report.report import plan_entry, promises

OPTIONS = yaml.safe_load("""
model: {features: [4, 8, 16], kernels: [[3, 3, 1], [3, 3, 3], [3, 3, 3]], strides: [[2, 2, 1], [2, 2, 2]]}
data: {patch: [32, 32, 8], augment: {mirror: [0]}}
optim: {lr: 0.002}
amp: true
batch: 3
""")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"options": OPTIONS, "promise": {"device": "cpu", "peak_bytes": 100}}))
    return f"plan={path}"


@promise("What scripts rely on", "plan.yaml", "`plan=` reads what `plan` wrote")
def test_a_plan_sets_options_and_is_recorded(plan: str) -> None:
    config = compose.compose([plan])
    assert (config.model.features, config.data.patch, config.batch, config.amp) == ([4, 8, 16], [32, 32, 8], 3, True)
    assert (f"plan={config.plan}", config.data.augment.mirror) == (plan, [0])


@pytest.mark.parametrize("place", [0, 3])
def test_the_command_line_overrides_a_plan_wherever_it_stands(plan: str, place: int) -> None:
    words = ["batch=1", "data.patch=[64,64,8]", "amp=false"]
    words.insert(place, plan)
    config = compose.compose(words)
    assert (config.batch, config.data.patch, config.amp, config.optim.lr) == (1, [64, 64, 8], False, 0.002)


def test_what_is_chosen_brings_its_own_options_in_place_of_the_plans(plan: str) -> None:
    config = compose.compose([plan, "model=unet", "optim=sgd"])
    assert config.model.features == [32, 64, 128, 256]
    assert (config.model.kernels, config.model.strides) == (3, 2)  # those of the plan are for three levels
    assert config.optim.lr == 0.01
    assert compose.compose([plan, "model.features=[2,4,6]"]).model.strides == OPTIONS["model"]["strides"]


def test_each_job_of_a_sweep_has_the_plan(plan: str, tmp_path: Path) -> None:
    jobs = planned(["-m", plan, "batch=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    assert [(job.config.batch, job.config.data.patch) for job in jobs] == [(1, [32, 32, 8]), (2, [32, 32, 8])]
    assert jobs[0].composed.task_overrides == [plan, "batch=1"]


@promise(
    "checkpoints and run folders",
    "a plan (`plan=FILE`) is plain values of a few options, checked as options are: no code, account, "
    "checkpoint or folder but `data.root`",
)
@pytest.mark.parametrize(
    ("text", "named"),
    table("""
                                                 | no plan
    [1, 2]                                       | no plan
    options: 3                                   | no plan
    {options: {}, extra: 1}                      | extra
    options: {patch: [1,1,1]}                    | data.patch
    options: {model: {path: evil:run}}           | model.path
    options: {loss: {path: evil:run}}            | loss.path
    options: {loggers: [evil:run]}               | loggers
    options: {data: {transforms: [evil:run]}}    | data.transforms
    options: {data: {allow_outside: true}}       | data.allow_outside
    options: {data: {groups: /etc/passwd}}       | data.groups
    options: {data: {split: split.json}}         | data.split
    options: {wandb: {mode: online}}             | wandb.mode
    options: {resume: /}                         | resume
    options: {init: net.pt}                      | init
    options: {hydra: {run: {dir: /}}}            | hydra.run.dir
    options: {batch: '${oc.env:HOME}'}           | ${
    options: {batch: many}                       | batch
    options: {batch: -1}                         | batch
    options: !!python/object/apply:os.system [id] | cannot be read
    {options: &a {batch: 1}, promise: *a}        | cannot be read
    {options: {batch: 1}, promise: {peak: 1}}    | promise.peak
    {options: {batch: 1}, promise: {peak_bytes: lots}} | promise.peak_bytes
    {options: {batch: 1}, promise: {step_s: .nan}} | promise.step_s
"""),
)
def test_what_is_no_plan_is_refused_in_one_line(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        compose.compose([f"plan={tmp_path / 'plan.yaml'}"])
    assert says(str(error.value), named)


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        compose.compose([f"plan={tmp_path / 'none.yaml'}"])


@promise(
    "Config",
    "options of `plan` that need other options: an entry for each level, valid convolutions",
    "one line before data are read",
)
@pytest.mark.parametrize(
    ("words", "named"),
    table("""
    data=decathlon                                       | data.root
    data=decathlon time=8h                               | data.root
    data=decathlon budget=lots data.root=.               | budget
    data=decathlon wandb.mode=online data.root=.         | wandb
    data=decathlon plan=plan.yaml data.root=.            | plan
    data=decathlon model.path=a:b data.root=.            | model.path
    data=decathlon model.kernels=[[3,3,1],[3,3,3]] data.root=. | model.kernels
    data=decathlon model.blocks=[1,1] data.root=.        | model.blocks
    data=decathlon model=cicek2016 data.root=.           | padding
    data=decathlon data.patch=[0,8,8] data.root=.        | data.patch
    --network nnunet -o plan.yaml                        | -o
    --network nnunet --module a:b                        | --module
    --network nothing                                    | model
    --network nnunet --proportions 1x1                   | --proportions
    --network nnunet --peak-of 30x30x30                  | 32x32x32
    --network nnunet --peak-of 32x32x32 budget=1GiB      | budget
    --network nnunet --multiple 8                        | --multiple
    --network nnunet --classes 1                         | --classes
    --network nnunet ckpt=2                              | ckpt
    --network nnunet recompute=auto                      | budget
    --network nnunet budget=11                           | budget
    --network cicek2016                                  | padding
    --module a:b optim=sgd                               | optim
    --module a:b recompute=auto budget=1GiB              | recompute=auto
"""),
)
def test_a_mistake_in_the_command_is_one_line(
    words: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert face("plan", *words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says(captured.err, named)


def test_a_receipt_names_what_changed_and_has_both_errors() -> None:
    plan = {"device": "cpu", "peak_bytes": 110, "step_s": 2.0, "seconds": 12.0}
    assert plan_entry({"batch": 3, "amp": True}, plan, {"batch": 2, "amp": True})["changed"] == ["batch"]
    memory = {"plan": {**plan, "changed": []}, "measured": {"peak_bytes": 100}}
    records = [{"step": 1, "time/step_s": 4.0}, {"step": 2, "time/step_s": 4.0}, {"step": 2, "time/val_s": 2.0}]
    errors = {row.key: row.error for row in promises(memory, records)}
    assert errors == {"tensors": pytest.approx(0.1), "step": pytest.approx(-0.5), "seconds": pytest.approx(0.2)}
    memory["plan"]["changed"] = ["steps"]
    assert "seconds" not in {row.key for row in promises(memory, records)}
    assert promises({"measured": {"peak_bytes": 100}}, records) == []


def test_on_cuda_a_receipt_has_each_peak_by_its_name() -> None:
    plan = {"device": "cuda", "peak_bytes": 90, "allocated_bytes": 100, "reserved_bytes": 120}
    measured = {"peak_bytes": 100, "reserved_bytes": 100, "ledger": {"peak_bytes": 90}}
    rows = promises({"plan": plan, "measured": measured}, [])
    assert {row.key: row.error for row in rows} == {"tensors": 0, "allocated": 0, "reserved": pytest.approx(0.2)}


def test_a_strangers_memory_file_breaks_no_receipt() -> None:
    plan = {"device": "cpu", "peak_bytes": 1, "step_s": "x", "seconds": [], "changed": "no"}
    assert [row.key for row in promises({"plan": plan}, [{"time/step_s": "y"}])] == ["tensors"]
