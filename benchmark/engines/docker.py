"""Runs in Docker containers, of an image with what the scripts need.

Scripts, modules and the sweep's folder are those of this machine, under their own paths.
"""

import contextlib
import csv
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmark import ROOT
from benchmark.engines import (
    GONE_S,
    EngineError,
    MemoryFlags,
    Words,
    ask,
    users_modules,
    wandb_variables,
)
from benchmark.engines.local import Local


@dataclass
class DockerFlags(MemoryFlags):
    """The flags of --backend docker."""

    image: str = "plainrl"  # the image, with what the scripts need
    # one more word for docker run: --backend-arg=--network=host
    backend_arg: Words = ()


def csv_line(*fields):
    """Fields as one line of CSV, which --mount and --gpus read: a path may have a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def read_only_places(runs):
    """The files and folders that containers may read: sorted absolute paths.

    They are benchmark/, the folders of the scripts and of the user's modules, and the runs that
    others are initialised from. What doesn't exist is left out, since Docker refuses to mount it,
    and so is what is inside another one.
    """
    places = {str(ROOT / "benchmark"), *users_modules()}
    for run in runs.values():
        places.add(str(Path(run["script"]).parent))
        if run["args"].get("init_from"):
            places.add(run["args"]["init_from"])
    places = {place for place in places if os.path.exists(place)}
    inner = {place for place in places if not places.isdisjoint(map(str, Path(place).parents))}
    return sorted(places - inner)


def check_places(places):
    """Raises EngineError if one of these folders is or contains the user's home."""
    home = Path(os.path.expanduser("~")).resolve()
    for place in places:
        if home.is_relative_to(Path(place).resolve()):
            raise EngineError(
                f"containers would see all of {place}, which is or contains your home folder: keep "
                "the scripts, the folders of PYTHONPATH and the sweep in folders of their own"
            )


class Docker(Local):
    """A container a run.

    Its `docker run` stays attached, and passes on signals and the exit code.
    """

    def __init__(self, store, runs, flags):
        super().__init__(store, runs, flags)
        self.places = read_only_places(runs)
        check_places([*self.places, str(store.folder)])

    def open(self):
        image = self.flags.image
        if not shutil.which("docker"):
            raise EngineError(
                "there is no command docker: install Docker "
                "(https://docs.docker.com/engine/install/)"
            )
        try:
            found = ask(["docker", "image", "inspect", image])
        except OSError as error:
            raise EngineError(f"can't use the image {image}: {error}") from None
        if found.returncode:
            said = " ".join(found.stderr.split())
            hint = "is Docker running?"
            if "No such image" in said:
                hint = f"`docker build -t {image} {ROOT}` makes it"
            raise EngineError(f"can't use the image {image} ({said}): {hint}")
        self.store.cache.mkdir(exist_ok=True)

    def command(self, name, cores, gpus):
        """The words that start a run's container."""
        folder = str(self.store.folder)
        modules = os.pathsep.join(dict.fromkeys([str(ROOT), *users_modules()]))
        words = ["docker", "run", "--rm", "--interactive", "--label", f"plainrl={name}"]
        words += ["--stop-timeout", str(GONE_S), "--user", f"{os.getuid()}:{os.getgid()}"]
        words += ["--cpuset-cpus", ",".join(map(str, cores)), "--workdir", folder]
        words += ["--env", f"PYTHONPATH={modules}"]
        words += ["--env", f"TORCHINDUCTOR_CACHE_DIR={self.store.cache}"]
        for place in self.places:
            if place != folder:
                mount = ("type=bind", f"source={place}", f"target={place}", "readonly")
                words += ["--mount", csv_line(*mount)]
        words += ["--mount", csv_line("type=bind", f"source={folder}", f"target={folder}")]
        if self.flags.memory_per_run:
            words += ["--memory", self.flags.memory_per_run]
        if gpus:
            words += ["--gpus", csv_line(f"device={','.join(gpus)}")]
        words += [*self.flags.backend_arg, self.flags.image, "-m", "benchmark.worker"]
        return [*words, folder, name, "--threads", str(len(cores)), "--env-from-stdin"]

    def environment(self, gpus):
        """None, the sweep's own: containers get their variables through command() and tell()."""
        return None

    def tell(self, process):
        """Sends W&B's variables through a pipe: Docker would write those of --env to its disk."""
        variables = json.dumps(wandb_variables()).encode()
        # That docker has failed shows soon enough
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(variables)
