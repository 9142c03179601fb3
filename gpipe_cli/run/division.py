"""Divide the devices and the threads of this machine among the jobs of a sweep that run side by side."""

from __future__ import annotations

from gpipe_cli.accelerator.devices import available_cores, available_devices, is_accelerator
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.run.build import worker_devices


def check_jobs(settings: TrainConfig, jobs: int) -> None:
    """Refuse more jobs than this machine has accelerators, or cores if they run on the CPU."""
    devices, cores = available_devices(settings.devices), available_cores()
    if any(map(is_accelerator, devices)):
        if jobs > len(devices):
            raise ConfigError(
                f"jobs={jobs}: devices={settings.devices} gives {len(devices)}, and each job needs one; "
                f"give at most jobs={len(devices)}"
            )
    elif jobs > cores:
        raise ConfigError(f"jobs={jobs}: this machine has {cores} cores; give at most jobs={cores}")


def share_of_slot(settings: TrainConfig, jobs: int, slot: int) -> list[str]:
    """The overrides that give a job its share, where `jobs` run at a time.

    Accelerators are divided in the order of `devices`. Workers on the CPU share its cores, so their list stays as it
    is, and `threads=auto` becomes a share of the cores.
    """
    check_jobs(settings, jobs)
    devices = available_devices(settings.devices)
    words = []
    if any(map(is_accelerator, devices)):
        share = len(devices) // jobs
        words.append(f"devices=[{','.join(map(str, devices[slot * share : (slot + 1) * share]))}]")
    workers_on_cpu = sum(not is_accelerator(device) for device in worker_devices(settings))
    if settings.threads == "auto" and workers_on_cpu <= 1:  # several have one thread each anyway
        words.append(f"threads={max(1, available_cores() // jobs)}")
    return words
