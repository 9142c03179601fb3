"""`gpipe train` for tests of faults, from a configuration that was composed before."""

from __future__ import annotations

from omegaconf import OmegaConf

from gpipe_cli import cli
from gpipe_cli.commands import train
from gpipe_cli.config.compose import settings_of
from gpipe_cli.config.job import Job
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.runs.saved import saved_config
from tests.support.fault_injection import ALLOW, TEMPLATE, TRAIN

ENGINES = {"engine=processes", "engine=single", "engine=threads"}


def train_without_hydra(arguments: list[str]) -> int:
    """Do what `main` does without Hydra: composing takes longer than the rest of such a run."""
    tree = saved_config(TEMPLATE[0])
    given = [word for word in arguments[1:] if word not in (*TRAIN, *ENGINES) or word == ALLOW]
    for word in ENGINES & set(arguments):
        tree.engine = {"_target_": f"gpipe_cli.engines.{word.removeprefix('engine=')}.build"}
    tree.merge_with(OmegaConf.from_dotlist(["run_dir=null", "resume=null", *given]))
    overrides = arguments[1:]
    try:
        settings = settings_of(tree, "train", overrides)
        assert isinstance(settings, TrainConfig)
        train.run(settings, Job("train", tuple(overrides), "gpipe train", tree, "model", settings))
    except BaseException as error:  # noqa: BLE001 - as in `main`
        return cli._fail(error, debug=False)
    return 0
