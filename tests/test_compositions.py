"""How often Hydra composes: once for a run, and for a sweep once a job and once for its launcher."""

import shutil
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig
from training import PLAIN, TINY, train

COMPOSED = "a config is composed\n"
compose = ConfigLoaderImpl.load_configuration


def compose_aloud(*given: object, **named: object) -> DictConfig:
    print(COMPOSED, end="", flush=True)
    return compose(*given, **named)


def tell_each_composition() -> None:
    """Print a line for each composition, whoever asks for it: the compose API, hydra.main or a launcher."""
    ConfigLoaderImpl.load_configuration = compose_aloud  # type: ignore[method-assign]


def test_a_run_composes_its_config_once(tmp_path: Path) -> None:
    (tmp_path / "own" / "optim").mkdir(parents=True)
    (tmp_path / "own" / "optim" / "mine.yaml").write_text("lr: 0.5\n")
    words = [*TINY, "--config-dir=own", "optim=mine", "resume=auto", "hydra.run.dir=run"]
    done = train(tmp_path, *words, hook=tell_each_composition)
    assert done.code == 0, done.err
    assert done.out.count(COMPOSED) == 1
    assert "lr: 0.5\n" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("words", [["resume=run", "optim=adamw"], ["resume=auto", "hydra.run.dir=run"]], ids=" ".join)
def test_a_run_that_goes_on_composes_its_config_once(words: list[str], finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    data = f"data.root={finished.parent / 'data' / 'phantom'}"
    done = train(tmp_path, *words, data, "steps=5", "eval_every=0", hook=tell_each_composition)
    assert done.code == 0, done.err
    assert done.out.count(COMPOSED) == 1


def test_a_sweep_of_three_composes_at_most_four_times_before_its_first_job(tmp_path: Path) -> None:
    words = ["dry_run=true", "hydra.sweep.dir=sweep", "-m", "ckpt=0,2,3"]
    done = train(tmp_path, *TINY, *PLAIN, *words, hook=tell_each_composition)
    assert done.code == 0, done.err
    before, first_job, _ = done.out.partition("job 0: ")
    assert first_job and before.count(COMPOSED) <= 4
