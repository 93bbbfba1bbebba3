"""The scripts' flags as words of a command line, and what some of these flags mean.

Flags have their names in Args: --anneal-lr is anneal_lr. Only the standard library is needed.
"""

# A sweep sets these flags itself, so a suite can't
SET_BY_SWEEP = ("env_id", "seed", "run_name", "resume", "evaluate")
# These flags may change between two attempts of a run
MAY_CHANGE = ("num_threads", "resume")
# These flags change what a run shows or how fast it is, not what it learns
RUN_ONLY = (
    "exp_name",
    "torch_deterministic",
    "cuda",
    "compile",
    "num_threads",
    "emulator_threads",
    "track",
    "wandb_project_name",
    "wandb_entity",
    "capture_video",
    "video_interval",
    "save_model",
    "checkpoint_interval",
    "eval_episodes",
    "eval_max_steps",
    "eval_interval",
    "resume",
    "evaluate",
)
# Runs that differ only in these flags are of one variant
NO_VARIANT = (*RUN_ONLY, "total_timesteps", "env_id", "seed", "run_name")


def words_of(flags):
    """Flags, a dict -> the words of a command line, a tuple of str."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is False:
            words.append(f"--no-{flag}")
            continue
        words.append(f"--{flag}")
        if isinstance(value, (list, tuple)):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return tuple(words)
