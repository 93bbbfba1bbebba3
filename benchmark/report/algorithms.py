"""The README's table of algorithms: what each script is, one of its scores, and its speed."""

from dataclasses import dataclass

from benchmark.report.blocks import NOTE, SHORT, Table
from benchmark.report.formats import mean_std, number
from benchmark.speed.peers import OURS, PEER
from benchmark.speed.tables import ratios, spread


@dataclass(frozen=True)
class Algorithm:
    """A script, what it is, and the committed runs that its score comes from."""

    script: str  # stem of its file, and of its page in docs/
    what: str
    results: str | None  # folder in benchmark/results/; None before there are runs
    env_id: str
    flags: str = ""  # of these runs, where they don't have the defaults


HALF_CHEETAH = "HalfCheetah-v5"
PONG = "PongNoFrameskip-v4"
MASKED = "benchmark.environments:MaskedCartPole-v1"
MASKED_PENDULUM = "benchmark.environments:MaskedPendulum-v1"
ALGORITHMS = (
    Algorithm("vpg", "the policy gradient (REINFORCE)", "ladder_cartpole", "CartPole-v1"),
    Algorithm("a2c", "actor and critic", "ladder_cartpole", "CartPole-v1"),
    Algorithm("ppo", "PPO, discrete actions", "ladder_cartpole", "CartPole-v1"),
    Algorithm("ppo_mask", "PPO, MultiDiscrete actions and action masks", None, "CartPole-v1"),
    Algorithm("ppo_penalty", "PPO-Penalty, learning rate by the KL", None, "CartPole-v1"),
    Algorithm("ppo_continuous_action", "PPO, continuous actions", "ppo_mujoco", HALF_CHEETAH),
    Algorithm("ppo_atari", "PPO, Atari games", "ppo_atari", PONG),
    Algorithm(
        "ppo_atari_vector", "PPO, Atari games, played in threads", "ppo_atari_vector", PONG, "--amp"
    ),
    Algorithm("ppo_lstm", "PPO with memory", "ppo_lstm", MASKED),
    Algorithm("ppo_atari_lstm", "PPO with memory, Atari games", "ppo_atari_lstm", PONG),
    Algorithm("ddpg_continuous_action", "DDPG", "ddpg_mujoco", HALF_CHEETAH),
    Algorithm("ddpg_lstm", "DDPG with memory", "ddpg_lstm", MASKED_PENDULUM),
    Algorithm("td3_continuous_action", "TD3", "td3_mujoco", HALF_CHEETAH),
    Algorithm("sac_continuous_action", "SAC", "sac_mujoco", HALF_CHEETAH),
)


def make_table(results, speeds):
    """The table, with links relative to the repository's root.

    results: {folder: frame of its runs}; speeds: frame of speed.csv.
    """
    rounds = speeds[speeds["round"] != "full"]
    rows = []
    for algorithm in ALGORITHMS:
        script = algorithm.script
        score = "no score yet"
        if algorithm.results is not None:
            runs = results[algorithm.results]
            runs = runs[(runs["script"] == script) & (runs["env_id"] == algorithm.env_id)]
            name = algorithm.env_id.rpartition(":")[2]
            if algorithm.flags:
                runs = runs[runs["flags"] == algorithm.flags]
                score = score_text(runs, f"{name}, `{algorithm.flags}`")
            else:
                score = score_text(runs[runs["base"]], name)
        rows.append(
            (
                f"[`{script}.py`]({script}.py)",
                f"[{algorithm.what}](docs/{script}.md)",
                score,
                speed_text(rounds[rounds["script"] == script]),
            )
        )
    header = ("file", "what it is", "score", "speed")
    return Table(header, rows, (SHORT, SHORT, SHORT, NOTE))


def score_text(runs, what):
    """The score of a script's runs; if all were stopped, how far they came."""
    finished = runs[runs["state"] == "finished"]
    if not finished.empty:
        steps = finished["planned_steps"].iloc[0]
        seeds = "1 seed" if len(finished) == 1 else f"{len(finished)} seeds"
        return f"{what}, {steps:,.0f} steps, {seeds}: {mean_std(finished['score'])}"
    planned = in_millions(runs["planned_steps"].iloc[0])
    steps = from_to(runs["steps"], in_millions)
    return f"{what}, stopped at {steps} of {planned} steps: {from_to(runs['last_100'], number)}"


def in_millions(steps):
    return f"{steps / 1e6:.2g}M"


def from_to(values, form):
    """The lowest and the highest of several values, or the only one."""
    texts = [form(values.min()), form(values.max())]
    return " to ".join(dict.fromkeys(texts))


def speed_text(rounds):
    """PlainRL's steps/s divided by the peer's, in each precision; "" if it wasn't measured."""
    texts = []
    for program, label in zip(OURS, ("", "`--amp`: "), strict=True):
        found = ratios(rounds, "steps_per_second", program, PEER)
        if not found.empty:
            texts.append(f"{label}{spread(found, '.1f')}")
    return "; ".join(texts)
