"""Which runs of hand-made frames get one name."""

import pytest

from benchmark.flags import RUN_ONLY
from benchmark.runs import run_frame
from benchmark.variants import (
    changed_flags,
    name_variants,
    text_of,
    unique_names,
    without_paths,
)

DEFAULTS = {
    "env_id": "CartPole-v1",
    "seed": 1,
    "run_name": "",
    "total_timesteps": 500,
    "gamma": 0.99,
    "baseline": "value",
    "norm_adv": True,
    "hidden_sizes": [64, 64],
    "target_kl": None,
    "init_from": None,
    "best": False,
}


def make(script="vpg", env_id="CartPole-v1", compared=False, **facts):
    """A run's row; facts that are no column are flags."""
    columns = {
        "env_id": env_id,
        "script": script,
        "compared": compared,
        "git_commit": "abc",
        "defaults": DEFAULTS,
        "script_folder": "/home/me",
    }
    names = (
        "suite_variant",
        "script_hash",
        "from_csv",
        "variant",
        "family",
        "base",
        "flags",
        "mark",
    )
    for name in (*columns, *names):
        if name in facts:
            columns[name] = facts.pop(name)
    columns["args"] = DEFAULTS | facts
    columns["planned_steps"] = facts.get("total_timesteps", 500)
    return columns


def named(*rows):
    """(frame with names, notes)"""
    return name_variants(run_frame([row | {"id": i} for i, row in enumerate(rows)]))


def variants_of(*rows):
    return list(named(*rows)[0]["variant"])


def bases_of(*rows):
    return list(named(*rows)[0]["base"])


def test_text_of_flags_is_short():
    """Whole numbers have no point, and a path is its last part; a shell could read it."""
    flags = {"clip": 1e9, "sizes": [400.0, 0.5], "init_from": "/old/runs/one", "note": "a b"}
    expected = "--clip 1000000000 --sizes 400 0.5 --init-from one --note 'a b'"
    assert text_of(flags) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Bad end in /home/me/vpg.py (exit code 1)", "Bad end in vpg.py (exit code 1)"),
        ("--data=/a/b.npz '/c/d'", "--data=b.npz 'd'"),
        ("and/or 3/4 http://x/y", "and/or 3/4 http://x/y"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(text, expected):
    assert without_paths(text) == expected


def test_flags_that_change_nothing_learned_make_no_variant():
    """Nor do seeds, environments and flags with their default value."""
    args = dict.fromkeys(RUN_ONLY, "changed") | {"seed": 9, "env_id": "x", "run_name": "y"}
    args |= {"total_timesteps": 7, "gamma": 0.99}
    assert changed_flags(args, DEFAULTS) == {}
    assert changed_flags(args | {"gamma": 0.9, "new": 1}, DEFAULTS) == {"gamma": 0.9, "new": 1}


def test_variants_are_script_and_changed_flags():
    rows = (make(), make(baseline="none", norm_adv=False), make("a2c", hidden_sizes=[3, 5]))
    assert variants_of(*rows) == [
        "vpg",
        "vpg --baseline none --no-norm-adv",
        "a2c --hidden-sizes 3 5",
    ]
    assert bases_of(*rows) == [True, False, False]


def test_variants_of_a_suite_have_its_names():
    """What their flags are is a note; without a name they are named as others."""
    rows = (
        make(suite_variant="default"),
        make(suite_variant="no-gae", gamma=1.0),
        make("a2c", suite_variant="", gamma=0.9),
    )
    runs, notes = named(*rows)
    assert list(runs["variant"]) == ["vpg default", "vpg no-gae", "a2c --gamma 0.9"]
    assert list(runs["base"]) == [True, False, False]
    assert notes == ["vpg no-gae has --gamma 1."]
    assert list(runs["hidden"]) == ["", "--gamma 1", ""]


def test_a_suites_name_for_different_flags_is_two_variants():
    rows = (
        make(suite_variant="big"),
        make(suite_variant="big", gamma=0.9),
        make(suite_variant="small", baseline="none"),
    )
    runs, notes = named(*rows)
    assert list(runs["variant"]) == ["vpg big", "vpg big --gamma 0.9", "vpg small"]
    assert list(runs["base"]) == [True, False, False]
    assert notes == ["vpg small has --baseline none."]


def test_what_all_variants_of_a_script_have_is_no_part_of_their_names():
    rows = (
        make(gamma=0.9, norm_adv=False),
        make(gamma=0.9, norm_adv=False, baseline="none"),
        make("a2c", gamma=0.8),
    )
    runs, notes = named(*rows)
    assert list(runs["variant"]) == ["vpg", "vpg --baseline none", "a2c --gamma 0.8"]
    assert notes == ["All variants of vpg have --gamma 0.9 --no-norm-adv."]
    assert list(runs["base"]) == [True, False, False]


def test_steps_are_named_only_where_they_differ():
    """From those of most runs of the variant in the environment; without a most all are named."""
    assert variants_of(make(total_timesteps=7), make(total_timesteps=7)) == ["vpg", "vpg"]
    rows = (make(total_timesteps=7), make(total_timesteps=8), make(baseline="none"))
    assert variants_of(*rows) == [
        "vpg --total-timesteps 7",
        "vpg --total-timesteps 8",
        "vpg --baseline none",
    ]
    rows = (make(total_timesteps=7), make(total_timesteps=8, env_id="Acrobot-v1"))
    assert variants_of(*rows) == ["vpg", "vpg"]
    rows = [make(total_timesteps=steps) for steps in (7, 8, 7)]
    assert variants_of(*rows) == ["vpg", "vpg --total-timesteps 8", "vpg"]
    assert bases_of(*rows) == [True, False, True]


def test_unknown_steps_make_no_variant():
    rows = (make(total_timesteps=7), make(total_timesteps=float("nan")))
    assert variants_of(*rows) == ["vpg", "vpg"]


def test_runs_to_compare_have_the_usual_steps_of_the_others():
    rows = (
        make(total_timesteps=8),
        make(total_timesteps=7, compared=True),
        make(total_timesteps=7, compared=True),
    )
    assert variants_of(*rows) == ["vpg"] + ["vpg --total-timesteps 7 (compared)"] * 2


def test_runs_to_compare_have_a_mark():
    """The git commit where it is another, else a word."""
    runs, _ = named(make(), make(compared=True, git_commit="def"))
    assert list(runs["variant"]) == list(runs["family"]) == ["vpg", "vpg (def)"]
    assert list(runs["mark"]) == ["", " (def)"]
    assert variants_of(make(), make(compared=True)) == ["vpg", "vpg (compared)"]
    several = [make(compared=True, git_commit=commit) for commit in "de"]
    assert variants_of(make(), *several)[1:] == ["vpg (compared)"] * 2
    unknown = make(compared=True, git_commit="unknown")
    assert variants_of(make(), unknown) == ["vpg", "vpg (compared)"]


def test_unknown_defaults_are_what_all_runs_share():
    rows = [make("mine", defaults=None, lr=lr) for lr in (3, 4, 4)]
    assert variants_of(*rows) == ["mine --lr 3", "mine --lr 4", "mine --lr 4"]
    assert variants_of(make("mine", defaults=None, lr=3)) == ["mine"]


def test_a_run_that_does_not_know_its_defaults_has_those_of_others():
    rows = (make(), make(defaults=None), make(defaults=None, gamma=0.9))
    assert variants_of(*rows) == ["vpg", "vpg", "vpg --gamma 0.9"]


def test_a_copy_from_another_folder_is_another_variant():
    rows = (make(), make(script_folder="/home/me/mine"), make(script_folder="", gamma=0.9))
    runs, _ = named(*rows)
    assert list(runs["variant"]) == ["vpg (me)", "vpg (mine)", "vpg --gamma 0.9 (me)"]
    assert list(runs["family"]) == ["vpg (me)", "vpg (mine)", "vpg (me)"]
    assert list(runs["base"]) == [True, True, False]
    rows = (make(script_folder="/a/algos"), make(script_folder="/b/algos"))
    assert variants_of(*rows) == ["vpg (a/algos)", "vpg (b/algos)"]


def test_a_copy_with_another_text_is_another_variant():
    """Told by its commit where each text has its own. An unknown text is the usual one."""
    rows = (
        make(script_hash="11", git_commit="c1"),
        make(script_hash="22", git_commit="c2"),
        make(script_hash="22", git_commit="c2"),
        make(script_hash="", git_commit=""),
    )
    assert variants_of(*rows) == ["vpg (c1)", "vpg (c2)", "vpg (c2)", "vpg (c2)"]
    for commit in ("c", "unknown"):
        rows = (make(script_hash="11", git_commit="c"), make(script_hash="22", git_commit=commit))
        assert variants_of(*rows) == ["vpg (text 11)", "vpg (text 22)"]
    rows = (make(script_hash="11", git_commit="c1"), make(script_hash="11", git_commit="c2"))
    assert variants_of(*rows) == ["vpg", "vpg"]


def test_a_copy_with_another_text_in_another_folder_is_told_by_both():
    rows = (
        make(script_hash="11", git_commit="c1"),
        make(script_hash="22", git_commit="c2"),
        make(script_hash="33", script_folder="/home/other"),
    )
    assert variants_of(*rows) == ["vpg (me, c1)", "vpg (me, c2)", "vpg (other)"]


def test_a_run_without_defaults_has_those_of_its_own_script():
    """Not those of a copy in another folder."""
    mine = "/home/me/mine"
    copies = make(script_folder=mine, defaults=DEFAULTS | {"gamma": 0.9}, gamma=0.9)
    rows = (copies, make(), make(defaults=None), make(script_folder=mine, defaults=None, gamma=0.9))
    assert bases_of(*rows) == [True, True, True, True]


def test_the_mark_tells_a_copy_to_compare_with():
    rows = (make(script_hash="11"), make(script_hash="22", git_commit="old", compared=True))
    assert variants_of(*rows) == ["vpg", "vpg (old)"]


def test_names_of_a_csv_stay_as_they_are():
    """But for what tells them from others here."""
    row = make(from_csv=True, variant="vpg quick", family="vpg", base=True)
    row |= {"args": None, "defaults": None}
    assert variants_of(row, row) == ["vpg quick", "vpg quick"]
    assert bases_of(row) == [True]
    assert variants_of(row | {"compared": True})[0] == "vpg quick (abc)"
    other = row | {"variant": "vpg", "flags": "--gamma 0.9"}
    assert variants_of(make(), other) == ["vpg", "vpg --gamma 0.9"]
    assert bases_of(make(), other) == [True, False]
    texts = (make(script_hash="11"), row | {"variant": "vpg", "script_hash": "22"})
    assert variants_of(*texts, other | {"flags": ""}) == ["vpg (text 11)", "vpg (text 22)", "vpg"]
    assert variants_of(row, row, row | {"planned_steps": 7})[2] == "vpg quick --total-timesteps 7"


def test_names_are_numbered_past_those_that_are_taken():
    assert unique_names(["x", "x", "x (2)", "y"]) == ["x", "x (2)", "x (2) (2)", "y"]
