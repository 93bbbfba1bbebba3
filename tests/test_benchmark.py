"""benchmark.collect on run folders made by hand, and the arithmetic of benchmark.speed."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DDPG, PPO

import ddpg_continuous_action
import ppo_atari
import ppo_atari_lstm
import ppo_continuous_action
from benchmark import collect, speed
from benchmark.environments import MaskedCartPole

ROOT = Path(__file__).resolve().parent.parent
# As config.json has them
DEFAULTS = json.loads(json.dumps(asdict(ppo_continuous_action.Args())))


def make_run(folder, seed, returns, evaluation=None, **flags):
    """A run's folder with one episode of 1,000 steps and 0.5 s for each of returns."""
    folder.mkdir(parents=True)
    config = {
        "args": DEFAULTS | {"seed": seed, "run_name": folder.name} | flags,
        "git_commit": "abc",
        "command": ["ppo_continuous_action.py", "--seed", str(seed)],
        "versions": {"torch": "1.2.3"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        f"{1000 * (i + 1)},{0.5 * (i + 1)},0,{x},1000,truncation\n" for i, x in enumerate(returns)
    ]
    (folder / "episodes.csv").write_text(
        "global_step,wall_seconds,env,return,length,ended_by\n" + "".join(lines)
    )
    if evaluation is not None:
        (folder / "evaluation.json").write_text(
            json.dumps({"returns": evaluation, "lengths": [1000, 1000]})
        )
    return folder


@pytest.fixture
def run_collect(monkeypatch, capsys):
    """run_collect(*args): benchmark.collect with these words; its exit code and what it printed."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["collect", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            collect.main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess([], int(stop.value.code), said.out, said.err)

    return run


def test_collect_row_of_a_finished_run(tmp_path):
    """Means are of the last 100 and 20 episodes only, speed is steps by wall time.

    The deviation has ddof=0.
    """
    returns = [9999.0] * 50 + [1.0] * 80 + [11.0] * 20
    row = collect.read_run(
        make_run(tmp_path / "a", 7, returns, [1.0, 3.0], learning_rate=0.001, anneal_lr=False)
    )
    assert row["status"] == "finished"
    assert (row["env_id"], row["seed"], row["steps"], row["episodes"]) == (
        "HalfCheetah-v5",
        7,
        150_000,
        150,
    )
    assert row["flags"] == "--learning-rate 0.001 --no-anneal-lr"
    assert (row["last_100"], row["last_20"]) == (pytest.approx(3.0), pytest.approx(11.0))
    assert (row["evaluation_mean"], row["evaluation_std"], row["evaluation_episodes"]) == (
        2.0,
        1.0,
        2,
    )
    assert (row["steps_per_second"], row["wall_seconds"]) == (2000.0, 75.0)
    assert (row["versions"], row["git_commit"]) == ("torch=1.2.3", "abc")
    assert row["command"] == "python ppo_continuous_action.py --seed 7"


def test_collect_names_unfinished_runs_and_leaves_them_out_of_means(tmp_path, run_collect):
    """What a user sees: two seeds averaged, two runs named, all in the CSV.

    Named are the killed run and the run without an episode.
    """
    make_run(tmp_path / "runs" / "one", 1, [10.0], [100.0, 100.0])
    make_run(tmp_path / "runs" / "two", 2, [20.0], [200.0, 200.0])
    make_run(tmp_path / "runs" / "killed", 3, [5000.0, 5000.0])
    make_run(tmp_path / "runs" / "young", 4, [])
    make_run(tmp_path / "runs" / "other", 5, [7.0], [8.0, 8.0], init_log_std=-0.5)
    config = make_run(tmp_path / "runs" / "copy", 6, [3.0], [4.0, 4.0]) / "config.json"
    config.write_text(
        config.read_text().replace('"ppo_continuous_action.py"', '"/home/me/my_ppo.py"')
    )
    (tmp_path / "runs" / "broken").mkdir()
    done = run_collect(tmp_path / "runs", "--out", tmp_path / "results" / "out.csv")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| HalfCheetah")]
    lines = {line.split(" | ")[2]: line for line in rows if "| ppo_continuous_action |" in line}
    assert set(lines) == {"defaults", "--init-log-std -0.5"}
    assert any(
        "| my_ppo |" in line and "| 1: 6 | 3.0 +- 0.0 | 4.0 +- 0.0 |" in line for line in rows
    )
    assert "| 2: 1 2 | 15.0 +- 5.0 | 150.0 +- 50.0 | 2,000 |" in lines["defaults"]
    assert "| 2 killed (step 2000), young (step 0) |" in lines["defaults"]
    assert "| 1: 5 | 7.0 +- 0.0 | 8.0 +- 0.0 |" in lines["--init-log-std -0.5"]
    assert "ddof=0" in done.stdout and "broken (FileNotFoundError" in done.stdout
    with open(tmp_path / "results" / "out.csv") as file:
        read = list(csv.DictReader(file))
    status = {row["run"]: (row["status"], row["last_100"], row["evaluation_mean"]) for row in read}
    assert {row["command"] for row in read if row["run"] == "copy"} == {"python my_ppo.py --seed 6"}
    assert status["killed"] == ("unfinished", "5000.0", "") and status["young"] == (
        "unfinished",
        "",
        "",
    )
    assert status["one"] == ("finished", "10.0", "100.0") and len(status) == 6


def test_collect_reads_a_run_that_is_being_written(tmp_path):
    """Half a last line of episodes.csv and half an evaluation.json are not there yet."""
    run = make_run(tmp_path / "a", 1, [1.0, 2.0])
    with open(run / "episodes.csv", "a") as file:
        file.write("3000,1.5,0,-12")
    (run / "evaluation.json").write_text('{"returns": [1.0')
    row = collect.read_run(run)
    assert (row["status"], row["steps"], row["last_100"]) == ("unfinished", 2000, 1.5)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[3]", b"{}", b'{"returns": [null]}'])
def test_collect_names_evaluations_that_cannot_be_read(tmp_path, run_collect, content):
    """Their runs count as unfinished, the others as ever."""
    make_run(tmp_path / "runs" / "good", 1, [10.0], [100.0])
    bad = make_run(tmp_path / "runs" / "bad", 2, [20.0])
    (bad / "evaluation.json").write_bytes(content)
    done = run_collect(tmp_path / "runs", "--out", tmp_path / "out.csv")
    assert done.returncode == 0
    assert "| 1: 1 | 10.0 +- 0.0 | 100.0 +- 0.0 | 2,000 | 1 bad (step 1000) |" in done.stdout
    assert f"unfinished: {bad}: evaluation.json can't be read (" in done.stdout
    assert f"{tmp_path}/runs/good: " not in done.stdout
    with open(tmp_path / "out.csv") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["finished", "unfinished"]


@pytest.mark.filterwarnings("error")
def test_collect_of_runs_without_evaluation_episodes(tmp_path, run_collect):
    """--eval-episodes 0: they are finished, and have no score of an evaluation."""
    make_run(tmp_path / "runs" / "none", 1, [10.0], [])
    done = run_collect(tmp_path / "runs", "--out", tmp_path / "out.csv")
    assert "| 1: 1 | 10.0 +- 0.0 | - | 2,000 | 0  |" in done.stdout
    with open(tmp_path / "out.csv") as file:
        (row,) = csv.DictReader(file)
    cells = [row[f"evaluation_{name}"] for name in ("mean", "std", "episodes")]
    assert (row["status"], cells) == ("finished", ["", "", "0"])
    make_run(tmp_path / "runs" / "some", 2, [10.0], [100.0])
    done = run_collect(tmp_path / "runs")
    assert "| 2: 1 2 | 10.0 +- 0.0 | 100.0 +- 0.0 | 2,000 | 0  |" in done.stdout


def test_collect_names_that_are_no_text(tmp_path, run_collect):
    """A folder's name may be any bytes: it is shown with what can be printed of it."""
    runs = tmp_path / "runs"
    make_run(runs / "good", 1, [10.0], [100.0])
    made = make_run(tmp_path / "made", 2, [20.0], [200.0])
    writer = ppo_continuous_action.SummaryWriter(made)
    writer.add_scalar("eval/episodic_return", -3.0, 500)
    writer.close()
    config = made / "config.json"
    config.write_text(config.read_text().replace('"seed": 2', '"seed": 2, "note": "\\udc80"'))
    made.rename(runs / os.fsdecode(b"bad\xff"))
    (runs / os.fsdecode(b"none\xfe")).mkdir()
    out = tmp_path / "out.csv"
    done = run_collect(runs, "--out", out, "--curves", tmp_path / "curves.csv")
    assert done.returncode == 0
    said = done.stdout
    assert "| defaults | 1: 1 | 10.0 +- 0.0 | 100.0 +- 0.0 |" in said
    assert "| --note '\\udc80' | 1: 2 | 20.0 +- 0.0 | 200.0 +- 0.0 |" in said
    assert "not a run, or damaged: " in said and "none\\udcfe (FileNotFoundError" in said
    with open(out) as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["good", "bad\\udcff"]
    with open(tmp_path / "curves.csv") as file:
        curves = [tuple(row.values())[1:] for row in csv.DictReader(file)]
    assert sorted(curves) == [
        ("1", "good", "training", "1000", "10.0"),
        ("2", "bad\\udcff", "evaluation", "500", "-3.0"),
        ("2", "bad\\udcff", "training", "1000", "20.0"),
    ]


def test_collect_curves(tmp_path, run_collect):
    """Every training episode and every evaluation, from episodes.csv and TensorBoard."""
    for seed in (1, 2):
        run = make_run(tmp_path / "runs" / f"run{seed}", seed, [10.0 * seed, 20.0])
        writer = ppo_continuous_action.SummaryWriter(run)
        writer.add_scalar("eval/episodic_return", -seed, 500)
        writer.add_scalar("charts/SPS", 1, 500)
        writer.close()
    done = run_collect(tmp_path / "runs", "--curves", tmp_path / "out" / "curves.csv")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "curves.csv").read_text().split() == [
        "env_id,seed,run,kind,global_step,return",
        "HalfCheetah-v5,1,run1,training,1000,10.0",
        "HalfCheetah-v5,1,run1,training,2000,20.0",
        "HalfCheetah-v5,1,run1,evaluation,500,-1.0",
        "HalfCheetah-v5,2,run2,training,1000,20.0",
        "HalfCheetah-v5,2,run2,training,2000,20.0",
        "HalfCheetah-v5,2,run2,evaluation,500,-2.0",
    ]


def test_collect_counts_a_run_once(tmp_path, run_collect):
    run = make_run(tmp_path / "runs" / "a", 1, [10.0], [100.0])
    done = run_collect(tmp_path / "runs", run, tmp_path / "runs" / ".." / "runs")
    assert done.returncode == 0 and "| 1: 1 |" in done.stdout


def test_collect_without_runs_fails(tmp_path, run_collect):
    assert run_collect(tmp_path).returncode == 1
    missing = run_collect(tmp_path / "missing")
    assert missing.returncode == 2 and "no such folder" in missing.stderr


def test_an_output_file_that_cannot_be_written_is_one_sentence(tmp_path, run_collect):
    make_run(tmp_path / "runs" / "a", 1, [10.0], [100.0])
    command = [sys.executable, "-m", "benchmark.speed", "--out", tmp_path]
    slow = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "round" not in slow.stdout  # at once, not after the measurement
    for done in (run_collect(tmp_path / "runs", "--out", tmp_path), slow):
        assert done.returncode == 2
        assert f"can't write {tmp_path} (Is a directory): give another" in done.stderr
        assert "Traceback" not in done.stderr


def test_collect_imports_no_script_from_elsewhere():
    """The command of a stranger's config.json is no path to code that is run."""
    assert collect.script_defaults(["/tmp/json.py"]) == {}
    assert collect.script_defaults(["elsewhere/ppo_continuous_action.py"]) == DEFAULTS


def test_collect_flags_of_several_values():
    """config.json has lists where a script has tuples."""
    defaults = collect.script_defaults(["ddpg_continuous_action.py"])
    assert (
        defaults["hidden_sizes"] == [256, 256] and collect.changed_flags(defaults, defaults) == ""
    )
    assert (
        collect.changed_flags(defaults | {"hidden_sizes": [400, 300]}, defaults)
        == "--hidden-sizes 400 300"
    )


def test_speed_steady_state():
    """1,000 steps by 10 s after the first mark.

    The first 2,048 steps at that speed are no part of the start-up.
    """
    marks = [(2048, 130.48), (4096, 140.0), (12048, 230.48)]
    assert speed.steady_state(marks, started=100.0, ended=240.0) == pytest.approx(
        {
            "steps": 12048,
            "steps_per_second": 100.0,
            "start_up_s": 10.0,
            "wall_s": 140.0,
            "wall_s_1m": 140 + 9879.52,
        }
    )


def test_speed_ratios_pair_runs_of_one_round():
    rows = [
        {"round": r, "program": p, "x": x}
        for r, p, x in [
            (1, "a", 8.0),
            (1, "b", 2.0),
            (2, "b", 10.0),
            (2, "a", 30.0),
            (3, "a", 6.0),
            (3, "b", 6.0),
        ]
    ]
    assert speed.ratios(rows, "x", "a", "b") == [4.0, 3.0, 1.0]
    assert speed.spread([4.0, 3.0, 1.0], ".1f") == "3.0 | 1.0 | 4.0"


def test_speed_tables():
    """One line for each program and each ratio.

    The median of the later rounds leaves the first, compiling, one out.
    """
    rows = [
        {
            "round": r,
            "program": p,
            "steps_per_second": v * s,
            "start_up_s": 10.0 * (3 - r),
            "wall_s_1m": 1e4 / v,
            "peak_mb": 50.0 * r,
        }
        for r, s in ((1, 1), (2, 3))
        for p, v in (("plainrl", 800), ("sb3", 100), ("env", 1600), ("Other", 200))
    ]
    for row in rows:
        row |= {"start_up_s": "", "wall_s_1m": "", "peak_mb": ""} if row["program"] == "env" else {}
    text = speed.tables(rows)
    assert "| PlainRL | 1,600 | 800 | 2,400 | 20.0 | 10.0 | 12.5 | 12.5 | 100 |" in text
    assert "| environment alone | 3,200 | 1,600 | 4,800 | - | - | - | - | - |" in text
    assert "| steps/s, PlainRL / Stable-Baselines3 | 8.00 | 8.00 | 8.00 | 8.00, 8.00 |" in text
    assert "| steps/s, PlainRL / environment alone | 0.50 |" in text
    assert "| steps/s, PlainRL / Other | 4.00 |" in text
    assert "| 1M steps, Stable-Baselines3's time / PlainRL's | 8.00 |" in text
    assert (
        "1M steps"
        not in speed.tables([row for row in rows if row["program"] != "sb3"])
        .split("ratio")[1]
        .split("steps/s: steady")[0]
    )


@pytest.mark.parametrize(
    "said, number",
    [
        ("SPS: 12\nglobal_step=5, SPS: 1234\n", 1234.0),
        ("at 1,234.5 steps/s, 3 left", 1234.5),
        ("sps 7", 7.0),
        ("FPS = 300", 300.0),
        ("SPS: 5\nthat was the SPS, thanks", 5.0),
        ("12 seconds", None),
        ("", None),
    ],
)
def test_speed_of_another_program_is_the_last_that_it_prints(said, number):
    assert speed.read_speed(said) == number


def test_speed_beside_any_command(tmp_path, monkeypatch, capsys):
    """What a user gets: the CSV, the tables, the chart.

    The other program is run as it is written, where we are.
    """
    rows = iter(
        [
            {
                "steps": 4096,
                "steps_per_second": x,
                "start_up_s": 1.0,
                "wall_s": 2.0,
                "wall_s_1m": 9.0,
            }
            for x in (1000.0, 500.0, 250.0, 8000.0)
        ]
    )
    monkeypatch.setattr(speed, "steady_state", lambda *marks: next(rows))
    monkeypatch.setattr(speed, "read_marks", lambda *run: [])
    monkeypatch.setattr(speed, "command_of", lambda *run: ["true"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "speed",
            "ppo_atari",
            "--rounds",
            "1",
            "--out",
            "out/speed.csv",
            "--other",
            "Mine=echo here > here.txt; echo SPS: 2000",
        ],
    )
    speed.main()
    assert (tmp_path / "here.txt").exists()
    table = (tmp_path / "out" / "speed.md").read_text()
    assert (
        "## ppo_atari, BreakoutNoFrameskip-v4" in table
        and "| steps/s, PlainRL / Mine | 0.50 |" in table
    )
    with open(tmp_path / "out" / "speed.csv") as file:
        speeds = {row["program"]: float(row["steps_per_second"]) for row in csv.DictReader(file)}
    assert speeds == {
        "plainrl": 1000.0,
        "sb3": 500.0,
        "env": 250.0,
        "arithmetic": 8000.0,
        "Mine": 2000.0,
    }
    assert (
        tmp_path / "out" / "speed_chart.png"
    ).stat().st_size > 5000 and "PlainRL / Mine" in capsys.readouterr().out
    with open(tmp_path / "out" / "speed_chart.csv") as file:  # in units of the peer's
        assert {row["variant"]: float(row["value"]) for row in csv.DictReader(file)} == {
            "plainrl": 2.0,
            "sb3": 1.0,
            "Mine": 4.0,
        }


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["ppo_atri"], "no ppo_atri to measure"),
        (["--steps", "4095"], "needs --steps 4096"),
        (["--steps", "0"], "needs --steps 4096"),
        (["ddpg_continuous_action", "--steps", "299"], "needs --steps 300"),
        (["--rounds", "0"], "one of --rounds"),
        (["--other", "x"], "NAME=COMMAND"),
        (["--other", "sb3=ls"], "the name none of"),
        (["--other", "x=ls", "--other", "x=pwd"], "the same NAME"),
    ],
)
def test_speed_refuses_bad_flags(flags, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speed", *flags])
    with pytest.raises(SystemExit, match="2"):
        speed.parse_args()
    assert sentence in capsys.readouterr().err


def test_speed_of_a_program_without_a_speed_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="printed no speed"):
        speed.measure("Mine", 1, "ppo_atari", "x", 1, 1, tmp_path, "echo nothing")
    with pytest.raises(SystemExit, match="exit code 3"):
        speed.measure("Mine", 1, "ppo_atari", "x", 1, 1, tmp_path, "exit 3")


def test_speed_keeps_what_it_measured_before_a_program_failed(tmp_path, monkeypatch):
    def measure(program, label, *_):
        if (program, label) == ("Mine", 2):
            sys.exit("error: Mine failed")
        return {"round": label, "program": program}

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "PROGRAMS", {"plainrl": "PlainRL"})
    monkeypatch.setattr(
        sys, "argv", ["speed", "ppo_atari", "--out", f"{tmp_path}/speed.csv", "--other", "Mine=ls"]
    )
    with pytest.raises(SystemExit, match="Mine failed"):
        speed.main()
    with open(tmp_path / "speed.csv") as file:
        assert [(row["round"], row["program"]) for row in csv.DictReader(file)] == [
            ("1", "plainrl"),
            ("1", "Mine"),
            ("2", "plainrl"),
        ]


def test_speed_says_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(speed, "PACKAGES", ("numpy", "no-such-package"))
    assert "no-such-package not installed" in speed.machine()


def test_speed_of_the_arithmetic_counts_the_products_of_an_iteration(tmp_path):
    """DDPG's hundred updates on Pendulum, counted by hand.

    They are products of 256 rows, forward and backward.
    """
    code = f"""if True:
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from statistics import median
        from benchmark import speed
        import torch
        speed.median = lambda times: 2 * 1024**3 / 1e9  # a machine of 1 GFLOPS
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None
        print(speed.work_arithmetic("ddpg_continuous_action", "Pendulum-v1", 1000, 1)[1])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps, seconds = eval(done.stdout.splitlines()[-1])
    actor, critic = 3 * 256 + 256 * 256 + 256, 4 * 256 + 256 * 256 + 256
    # Targets forward; critic forward and backward, its first layer without its inputs' gradient;
    # actor likewise, through the critic, of which only the inputs' gradients are needed
    products = (actor + critic) + (3 * critic - 4 * 256) + (3 * actor - 3 * 256) + 2 * critic
    assert steps == 1000 and seconds == pytest.approx(1000 * 2 * 256 * products / 1e9, rel=0.02)


def test_speed_reads_marks_of_a_script_from_its_events(tmp_path):
    """Steps and wall times of charts/SPS, all of them, and nothing else."""
    writer = ppo_continuous_action.SummaryWriter(tmp_path / "runs" / "speed")
    for i in range(1, 12_001):  # TensorBoard's reader keeps a sample of 10,000 unless told
        writer.add_scalar("charts/SPS", 0, 2048 * i, walltime=100.0 + i)
        writer.add_scalar("charts/learning_rate", 0, 1, walltime=0.0)
    writer.close()
    assert speed.read_marks("plainrl", tmp_path) == [
        (2048 * i, 100.0 + i) for i in range(1, 12_001)
    ]


def test_speed_of_the_environment_alone_as_a_user_runs_it():
    """The worker's output gives the marks: no steps at first, all at the end, later."""
    command = speed.command_of("env", "ppo_continuous_action", "Pendulum-v1", 500, 1)
    done = subprocess.run(command, capture_output=True, text=True)
    (first_step, first), (last_step, last) = json.loads(done.stdout)
    assert (first_step, last_step) == (0, 500) and last > first


def holds_the_scripts_hyper_parameters(sb3, args):
    """Each default of the script that SB3's PPO shares has the same value there."""
    assert (sb3.n_envs, sb3.n_steps, sb3.batch_size) == (
        args.num_envs,
        args.num_steps,
        args.num_envs * args.num_steps // args.num_minibatches,
    )
    assert (sb3.n_epochs, sb3.gamma, sb3.gae_lambda) == (
        args.update_epochs,
        args.gamma,
        args.gae_lambda,
    )
    assert (sb3.clip_range(1.0), sb3.clip_range_vf(1.0)) == (args.clip_coef, args.clip_coef)
    assert (sb3.ent_coef, sb3.vf_coef, sb3.max_grad_norm) == (
        args.ent_coef,
        args.vf_coef,
        args.max_grad_norm,
    )
    assert (sb3.lr_schedule(1.0), sb3.lr_schedule(0.5)) == (
        args.learning_rate,
        args.learning_rate / 2,
    )
    assert sb3.normalize_advantage == args.norm_adv and sb3.policy.optimizer.defaults["eps"] == 1e-5


def test_speed_sb3_has_the_hyper_parameters_of_ppo_atari(monkeypatch):
    made = []
    monkeypatch.setattr(PPO, "learn", lambda self, steps: made.append(self))
    speed.work_sb3("ppo_atari", "PongNoFrameskip-v4", 1024, 1)
    holds_the_scripts_hyper_parameters(made[0], ppo_atari.Args())
    assert sum(p.numel() for p in made[0].policy.parameters()) == 1_687_719
    assert made[0].observation_space.shape == (4, 84, 84)


def test_speed_sb3_has_the_hyper_parameters_of_ppo_atari_lstm(monkeypatch):
    made = []
    monkeypatch.setattr(RecurrentPPO, "learn", lambda self, steps: made.append(self))
    speed.work_sb3("ppo_atari_lstm", "PongNoFrameskip-v4", 1024, 1)
    args, policy = ppo_atari_lstm.Args(), made[0].policy
    holds_the_scripts_hyper_parameters(made[0], args)
    ours = sum(p.numel() for p in ppo_atari_lstm.Agent(6, args).parameters())
    assert sum(p.numel() for p in policy.parameters()) == ours
    assert (
        policy.lstm_critic is None
        and policy.shared_lstm
        and policy.lstm_actor.hidden_size == args.hidden_size
    )
    assert made[0].observation_space.shape == (1, 84, 84)


def test_speed_sb3_has_the_hyper_parameters_of_ddpg_continuous_action(monkeypatch):
    made, learn = [], DDPG.learn
    monkeypatch.setattr(DDPG, "learn", lambda self, steps: made.append(self) or learn(self, steps))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # they wait by spinning
    marks = speed.work_sb3("ddpg_continuous_action", "Pendulum-v1", 300, 1)
    assert [step for step, _ in marks] == [200, 300]
    sb3, args = made[0], ddpg_continuous_action.Args()
    assert sb3._n_updates == 200  # one a step, from the hundredth on
    flags = dict(zip(speed.DDPG_FLAGS[::2], speed.DDPG_FLAGS[1::2]))
    assert flags["--learning-starts"] == flags["--random-steps"] == str(sb3.learning_starts)
    assert (sb3.n_envs, sb3.batch_size, sb3.tau, sb3.gamma) == (
        args.num_envs,
        args.batch_size,
        args.tau,
        args.gamma,
    )
    assert (sb3.lr_schedule(1.0), sb3.buffer_size) == (args.learning_rate, args.buffer_size)
    assert (
        sb3.action_noise._sigma == args.exploration_noise
    ).all() and sb3.policy_delay == args.policy_frequency
    agent = ddpg_continuous_action.Agent(3, 1, args.hidden_sizes)
    for ours, theirs in ((agent.actor, sb3.actor.mu), (agent.critic, sb3.critic.qf0)):
        assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]


def test_speed_sb3_has_the_hyper_parameters_of_ppo_continuous_action(monkeypatch):
    made, learn = [], PPO.learn
    monkeypatch.setattr(PPO, "learn", lambda self, steps: made.append(self) or learn(self, steps))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # they wait by spinning
    marks = speed.work_sb3("ppo_continuous_action", "Pendulum-v1", 4096, 1)
    assert [step for step, _ in marks] == [2048, 4096]
    sb3, args = made[0], ppo_continuous_action.Args()
    assert sb3._n_updates == 2 * args.update_epochs  # it really learns while it is timed
    holds_the_scripts_hyper_parameters(sb3, args)
    assert sb3.policy.log_std_init == args.init_log_std
    assert sb3.env.norm_obs and sb3.env.norm_reward and sb3.env.gamma == args.gamma
    shapes = {tuple(p.shape) for p in sb3.policy.mlp_extractor.parameters()}
    assert shapes == {(64, 3), (64,), (64, 64)}


def test_masked_cartpole_is_cartpole_without_its_velocities():
    """The same episodes, of which positions alone are seen; a time limit of 500 steps."""
    masked, whole = gym.make("MaskedCartPole-v1", disable_env_checker=True), gym.make("CartPole-v1")
    assert isinstance(masked.unwrapped, MaskedCartPole) and masked.spec.max_episode_steps == 500
    assert masked.observation_space == gym.spaces.Box(
        *(x[[0, 2]] for x in (whole.observation_space.low, whole.observation_space.high))
    )
    assert (masked.reset(seed=3)[0] == whole.reset(seed=3)[0][[0, 2]]).all()
    for action in [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]:
        (obs, *rest), (expected, *others) = masked.step(action), whole.step(action)
        assert obs.shape == (2,) and (obs == expected[[0, 2]]).all() and rest == others
