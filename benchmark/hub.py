"""Puts a run on the Hugging Face Hub, or fetches one.

    python -m benchmark.hub upload runs/NAME USER/REPO [--yes]
    python -m benchmark.hub download USER/REPO [--dir runs]

upload shows the files and the model card, and with --yes sends them: the run's folder, without its
replay buffer, and the film of its last evaluation as replay.mp4. It needs a token (`hf auth login`
or HF_TOKEN). download needs none for a public repository.
"""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    snapshot_download,
)
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from tyro.conf import Positional, subcommand

from benchmark import fail
from benchmark.task import read_evaluation

# Of a run's folder, what another person has a use for
SENT = ("config.json", "*.py", "checkpoint.pt", "best.pt", "evaluation.json", "episodes.csv")
SENT += ("events.out.*",)
CARD = """
# {script} on {env_id}

A policy that [`{script}`]({script}) has trained with seed {seed} for {steps:,} steps. In {episodes}
episodes with deterministic actions its mean return is **{score}**.

The script is a single file. Its first lines name the packages that it needs, which
[uv](https://docs.astral.sh/uv/) installs:

```sh
hf download {repo} --local-dir {name}
# play it; --capture-video films it
uv run {name}/{script} --evaluate {name}
# train it anew
{command}
```

Networks, statistics, optimizer and flags:

```python
checkpoint = torch.load("{name}/checkpoint.pt", weights_only=True)
```

`config.json` has all flags, the versions of all packages and the machine, `episodes.csv` every
episode of the training.
"""


@dataclass
class Upload:
    """Shows what would be sent, or sends it."""

    run: Positional[Path]  # a finished run's folder
    repo: Positional[str]  # USER/REPO on the Hub, which is made
    yes: bool = False  # send it
    private: bool = False  # make a repository that only you see


@dataclass
class Download:
    """Fetches a run, to evaluate it, to go on with it or to begin with its networks."""

    repo: Positional[str]  # USER/REPO on the Hub
    dir: Path = Path("runs")  # the run's folder is REPO in it


def make_card(run, repo):
    """The model card of a run's folder, with the metadata of the Hub's RL models."""
    config = json.loads((run / "config.json").read_text())
    returns = read_evaluation(run)
    saved = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    args = saved["args"]
    script, *words = config["command"]
    script = Path(script).name
    if args["total_timesteps"] != config["args"]["total_timesteps"]:  # --resume has changed it
        words += ["--total-timesteps", str(args["total_timesteps"])]
    name = repo.split("/")[-1]
    start = ["uv", "run"]  # which reads the packages from the script that it starts
    if "torchrun" in (run / script).read_text():
        start += ["--with-requirements", f"{name}/{script}"]
        start += ["torchrun", "--standalone", "--nproc-per-node=1"]
    score = f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}"
    result = EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_type=args["env_id"],
        dataset_name=args["env_id"],
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=score,
    )
    data = ModelCardData(
        library_name="plainrl",
        pipeline_tag="reinforcement-learning",
        tags=[args["env_id"], "deep-reinforcement-learning", "reinforcement-learning"],
        model_name=script.removesuffix(".py"),
        eval_results=[result],
    )
    text = CARD.format(
        script=script,
        env_id=args["env_id"],
        seed=args["seed"],
        steps=args["total_timesteps"],
        episodes=len(returns),
        score=score,
        repo=repo,
        name=name,
        command=shlex.join([*start, f"{name}/{script}", *words]),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def upload(flags):
    run = flags.run
    for name in ("config.json", "evaluation.json", "checkpoint.pt"):
        if not (run / name).is_file():
            fail(f"{run} is no finished run: it has no {name}")
    if not read_evaluation(run):
        fail(f"{run} is no finished run: its evaluation.json has no returns")
    paths = sorted(path for pattern in SENT for path in run.glob(pattern))
    files = {path.name: path for path in paths}
    films = sorted(run.glob("videos/end/*.mp4"))
    if films:
        files["replay.mp4"] = films[0]
    try:
        card = make_card(run, flags.repo)
    except Exception as error:  # torch.load raises many kinds
        fail(f"{run} is no run of these scripts, or damaged: {type(error).__name__}")
    files["README.md"] = str(card).encode()
    for name, source in files.items():
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        print(f"{size:>12,} bytes  {name}")
    if not flags.yes:
        print(f"\n{card}\nnothing was sent to {flags.repo}: --yes sends it")
        return
    api = HfApi()
    url = api.create_repo(flags.repo, private=flags.private, exist_ok=True)
    operations = [CommitOperationAdd(name, source) for name, source in files.items()]
    api.create_commit(flags.repo, operations, commit_message=f"Run {run.absolute().name}")
    print(url)


def download(flags):
    folder = flags.dir / flags.repo.split("/")[-1]
    begun = folder / ".cache" / "huggingface"  # there until everything is fetched
    if folder.exists() and not begun.exists():
        fail(f"{folder} is there already: choose another --dir")
    # Where the Hub can't be reached, snapshot_download takes a part for the whole
    names = {file.rfilename for file in HfApi().model_info(flags.repo).siblings}
    if not {"config.json", "checkpoint.pt"} <= names:
        fail(f"{flags.repo} has no run of these scripts")
    snapshot_download(flags.repo, local_dir=folder, ignore_patterns=[".gitattributes"])
    shutil.rmtree(folder / ".cache")
    scripts = [path.name for path in folder.glob("*.py")]
    print(f"{folder}: python {scripts[0] if scripts else 'SCRIPT'} --evaluate {folder}")


def main():
    commands = Annotated[Upload, subcommand("upload")] | Annotated[Download, subcommand("download")]
    flags = tyro.cli(commands, prog="python -m benchmark.hub", description=__doc__)
    try:
        validate_repo_id(flags.repo)
    except HFValidationError as error:
        fail(error)
    if "/" not in flags.repo:
        fail(f"{flags.repo} must be USER/REPO")
    try:
        if isinstance(flags, Upload):
            upload(flags)
        else:
            download(flags)
    except (HTTPError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
