"""Runs in Docker containers, of an image with what the scripts need.

Scripts, modules and the sweep's folder are those of this machine, under their own paths.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmark import ROOT
from benchmark.backends import BackendError, CommonFlags, environment, local, task_words


@dataclass
class Flags(CommonFlags):
    """Runs of a suite in Docker containers."""

    image: str = "plainrl"  # the image
    memory_per_run: str | None = None  # memory of a run, such as 8g
    # one more word for docker run: --backend-arg=--network=host
    backend_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


def read_only_places(suite, runs, modules):
    """The files and folders that containers may read: sorted absolute paths.

    Raises BackendError if one of them is or contains the user's home, all of which they would see.
    """
    places = {str(ROOT / "benchmark"), str(suite), *modules}
    for run in runs.values():
        places |= {str(run.script.parent), run.flags.get("init_from", str(suite))}
    places = {Path(place).resolve() for place in places if os.path.exists(place)}
    for place in places:
        if Path.home().resolve().is_relative_to(place):
            raise BackendError(
                f"containers would see all of {place}, with your home folder: keep the scripts and "
                "the folders of PYTHONPATH in folders of their own"
            )
    return sorted(place for place in places if places.isdisjoint(place.parents))


def mount(place, *more):
    """A place as --mount reads it: CSV, since a path may have commas and quotes."""
    fields = ("type=bind", f"source={place}", f"target={place}", *more)
    return ",".join(f'"{field}"' for field in (field.replace('"', '""') for field in fields))


class Backend(local.Backend):
    """A container a run. Its `docker run` stays attached and passes signals and exit code on."""

    def __init__(self, flags, suite, folder, runs):
        super().__init__(flags, suite, folder, runs)
        self.modules = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        self.places = read_only_places(suite, runs, self.modules)
        if flags.dry_run:
            return
        if not shutil.which("docker"):
            raise BackendError("there is no command docker: install Docker")
        inspect = ["docker", "image", "inspect", flags.image]
        found = subprocess.run(inspect, capture_output=True, text=True)
        if found.returncode:
            raise BackendError(
                f"can't use the image {flags.image} ({found.stderr.strip()}): `docker build -t "
                f"{flags.image} {ROOT}` makes it where Docker runs"
            )
        (folder / "cache").mkdir(parents=True, exist_ok=True)

    def command(self, name, cores, gpus):
        words = ["docker", "run", "--rm", "--label", f"plainrl={name}"]
        words += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(self.folder)]
        words += ["--cpuset-cpus", ",".join(map(str, cores)), "--stop-timeout", str(local.STOP_S)]
        modules = ":".join([str(ROOT), *map(os.path.abspath, self.modules)])
        variables = environment(self.flags) | {
            "PYTHONPATH": modules,
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
        }
        for variable, value in variables.items():
            # Of W&B's only the names, since its key would be seen by all in this process's words
            words += ["--env", variable if variable.startswith("WANDB_") else f"{variable}={value}"]
        for place in self.places:
            words += ["--mount", mount(place, "readonly")]
        words += ["--mount", mount(self.folder)]
        if self.flags.memory_per_run:
            words += ["--memory", self.flags.memory_per_run]
        if gpus:
            words += ["--gpus", f'"device={",".join(gpus)}"']
        words += [*self.flags.backend_arg, self.flags.image]  # whose entry point is Python
        return [*words, *task_words(self.flags, self.suite, self.folder, name)[1:]]
