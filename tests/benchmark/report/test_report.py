"""python -m benchmark.report, on folders made by hand, and what its pages say."""

import html
import json
import re
import shutil
import subprocess
import sys
import types

import pytest

from benchmark.report import __main__ as report
from benchmark.report import contents, stats
from benchmark.report.runs import read

EVIL = "<script>document.title='evil'</script>|&"
NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")


@pytest.fixture(scope="module")
def run_report():
    """run_report(*words): the command, in this process, with few resamples."""

    def run(*words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stats, "RESAMPLES", 20)
            patch.setattr(sys, "argv", ["report", *map(str, words)])
            report.main()

    return run


@pytest.fixture(scope="module")
def big(tmp_path_factory, make_run, run_report):
    """The report of a sweep with two variants in two environments, and of other runs."""
    folder = tmp_path_factory.mktemp("big")
    runs = folder / "sweep" / "runs"
    for env_id, scale in (("CartPole-v1", 10.0), ("Acrobot-v1", -1.0)):
        for variant, flags in (("default", {}), ("none", {"baseline": EVIL})):
            for seed in (1, 2, 3):
                name = f"{env_id}__vpg__{variant}__{seed}"
                returns = [scale * (seed + 3 * len(flags))] * 8
                make_run(runs / name, seed=seed, returns=returns, env_id=env_id, **flags)
    (runs / "Acrobot-v1__vpg__none__3" / "evaluation.json").unlink()
    (runs / "Acrobot-v1__vpg__none__3" / "failed").write_text("<b>Bad</b> end (exit code 1)\n")
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text('{"args"')
    cheetah = {"script": "ppo_continuous_action", "env_id": "HalfCheetah-v5"}
    make_run(folder / "other" / "cheetah", returns=[7.0] * 9, commit="def", text="x", **cheetah)
    run_report(folder / "sweep", folder / "other")
    out = folder / "sweep" / "report"
    return types.SimpleNamespace(
        folder=out, page=(out / "report.html").read_text(), text=(out / "report.md").read_text()
    )


def table_after(text, heading):
    """The rows of the first table after a heading in Markdown, lists of cells."""
    lines = text.split(f"## {heading}\n")[1].split("\n|")[1:]
    lines = [line for line in lines if not line.lstrip("|").startswith(" ---")]
    return [re.split(r" (?<!\\)\| ", line.strip("| \n")) for line in lines]


def test_report_has_scores_curves_comparisons_variants_and_runs(big):
    headings = ["Scores", "Curves", "Comparison of variants", "Variants", "Runs"]
    assert re.findall("^## (.*)$", big.text, re.MULTILINE) == headings
    assert re.findall('<h2 id="\\d">(.*)</h2>', big.page) == headings
    rows = {row[0]: row[1:] for row in table_after(big.text, "Scores")}
    cells = rows["CartPole-v1, `vpg default`"]
    assert cells[1:3] == ["3", "20.0 +- 8.2"] and cells[4:7] == ["6.00 +- 0.00", "2,000", "0.07"]
    assert rows["Acrobot-v1, `vpg none`"][1:3] == ["2 of 3", "-4.50 +- 0.50"]
    cheetah = rows["HalfCheetah-v5, `ppo_continuous_action`"]
    assert cheetah[3] == "7.00 [one seed]"
    figures = ["overview", "wall_time", "aggregate", "profile", "improvement", "ablation"]
    assert re.findall(r"\]\(figures/(.*)\.png\)", big.text) == figures
    assert {path.stem for path in (big.folder / "figures").iterdir()} == set(figures)
    assert "| `none` | -4.50 +- 0.50 (2 seeds) | 50.0 +- 8.2 | - |" in big.text
    for text in (big.page, big.text):
        assert "python vpg.py --seed 2" in text and "/home/me" not in text


def test_page_and_markdown_escape_what_others_wrote(big):
    for text in (big.page, big.text):
        assert "<script>" not in text and "&lt;script&gt;" in text
        assert "<b>Bad" not in text and "&lt;b&gt;Bad&lt;/b&gt; end" in text
    assert "|&amp;" not in big.text.replace("\\|", "")


def test_page_needs_no_other_file(big):
    assert not re.findall(r'(?:src|href)="(?!data:|#)', big.page)
    assert "url(" not in big.page and "@import" not in big.page


def test_the_same_report_can_be_drawn_from_its_csvs(big, tmp_path, run_report):
    run_report(big.folder, "--out", tmp_path / "again")
    again = (tmp_path / "again" / "report.md").read_text()
    assert "broken can't be read" in big.text  # which no CSV knows

    def body(text):
        return text[text.index("## Scores") :]

    assert body(again) == body(big.text)
    for name in ("runs.csv", "curves.csv", "figures/overview.png"):
        assert (tmp_path / "again" / name).read_bytes() == (big.folder / name).read_bytes(), name


# Warnings


def test_warnings_are_on_top_and_on_the_terminal(tmp_path, make_run, run_report, capsys):
    make_run(tmp_path / "runs" / "a")
    run_report(tmp_path / "runs")
    said = capsys.readouterr()
    assert said.err.startswith("warning: As few as 1 finished seeds. Below 10 ")
    assert said.out.splitlines()[0] == str(tmp_path / "report" / "report.html")
    for name in ("report.html", "report.md"):
        text = (tmp_path / "report" / name).read_text()
        assert text.index("As few as 1 finished seeds") < text.rindex("Scores")


def warnings(paths, **options):
    runs, _, troubles = read(paths, **options)
    return contents.make_warnings(runs, troubles)


def test_ten_equal_seeds_need_no_warning(tmp_path, make_run):
    for seed in range(10):
        make_run(tmp_path / "runs" / f"{seed}", seed=seed)
    assert warnings([tmp_path]) == []


def test_warnings_name_runs_that_do_not_count(tmp_path, make_run):
    for seed in range(10):
        make_run(tmp_path / "runs" / f"{seed}", seed=seed)
    make_run(tmp_path / "runs" / "again", seed=1)
    make_run(tmp_path / "runs" / "stopped", seed=11, evaluation=None)
    make_run(tmp_path / "runs" / "nan", seed=12, returns=[float("nan")] * 2)
    failed = make_run(tmp_path / "runs" / "bad", seed=13, evaluation=None)
    (failed / "failed").write_text("no memory (exit code 1)")
    half = make_run(tmp_path / "runs" / "half", seed=14, evaluation=None)
    (half / "evaluation.json").write_text("[")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.json").write_text("[]")
    found = warnings([tmp_path])
    assert found[0] == "bad failed: no memory (exit code 1)"
    assert found[1].startswith("half unfinished: evaluation.json can't be read (")
    assert found[2].startswith("broken can't be read (TypeError: ")
    assert found[3:] == [
        "3 of 15 runs: unfinished or failed, in no average (stopped, bad, half).",
        "1 of 15 runs: finished without a finite score, in no average (nan).",
        "1 of 15 runs: several of one seed, which all count (again).",
    ]


def test_warnings_name_what_differs(tmp_path, make_run):
    """Flags under one name, texts of a script, commits, versions and machines."""
    for seed in range(10):
        commit = "new" if seed == 9 else "old"
        make_run(tmp_path / f"CartPole-v1__vpg__x__{seed}", seed=seed, commit=commit, text="code")
    make_run(tmp_path / "CartPole-v1__vpg__x__10", seed=10, commit="old", gamma=0.5)
    found = warnings([tmp_path])
    assert found == [
        "vpg: 2 different texts of the script.",
        "Runs differ in git_commit: old (10 runs); new (1 runs).",
    ]
    make_run(tmp_path / "CartPole-v1__vpg__x__11", seed=11, commit="old", gamma=0.4)
    assert "vpg x: 2 different flags." in warnings([tmp_path])


def test_warnings_of_seeds(tmp_path, make_run):
    for seed in range(11):
        make_run(tmp_path / "runs" / f"a{seed}", seed=seed)
    for seed in range(10):
        make_run(tmp_path / "runs" / f"b{seed}", seed=seed, env_id="Acrobot-v1")
    (uneven,) = warnings([tmp_path])
    assert uneven.startswith("The number of finished seeds differs between environments (vpg).")


# The command line


def test_report_stands_in_a_sweep_and_beside_a_folder_of_runs(tmp_path, make_run, run_report):
    make_run(tmp_path / "sweep" / "runs" / "a", evaluation=None, returns=[])
    for source, place in (
        ("sweep", "sweep/report"),
        ("sweep/runs", "sweep/report"),
        ("sweep/runs/a", "sweep/runs/a/report"),
    ):
        shutil.rmtree(tmp_path / place, ignore_errors=True)
        run_report(tmp_path / source)
        text = (tmp_path / place / "report.md").read_text()
        assert "## Curves" not in text and "CartPole-v1 | 0 of 1 | - | - | - |" in text


def test_compared_runs_are_variants_of_their_own(tmp_path, make_run, run_report):
    for side in ("new", "old"):
        for seed in (1, 2):
            make_run(tmp_path / side / "runs" / f"{seed}", seed=seed)
    run_report(tmp_path / "new", "--compare", tmp_path / "old", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| vpg &gt; vpg (old) | 1 | 0.50 [" in text and len(table_after(text, "Runs")) == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{}/missing"], "error: no such folder: {}/missing"),
        (["{}/runs", "--compare", "{}/x"], "error: no such folder: {}/x"),
        (["{}/empty"], "error: no run in {}/empty: a run's folder has a config.json"),
        (["{}/damaged"], "error: damaged can't be read (V"),
        (["{}/runs", "--out", "{}/runs/one/config.json"], "error: can't draw the report: [Errno"),
        ([], "error: no RUNS"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path, run_report, make_run, capsys, words, sentence):
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "runs.csv").write_text("x\ny\n")
    with pytest.raises(SystemExit) as stop:
        run_report(*(word.format(tmp_path) for word in words))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(sentence.format(tmp_path)) and error.count("\n") == 1


# A browser

MEASURE = """<script>addEventListener("load", () => {
const found = {
    width: document.documentElement.scrollWidth <= innerWidth,
    images: [...document.images].every((x) => x.complete && x.naturalWidth > 300),
    count: document.images.length,
    requests: performance.getEntriesByType("resource").filter((x) => !x.name.startsWith("data:"))
        .length,
    text: document.body.innerText};
document.documentElement.textContent = "MEASURED" + JSON.stringify(found) + "END"; });</script>"""


def test_page_in_a_browser(big, tmp_path):
    """Every figure is there, nothing overflows sideways, no request is made, and this is its text.

    The browser reaches no network.
    """
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if not chromium:
        pytest.skip("no Chromium on this machine")
    path = tmp_path / "page.html"
    path.write_text(big.page.replace("</body>", f"{MEASURE}</body>"))
    words = "--headless=new --no-sandbox --disable-gpu --proxy-server=127.0.0.1:9 --dump-dom"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [chromium, *words.split(), "--window-size=1300,900", profile, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search("MEASURED(.*)END", done.stdout, re.DOTALL)[1]))
    text = found.pop("text")
    assert found == {"width": True, "images": True, "count": 6, "requests": 0}
    assert text.startswith("Report of 13 runs")
    assert "Warning. Acrobot-v1__vpg__none__3 failed: <b>Bad</b> end (exit code 1)" in text
    assert "<script>document.title=" in text and "20.0 +- 8.2" in text
