"""benchmark.speed: its arithmetic, its peers, and what a user gets."""

import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DDPG, PPO, SAC, TD3

import ppo_atari
import ppo_atari_lstm
import ppo_continuous_action
from benchmark.speed import __main__ as command
from benchmark.speed import chart, games, measure, peers, tables
from benchmark.speed.measure import FailedError, MeasureError, RefusedError
from benchmark.speed.peers import Work

ROOT = Path(__file__).resolve().parents[2]


def make_row(number, program, speed, **figures):
    row = {
        "round": number,
        "program": program,
        "precision": peers.PROGRAMS[program].precision if program in peers.PROGRAMS else "",
        "cache": "",
        "script": "ppo_atari",
        "env_id": "PongNoFrameskip-v4",
        "seed": number,
        "steps_per_second": speed,
        "others_cores": number - 1.0 if number != "full" else None,
        "machine": "a machine",
    }
    return row | figures


# --------------------------------------------------------------------------------------------------
# What is read of a run
# --------------------------------------------------------------------------------------------------


def test_steady_state():
    """1,000 steps by 10 s after the first mark.

    The first 2,048 steps at that speed are no part of the start-up.
    """
    marks = [(2048, 130.48), (4096, 140.0), (12048, 230.48)]
    assert measure.steady_state(marks, began=100.0, ended=240.0) == pytest.approx(
        {
            "steps": 12048,
            "steps_per_second": 100.0,
            "start_up_s": 10.0,
            "wall_s": 140.0,
            "wall_s_1m": 140 + 9879.52,
        }
    )


def test_marks_of_a_script_are_those_of_its_events(tmp_path):
    """Steps and wall times of charts/SPS, all of them, and nothing else."""
    writer = ppo_continuous_action.SummaryWriter(tmp_path / "runs" / "speed")
    for i in range(1, 12_001):  # TensorBoard's reader keeps a sample of 10,000 unless told
        writer.add_scalar("charts/SPS", 0, 2048 * i, walltime=100.0 + i)
        writer.add_scalar("charts/learning_rate", 0, 1, walltime=0.0)
    writer.close()
    marks = measure.read_marks("plainrl", tmp_path)
    assert marks == [(2048 * i, 100.0 + i) for i in range(1, 12_001)]


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
    assert measure.read_speed(said) == number


def test_other_programs_that_fail_or_print_no_speed():
    work = Work("ppo_atari", "x", 1, 1)
    with pytest.raises(MeasureError, match="Mine printed no speed"):
        measure.measure_other("Mine", "echo nothing", work)
    with pytest.raises(MeasureError, match="Mine failed with exit code 3"):
        measure.measure_other("Mine", "exit 3", work)


@pytest.mark.parametrize(
    "program, code, expected, said",
    [
        ("plainrl", 2, RefusedError, "error: no environment x"),
        ("plainrl --amp", 2, RefusedError, "error: no environment x"),
        ("plainrl", 1, FailedError, "PlainRL failed with exit code 1:\nwarming up\n"),
        ("sb3", 2, FailedError, "Stable-Baselines3 failed with exit code 2:\nwarming up\n"),
    ],
)
def test_a_script_that_refuses_its_flags_has_said_why(
    program, code, expected, said, tmp_path, monkeypatch
):
    """In its last line. What else fails is told at length."""
    text = f"echo warming up; echo 'error: no environment x'; echo; exit {code}"
    monkeypatch.setattr(measure, "command_of", lambda *_: ["sh", "-c", text])
    work = Work("ppo_atari", "x", 1, 1)
    with pytest.raises(MeasureError) as error:
        measure.measure(program, work, tmp_path / "cache")
    assert type(error.value) is expected and str(error.value).startswith(said)
    assert expected is FailedError or str(error.value) == said


def test_the_environment_alone_is_run_as_a_user_runs_it(tmp_path):
    """A process of its own, elsewhere than in the repository; a bound has no start-up."""
    work = Work("ppo_continuous_action", "Pendulum-v1", 500, 1)
    row = measure.measure("env", work, tmp_path / "cache")
    assert row["others_cores"] >= 0
    assert row["steps"] == 500 and row["steps_per_second"] > 0 and row["wall_s"] > 0
    assert (row["start_up_s"], row["wall_s_1m"], row["peak_mb"]) == (None, None, None)
    assert (row["precision"], row["cache"], row["seed"]) == ("", "", 1)


def test_rows_say_whether_the_compilers_cache_was_empty(tmp_path, monkeypatch):
    code = "import os; os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR'], exist_ok=True)"
    monkeypatch.setattr(measure, "command_of", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(measure, "read_marks", lambda *_: [(1, 0.0), (2, 1.0)])
    work = Work("ppo_atari", "x", 1, 1)
    for state in ("empty", "filled"):
        assert measure.measure("plainrl", work, tmp_path / "cache")["cache"] == state
    assert measure.measure("sb3", work, tmp_path / "cache")["cache"] == ""
    monkeypatch.setattr(measure, "command_of", lambda *_: ["true"])  # compiles nothing
    assert measure.measure("plainrl", work, tmp_path / "none")["cache"] == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no taskset")
def test_all_cores_are_those_that_the_process_may_use():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{code}; from benchmark.speed.peers import CORES; print(CORES)"
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "1\n"


@pytest.mark.parametrize("script", ["ppo_continuous_action", "ppo_atari"])
def test_programs_have_the_threads_of_their_task(script, tmp_path, monkeypatch):
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    said = []

    def note(program, folder):
        said.append((folder / "output.txt").read_text().split())
        return [(1, 0.0), (2, 1.0)]

    monkeypatch.setattr(measure, "command_of", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(measure, "read_marks", note)
    measure.measure("plainrl", Work(script, "x", 1, 1), tmp_path / "cache")
    assert said == [3 * [str(peers.TASKS[script].threads)]]


# --------------------------------------------------------------------------------------------------
# The machine
# --------------------------------------------------------------------------------------------------


def test_machine_names_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(measure, "PACKAGES", ("numpy", "no-such-package"))
    assert "no-such-package not installed" in measure.describe_machine()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_machine_names_other_processes_that_use_the_cpu(tmp_path):
    """A busy one by its name, even an odd one; not one that was busy before."""
    for name in ("busy (1) one", "idle one"):
        (tmp_path / name).symlink_to("/bin/sh")
    busy = subprocess.Popen([tmp_path / "busy (1) one", "-c", "while :; do :; done"])
    words = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo ready; read x"
    idle = subprocess.Popen(
        [tmp_path / "idle one", "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert idle.stdout.readline() == b"ready\n"
        found = dict(measure.busy_processes(least=0.001))
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert found["busy (1) one"] > 0
    assert "idle one" not in found


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")
def test_other_programs_cores_are_what_is_left_of_the_machines(monkeypatch, tmp_path):
    """All CPU seconds of the machine less the program's own, by its wall time."""
    seconds = iter([100.0, 107.0])
    monkeypatch.setattr(measure, "busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(measure.time, "time", iter([50.0, 52.0]).__next__)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "sum(range(10**7))"]
    process = measure.run("Mine", command, tmp_path, {})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert process.others_cores == pytest.approx((7 - used) / 2, abs=0.01)


# --------------------------------------------------------------------------------------------------
# Tables and chart
# --------------------------------------------------------------------------------------------------


def test_ratios_pair_runs_of_one_round():
    rows = tables.frame(
        [
            make_row(1, "plainrl", 8.0),
            make_row(1, "sb3", 2.0),
            make_row(2, "sb3", 10.0),
            make_row(2, "plainrl", 30.0),
            make_row(3, "plainrl", 6.0),
            make_row(10, "plainrl", 7.0),
            make_row(10, "sb3", 7.0),
        ]
    )
    found = tables.ratios(rows, "steps_per_second", "plainrl", "sb3")
    assert list(found.items()) == [("1", 4.0), ("2", 3.0), ("10", 1.0)]
    assert tables.ratios(rows, "steps_per_second", "plainrl", "env").empty


@pytest.fixture
def made():
    """Rows of two rounds, the second three times as fast; --amp in the second alone."""
    rows = []
    for number, factor in ((1, 1), (2, 3)):
        figures = {"start_up_s": 10.0 * (3 - number), "peak_mb": 50.0 * number}
        for program, speed in (("plainrl", 800), ("sb3", 100), ("env", 1600), ("Mine", 200)):
            row = make_row(number, program, speed * factor, wall_s_1m=1e4 / speed, **figures)
            if program == "plainrl":
                row["cache"] = "empty" if number == 1 else "filled"
            if program == "env":
                row |= {"start_up_s": None, "wall_s_1m": None, "peak_mb": None}
            rows.append(row)
    rows.append(make_row(2, "plainrl --amp", 1200, wall_s_1m=5.0, cache="empty"))
    return rows


@pytest.fixture
def rows(made):
    return tables.frame(made)


def test_tables_of_a_script(rows):
    """A line for each program and ratio; compiling runs have columns of their own."""
    text = tables.tables(rows)["speed_ppo_atari"]
    line = "| PlainRL | float32 | 1,600 (800 to 2,400) | 10.0 | 20.0 | 12.5 | 12.5 | "
    assert line + "75 (50 to 100) | 0.5 (0.0 to 1.0) |" in text
    line = "| Stable-Baselines3 | float32 | 200 (100 to 300) | 15.0 (10.0 to 20.0) | - | "
    assert line in text
    assert (
        "| environment alone | - | 3,200 (1,600 to 4,800) | - | - | - | - | - | 0.5 (0.0 to 1.0) |"
        in text
    )
    ratio = "| steps/s, PlainRL / Stable-Baselines3 | float32 | 8.00 | 8.00 | 8.00 | 8.00, 8.00 |"
    assert ratio in text
    assert "| steps/s, PlainRL / environment alone | float32 | 0.50 |" in text
    assert "| steps/s, PlainRL / Mine | float32 | 4.00 |" in text
    assert "| time of 1M steps, Stable-Baselines3 / PlainRL | float32 | 8.00 |" in text


def test_ratios_name_both_precisions_where_they_differ(rows):
    text = tables.tables(rows)["speed_ppo_atari"]
    name = "steps/s, PlainRL, bfloat16 / Stable-Baselines3"
    assert f"| {name} | bfloat16 / float32 | 4.00 | 4.00 | 4.00 | 4.00 |" in text
    name = "steps/s, PlainRL, bfloat16 / PlainRL"
    assert f"| {name} | bfloat16 / float32 | 0.50 | 0.50 | 0.50 | 0.50 |" in text
    name = "time of 1M steps, Stable-Baselines3 / PlainRL, bfloat16"
    assert f"| {name} | float32 / bfloat16 | 20.00 |" in text


def test_programs_have_one_order_whatever_was_measured_first(rows):
    """That of a round, with other programs last."""
    lines = tables.tables(rows)["speed_ppo_atari"].splitlines()[2:7]
    programs = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert programs == [
        "PlainRL",
        "PlainRL, bfloat16",
        "Stable-Baselines3",
        "environment alone",
        "Mine",
    ]


def test_overview_has_a_line_for_each_precision_of_a_script(rows):
    text = tables.tables(rows)["speed"]
    start = "| `ppo_atari`, PongNoFrameskip-v4 |"
    peer = "200 (100 to 300)"
    assert f"{start} float32 | 1,600 (800 to 2,400) | {peer} | 8.00 | 8.00 | 8.00 | 2 |" in text
    assert f"{start} bfloat16 | 1,200 | {peer} | 4.00 | 4.00 | 4.00 | 1 |" in text


def test_runs_of_the_full_length_are_apart(made):
    full = [
        make_row("full", program, 1.0, wall_s=wall)
        for program, wall in (("plainrl", 10.0), ("sb3", 25.0))
    ]
    with_full = tables.tables(tables.frame(made + full))
    without = tables.tables(tables.frame(made))
    assert "Stable-Baselines3 takes 2.50 times as long" in with_full["speed_ppo_atari"]
    assert with_full["speed"] == without["speed"]
    assert with_full["speed_ppo_atari"].startswith(without["speed_ppo_atari"])
    bars = chart.make_bars(tables.frame(made + full))[0]
    assert bars.equals(chart.make_bars(tables.frame(made))[0])


def test_a_csv_gives_the_tables_it_was_written_from(rows, tmp_path):
    rows.to_csv(tmp_path / "speed.csv", index=False)
    assert tables.tables(tables.read(tmp_path / "speed.csv")) == tables.tables(rows)


def test_chart_has_the_ratios_to_the_peer(rows):
    """Median, minimum and maximum of each; without a peer those of steps/s."""
    bars = chart.make_bars(rows)[0]
    assert bars.values.tolist() == [
        ["ppo_atari, PlainRL", "plainrl", 8.0, 8.0, 8.0],
        ["ppo_atari, PlainRL, bfloat16", "plainrl --amp", 4.0, 4.0, 4.0],
        ["ppo_atari, Mine", "Mine", 2.0, 2.0, 2.0],
    ]
    bars = chart.make_bars(rows[rows["program"] != "sb3"])[0]
    assert bars.values.tolist()[0] == ["ppo_atari, PlainRL", "plainrl", 1600.0, 800.0, 2400.0]


def test_committed_rounds_are_at_least_four():
    """Every program of every script, and every ratio."""
    rows = tables.read(ROOT / "benchmark" / "results" / "speed.csv")
    rounds = rows.groupby(["script", "program"]).size()
    assert set(rows["script"]) == set(peers.TASKS)
    assert rounds.min() >= 4


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_command(monkeypatch):
    """run_command(*flags): benchmark.speed with programs whose speeds are made up."""
    speeds = {"plainrl": 1000.0, "plainrl --amp": 1500.0, "sb3": 500.0, "env": 250.0}
    speeds["arithmetic"] = 8000.0

    def measure_one(program, work, cache):
        row = make_row(0, program, speeds[program], wall_s=2.0, wall_s_1m=9.0)
        row |= {"script": work.script, "env_id": work.env_id, "seed": work.seed}
        del row["round"]
        return row

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["speed", *map(str, flags)])
        command.main()

    monkeypatch.setattr(command, "measure", measure_one)
    return run


def test_command_measures_beside_any_command(run_command, tmp_path, monkeypatch, capsys):
    """What a user gets: the machine first, four rounds in alternation, the CSV, tables, a chart.

    The other program is run as it is written, where we are.
    """
    monkeypatch.chdir(tmp_path)
    other = "Mine=echo here > here.txt; echo SPS: 2000"
    run_command("ppo_atari", "--amp", "--out", "out/speed.csv", "--other", other)
    said = capsys.readouterr().out
    assert (tmp_path / "here.txt").exists()
    table = (tmp_path / "out" / "speed.md").read_text()
    assert "| steps/s, PlainRL / Mine | float32 | 0.50 |" in table and table.strip() in said
    assert said.index("other programs on the CPU") < said.index("round 1")
    found = tables.read(tmp_path / "out" / "speed.csv")
    order = ["plainrl", "plainrl --amp", "sb3", "env", "arithmetic", "Mine"]
    assert list(found["program"]) == 4 * order
    assert list(found["round"].unique()) == ["1", "2", "3", "4"]
    assert list(found["seed"].unique()) == [1, 2, 3, 4]
    assert found["machine"].str.contains("other programs on the CPU").all()
    assert (tmp_path / "out" / "speed_chart.png").stat().st_size > 5000


def test_command_without_peer_and_for_scripts_without_amp(run_command, capsys):
    run_command("ppo_atari", "ppo_continuous_action", "--amp", "--versus", "none")
    said = capsys.readouterr().out
    assert "round 1, ppo_atari: PlainRL, bfloat16 1,500 steps/s" in said
    assert "round 1, ppo_continuous_action: PlainRL 1,000 steps/s" in said
    assert "ppo_continuous_action: PlainRL, bfloat16" not in said
    assert "round 1, ppo_atari: Stable-Baselines3" not in said


def test_command_runs_the_full_length_once(run_command, tmp_path):
    script = "ppo_continuous_action"  # named twice, it is measured once
    run_command(script, script, "--full", "--out", tmp_path / "speed.csv")
    found = tables.read(tmp_path / "speed.csv")
    assert list(found.loc[found["round"] == "full", "program"]) == ["plainrl", "sb3"]
    assert len(found) == 4 * 4 + 2


def test_command_keeps_what_it_measured_before_a_program_failed(run_command, tmp_path):
    with pytest.raises(SystemExit, match="error: Mine failed with exit code 3"):
        run_command("ppo_atari", "--out", tmp_path / "speed.csv", "--other", "Mine=exit 3")
    found = tables.read(tmp_path / "speed.csv")
    assert list(found["program"]) == ["plainrl", "sb3", "env", "arithmetic"]


def test_command_writes_each_row_when_it_has_it(run_command, tmp_path, monkeypatch):
    """So a signal loses nothing either."""
    monkeypatch.chdir(tmp_path)
    other = "Mine=cp speed.csv before.csv; echo SPS: 5"
    run_command("ppo_atari", "--out", "speed.csv", "--other", other)
    assert len(tables.read(tmp_path / "before.csv")) == 4 * 5 - 1


def test_command_ends_with_the_sentence_of_a_script_that_refuses_its_flags(
    run_command, monkeypatch, capsys
):
    def refuse(*_):
        raise RefusedError("error: no environment x")

    monkeypatch.setattr(command, "measure", refuse)
    with pytest.raises(SystemExit, match="2"):
        run_command("--env-id", "x")
    assert capsys.readouterr().err == "error: no environment x\n"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["ppo_atri"], "invalid choice 'ppo_atri'"),
        (["--steps", "4095"], "needs --steps 4096"),
        (["--steps", "0"], "needs --steps 4096"),
        (["ddpg_continuous_action", "--steps", "299"], "needs --steps 300"),
        (["--rounds", "3"], "--rounds must be 4 or more"),
        (["--amp"], "--amp: no such flag in ppo_continuous_action"),
        (["--out", "/proc/speed.md"], "--out /proc/speed.md must end in .csv"),
        (["--other", "x"], "NAME=COMMAND"),
        (["--other", "=ls"], "NAME=COMMAND"),
        (["--other", "sb3=ls"], "the name none of"),
        (["--other", "x=ls", "--other", "x=pwd"], "the same NAME"),
    ],
)
def test_command_refuses_bad_flags(flags, sentence, run_command, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command(*flags)
    assert sentence in capsys.readouterr().err


def test_command_refuses_at_once_a_file_that_it_cannot_write(run_command, tmp_path, capsys):
    path = tmp_path / "folder.csv"
    path.mkdir()
    with pytest.raises(SystemExit, match="2"):
        run_command("--out", path)
    said = capsys.readouterr()
    assert f"can't write {path} (Is a directory): give another file" in said.err
    assert "round" not in said.out


# --------------------------------------------------------------------------------------------------
# The programs
# --------------------------------------------------------------------------------------------------


def test_workers_start_up_has_no_imports_of_ours():
    """Those would count in the peers' start-up."""
    code = "import sys, benchmark.speed.peers; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.split())
    assert "benchmark.speed.peers" in modules
    assert not modules & {"numpy", "pandas", "matplotlib", "tensorboard", "torch", "tyro"}


@pytest.mark.parametrize(
    "program, script",
    [("plainrl", name) for name in peers.TASKS]
    + [("plainrl --amp", name) for name, task in peers.TASKS.items() if task.amp],
)
def test_scripts_understand_their_command_lines(program, script, monkeypatch, tmp_path):
    module = import_module(script)
    work = Work(script, peers.TASKS[script].env_id, 20480, 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", peers.command_of(program, work)[1:])
    args, _ = module.read_flags()
    module.check_args(args)
    assert (args.env_id, args.seed, args.total_timesteps) == (work.env_id, 3, 20480)
    assert (args.run_name, args.cuda, args.eval_episodes) == ("speed", False, 1)
    assert getattr(args, "amp", False) == (program == "plainrl --amp")


@pytest.mark.parametrize("script", [name for name in peers.TASKS if name.startswith("ppo")])
def test_rollouts_are_the_scripts_defaults(script):
    args = import_module(script).Args()
    assert peers.TASKS[script].rollout == args.num_envs * args.num_steps
    assert peers.TASKS[script].amp == hasattr(args, "amp")


def test_arithmetic_counts_the_products_of_an_iteration(tmp_path):
    """DDPG's hundred updates on Pendulum, counted by hand.

    They are products of 256 rows, forward and backward.
    """
    code = f"""if True:
        import json, sys; sys.path.insert(0, {str(ROOT)!r})
        import torch
        from benchmark.speed import peers
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None
        peers.median = lambda times: 2 * 1024**3 / 1e9  # a machine of 1 GFLOPS
        work = peers.Work("ddpg_continuous_action", "Pendulum-v1", 1000, 1)
        print(json.dumps(peers.work_arithmetic(work)[1]))"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps, seconds = json.loads(done.stdout.splitlines()[-1])
    actor = 3 * 256 + 256 * 256 + 256
    critic = 4 * 256 + 256 * 256 + 256
    # Targets forward; critic forward and backward, its first layer without its inputs' gradient;
    # actor likewise, through the critic, of which only the inputs' gradients are needed
    products = (actor + critic) + (3 * critic - 4 * 256) + (3 * actor - 3 * 256) + 2 * critic
    assert steps == 1000 and seconds == pytest.approx(1000 * 2 * 256 * products / 1e9, rel=0.02)


def holds_the_scripts_hyper_parameters(sb3, args):
    """Each default of the script that SB3's PPO shares has the same value there."""
    batch_size = args.num_envs * args.num_steps // args.num_minibatches
    assert (sb3.n_envs, sb3.n_steps) == (args.num_envs, args.num_steps)
    assert (sb3.batch_size, sb3.n_epochs) == (batch_size, args.update_epochs)
    assert (sb3.gamma, sb3.gae_lambda) == (args.gamma, args.gae_lambda)
    assert (sb3.clip_range(1.0), sb3.clip_range_vf(1.0)) == (args.clip_coef, args.clip_coef)
    assert (sb3.ent_coef, sb3.vf_coef) == (args.ent_coef, args.vf_coef)
    assert sb3.max_grad_norm == args.max_grad_norm
    assert sb3.lr_schedule(1.0) == args.learning_rate
    assert sb3.lr_schedule(0.5) == args.learning_rate / 2
    assert sb3.normalize_advantage == args.norm_adv
    assert sb3.policy.optimizer.defaults["eps"] == 1e-5


@pytest.fixture
def learned(monkeypatch):
    """learned(algorithm, really): the models that are told to learn, list; they do if really."""

    def watch(algorithm, really):
        made = []
        learn = algorithm.learn

        def note(self, steps):
            made.append(self)
            if really:
                learn(self, steps)

        monkeypatch.setattr(algorithm, "learn", note)
        return made

    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # they wait by spinning
    return watch


def test_sb3_has_the_hyper_parameters_of_ppo_continuous_action(learned):
    made = learned(PPO, really=True)
    marks = peers.work_sb3(Work("ppo_continuous_action", "Pendulum-v1", 4096, 1))
    assert [step for step, _ in marks] == [2048, 4096]
    sb3 = made[0]
    args = ppo_continuous_action.Args()
    assert sb3._n_updates == 2 * args.update_epochs  # it really learns while it is timed
    holds_the_scripts_hyper_parameters(sb3, args)
    assert sb3.policy.log_std_init == args.init_log_std
    assert sb3.env.norm_obs and sb3.env.norm_reward and sb3.env.gamma == args.gamma
    shapes = {tuple(p.shape) for p in sb3.policy.mlp_extractor.parameters()}
    assert shapes == {(64, 3), (64,), (64, 64)}


def test_sb3_has_the_hyper_parameters_of_ppo_atari(learned):
    made = learned(PPO, really=False)
    peers.work_sb3(Work("ppo_atari", "PongNoFrameskip-v4", 1024, 1))
    holds_the_scripts_hyper_parameters(made[0], ppo_atari.Args())
    assert sum(p.numel() for p in made[0].policy.parameters()) == 1_687_719
    assert made[0].observation_space.shape == (4, 84, 84)


def test_sb3_has_the_hyper_parameters_of_ppo_atari_lstm(learned):
    made = learned(RecurrentPPO, really=False)
    peers.work_sb3(Work("ppo_atari_lstm", "PongNoFrameskip-v4", 1024, 1))
    args = ppo_atari_lstm.Args()
    policy = made[0].policy
    holds_the_scripts_hyper_parameters(made[0], args)
    ours = sum(p.numel() for p in ppo_atari_lstm.Agent(6, args).parameters())
    assert sum(p.numel() for p in policy.parameters()) == ours
    assert policy.lstm_critic is None and policy.shared_lstm
    assert policy.lstm_actor.hidden_size == args.hidden_size
    assert made[0].observation_space.shape == (1, 84, 84)


@pytest.mark.parametrize("algorithm", [DDPG, TD3, SAC])
def test_sb3_has_the_hyper_parameters_of_the_scripts_with_replay(learned, algorithm):
    made = learned(algorithm, really=True)
    script = f"{algorithm.__name__.lower()}_continuous_action"
    marks = peers.work_sb3(Work(script, "Pendulum-v1", 300, 1))
    assert [step for step, _ in marks] == [200, 300]
    sb3 = made[0]
    module = import_module(script)
    args = module.Args()
    assert sb3._n_updates == 200  # one a step, from the hundredth on
    flags = dict(flag.split("=") for flag in peers.REPLAY_FLAGS)
    assert flags["--learning-starts"] == flags["--random-steps"] == str(sb3.learning_starts)
    assert (sb3.n_envs, sb3.batch_size) == (args.num_envs, args.batch_size)
    assert (sb3.tau, sb3.gamma) == (args.tau, args.gamma)
    assert (sb3.lr_schedule(1.0), sb3.buffer_size) == (args.learning_rate, args.buffer_size)
    agent = module.Agent(3, 1, args.hidden_sizes)
    if algorithm is SAC:
        assert (sb3.log_ent_coef.exp() > 0) == args.autotune and sb3.target_entropy == -1
        assert sb3.target_update_interval == 1
        sizes = [sum(p.numel() for p in net.parameters()) for net in (agent.actor, sb3.actor)]
        assert sizes[0] == sizes[1]
    else:
        assert (sb3.action_noise._sigma == args.exploration_noise).all()
        assert sb3.policy_delay == args.policy_frequency
        shapes = [[p.shape for p in net.parameters()] for net in (agent.actor, sb3.actor.mu)]
        assert shapes[0] == shapes[1]
    if algorithm is TD3:
        noise = (sb3.target_policy_noise, sb3.target_noise_clip)
        assert noise == (args.policy_noise, args.noise_clip)
    shapes = [[p.shape for p in net.parameters()] for net in (agent.critic, sb3.critic)]
    assert shapes[0] == shapes[1]


# --------------------------------------------------------------------------------------------------
# Parts of the time, by the number of games
# --------------------------------------------------------------------------------------------------


def test_games_times_each_part_and_measures_nothing_twice(tmp_path, monkeypatch, capsys):
    """What a user gets: a row for each number of games, the parts of whose time add up."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    words = ["games", "--out", f"{tmp_path}/games.csv", "--env-id", "PongNoFrameskip-v4"]
    words += ["--amp", "False", "--threads", "1", "--seconds", "0", "--games", "1"]
    for games_of_run in ([], ["2"]):
        monkeypatch.setattr(sys, "argv", [*words, *games_of_run])
        games.main()
    assert capsys.readouterr().out.count("games 1") == 1
    rows = pd.read_csv(tmp_path / "games.csv")
    assert rows["games"].tolist() == [1, 2]
    parts = [f"{part}_seconds" for part in ("games", "policy", "update")]
    assert (rows[parts] > 0).all(axis=None)
    steps = pd.Series([128, 256])
    speeds = steps / rows[parts].sum(axis=1)
    assert speeds.tolist() == pytest.approx(rows["steps_per_second"], rel=0.02)  # both are rounded
    assert (tmp_path / "games.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--out", "games.png"], "error: --out games.png must end in .csv"),
        (["--out", "other.csv"], "error: other.csv isn't a CSV of this program"),
        (["--out", "games.csv", "--games", "0"], "error: --games and --threads must be"),
        (["--out", "games.csv", "--env-id", "Pong"], "error: Pong is not an Atari game"),
    ],
)
def test_games_refuses_bad_input_in_one_sentence(flags, sentence, tmp_path, monkeypatch, capfd):
    """What a process that times has said is enough."""
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["games", *flags])
    with pytest.raises(SystemExit) as stop:
        games.main()
    assert stop.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1
    assert Path("other.csv").read_text() == "a,b\n1,2\n"


def test_games_clock_adds_up_the_seconds_of_calls(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(games.time, "perf_counter", lambda: next(times))
    clock = games.Clock(lambda x, y: x + y)
    assert [clock(1, 2), clock(3, 4)] == [3, 7] and clock.seconds == 2.5


def test_games_draws_a_bar_for_each_part_of_a_steps_time():
    """Milliseconds: 128 steps of each of 8 games in (0.1 + 0.2 + 0.3) s are 0.586 ms a step."""
    row = {"env_id": "x", "amp": False, "threads": 1, "games": 8, "steps_per_second": 1706.7}
    row |= {"games_seconds": 0.1, "policy_seconds": 0.2, "update_seconds": 0.3}
    slower = {"amp": True, "games": 4}  # half as many steps in the same time
    figure = games.make_figure(pd.DataFrame([row, row | slower]))
    for axes, top in zip(figure.axes, (0.6, 1.2)):
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx([top * part / 1.024 for part in (1 / 6, 2 / 6, 3 / 6)])
        last = axes.patches[-1]
        assert last.get_y() + last.get_height() == pytest.approx(top / 1.024)
    assert [axes.get_title() for axes in figure.axes] == [
        "float32, threads: 1",
        "bfloat16, threads: 1",
    ]
