"""Stable-Baselines3's peers: a script's algorithm, networks and wrappers, with its run's flags.

    python -m benchmark.speed.sb3 CONFIG

CONFIG is the config.json of the script's run. Prints marks as JSON: [environment steps done, Unix
time] at the end of each iteration that has learned, or of every 100 steps with a replay buffer.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ale_py  # noqa: F401, registers the games
import numpy as np
import torch
from stable_baselines3 import DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

SAME = ("gamma", "seed")  # flags that have one name and meaning there and here
SAME_PPO = (*SAME, "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
SAME_REPLAY = (*SAME, "learning_rate", "buffer_size", "batch_size", "tau", "learning_starts")


def make_ppo(script, args):
    algorithm = PPO
    policy = {}
    if "atari" in script:
        network = "CnnPolicy"
        envs = make_atari_env(args.env_id, args.num_envs, args.seed)
    else:
        network = "MlpPolicy"
        envs = make_vec_env(args.env_id, args.num_envs, args.seed)
        policy["net_arch"] = list(args.hidden_sizes)
    if script == "ppo_continuous_action":
        envs = VecNormalize(envs, gamma=args.gamma)
        policy["log_std_init"] = args.init_log_std
    elif script == "ppo_atari_lstm":
        from sb3_contrib import RecurrentPPO as algorithm

        network = "CnnLstmPolicy"
        # One LSTM for policy and value, as in the script
        policy |= {"shared_lstm": True, "enable_critic_lstm": False}
        policy["lstm_hidden_size"] = args.hidden_size
    elif "atari" in script:
        envs = VecFrameStack(envs, 4)
    return algorithm(
        network,
        envs,
        learning_rate=lambda left: args.learning_rate * (left if args.anneal_lr else 1.0),
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        policy_kwargs=policy,
        device="cpu",
        **{name: getattr(args, name) for name in SAME_PPO},
    )


def make_off_policy(script, args):
    settings = {name: getattr(args, name) for name in SAME_REPLAY}
    settings |= {"train_freq": 1, "gradient_steps": 1, "device": "cpu"}
    if script == "dqn_atari":
        envs = VecFrameStack(make_atari_env(args.env_id, args.num_envs, args.seed), 4)
    else:
        envs = make_vec_env(args.env_id, args.num_envs, args.seed)
        settings["policy_kwargs"] = {"net_arch": list(args.hidden_sizes)}
    if script == "sac_continuous_action":
        entropy = "auto" if args.autotune else args.alpha
        return SAC("MlpPolicy", envs, ent_coef=entropy, **settings)
    if script in ("dqn", "dqn_atari"):
        settings |= {"exploration_initial_eps": args.start_e, "exploration_final_eps": args.end_e}
        settings |= {"exploration_fraction": args.exploration_fraction}
        settings |= {"train_freq": args.train_frequency}
        settings |= {"target_update_interval": args.target_network_frequency}
        return DQN("CnnPolicy" if script == "dqn_atari" else "MlpPolicy", envs, **settings)
    zeros = np.zeros(envs.action_space.shape)
    settings["action_noise"] = NormalActionNoise(zeros, zeros + args.exploration_noise)
    if script == "ddpg_continuous_action":
        return DDPG("MlpPolicy", envs, **settings)
    settings |= {"target_policy_noise": args.policy_noise, "target_noise_clip": args.noise_clip}
    return TD3("MlpPolicy", envs, policy_delay=args.policy_frequency, **settings)


def train(script, args):
    """Trains the script's peer -> marks."""
    torch.set_num_threads(args.num_threads)
    on_policy = script.startswith("ppo")
    model = make_ppo(script, args) if on_policy else make_off_policy(script, args)
    iteration = args.num_envs * args.num_steps if on_policy else 100
    update = model.train
    marks = []

    def update_and_mark(*given, **named):
        update(*given, **named)
        if model.num_timesteps % iteration == 0:
            marks.append((model.num_timesteps, time.time()))

    model.train = update_and_mark
    model.learn(args.total_timesteps)
    return marks


if __name__ == "__main__":
    args = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text())["args"])
    print(json.dumps(train(args.exp_name, args)))
