"""Uploads to a stand-in of the Hub's API, and downloads from it."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from benchmark import ROOT
from benchmark.hub import main, make_card

COMMIT = 40 * "a"
FLAGS = "--total-timesteps 512 --no-compile --seed 7 --run-name run --eval-episodes 3"
FLAGS += " --eval-interval 1"


class Handler(BaseHTTPRequestHandler):
    """The part of the API that is asked for, for one repository, me/cart.

    server.files: what it has; server.requests: what it was asked; server.refuse: to have it.
    """

    def answer(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        server.requests.append((self.command, self.path, self.headers.get("authorization")))
        if "agent-harnesses" in self.path:
            return self.reply({})
        if server.refuse:
            return self.reply({"error": "no such repository"}, 404)
        if self.path == "/api/repos/create":
            code = 409 if server.made else 200  # it is there already
            server.made = json.loads(body)
            return self.reply({"url": f"{server.url}/me/cart", "name": "me/cart"}, code)
        if self.path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [file | {"uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.reply({"files": [x | {"shouldIgnore": False} for x in files]})
        if "/commit/" in self.path:
            for line in body.splitlines():
                record = json.loads(line)
                if record["key"] == "file":
                    file = record["value"]
                    server.files[file["path"]] = base64.b64decode(file["content"])
            return self.reply({"commitUrl": f"{server.url}/me/cart/commit/a", "commitOid": COMMIT})
        if self.path.startswith("/api/models/me/cart/tree/"):
            return self.reply(
                [
                    {"type": "file", "path": x, "size": len(data), "oid": "b"}
                    for x, data in server.files.items()
                ]
            )
        if self.path.startswith("/api/models/me/cart"):
            siblings = [{"rfilename": name} for name in server.files]
            return self.reply({"id": "me/cart", "sha": COMMIT, "siblings": siblings})
        if f"/resolve/{COMMIT}/" not in self.path:
            return self.reply({"error": f"what is {self.path}?"}, 404)
        data = server.files[self.path.split(f"/resolve/{COMMIT}/")[1]]
        etag = hashlib.sha256(data).hexdigest()
        return self.reply(data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def reply(self, content, code=200, headers=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_HEAD = answer

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.requests, server.refuse, server.made = {}, [], False, None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """Where runs/run is a finished run, with what isn't to be sent."""
    cwd = tmp_path_factory.mktemp("hub")
    assert server.run(ROOT / "ppo.py", cwd, FLAGS).returncode == 0
    run = cwd / "runs" / "run"
    (run / "replay.bin").write_bytes(b"much")
    for place in ("step-256", "end"):
        (run / "videos" / place).mkdir(parents=True)
        (run / "videos" / place / "rl-video-episode-0.mp4").write_text(place)
    return cwd


def call(cwd, hub, *words, code=0):
    """`python -m benchmark.hub words`; returns what it says."""
    url = hub.url if hub else "http://127.0.0.1:1"
    env = os.environ | {"HF_ENDPOINT": url, "HF_TOKEN": "hf_secret", "HF_HOME": str(cwd / "home")}
    result = subprocess.run(
        [sys.executable, "-m", "benchmark.hub", *words],
        cwd=cwd,
        env=env | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_run_comes_back_from_the_hub_and_plays_as_before(hub, folder, server, tmp_path):
    run = folder / "runs" / "run"
    said = call(folder, hub, "upload", "runs/run", "me/cart", "--yes")
    assert f"{hub.url}/me/cart" in said
    assert ("POST", "/api/repos/create", "Bearer hf_secret") in hub.requests
    assert hub.made["visibility"] == "public"
    names = {"config.json", "ppo.py", "checkpoint.pt", "evaluation.json", "episodes.csv"}
    names.add("best.pt")
    events = {path.name for path in run.glob("events*")}
    assert hub.files.keys() == names | events | {"README.md", "replay.mp4"} and events
    assert hub.files["replay.mp4"] == b"end"
    assert f"{hub.url}/me/cart" in call(folder, hub, "upload", "runs/run", "me/cart", "--yes")
    said = call(tmp_path, hub, "download", "me/cart", "--dir", "fetched")
    assert "python ppo.py --evaluate fetched/cart" in said
    found = tmp_path / "fetched" / "cart"
    assert {path.name for path in found.iterdir()} == hub.files.keys()
    for name in names:
        assert (found / name).read_bytes() == (run / name).read_bytes()
    result = server.run(found / "ppo.py", tmp_path, "--evaluate fetched/cart")
    assert result.returncode == 0, result.stderr
    old, new = (json.loads((x / "evaluation.json").read_text()) for x in (run, found))
    assert old["returns"] == new["returns"]
    said = call(tmp_path, hub, "download", "me/cart", "--dir", "fetched", code=2)
    assert "is there already" in said


def test_a_download_that_was_interrupted_goes_on(hub, folder, tmp_path):
    """huggingface_hub's own folder tells it from a run that is there."""
    call(folder, hub, "upload", "runs/run", "me/cart", "--yes")
    (tmp_path / "runs" / "cart" / ".cache" / "huggingface").mkdir(parents=True)
    call(tmp_path, hub, "download", "me/cart")
    names = {path.name for path in (tmp_path / "runs" / "cart").iterdir()}
    assert names == hub.files.keys()


def test_a_download_is_not_complete_without_the_hub(hub, tmp_path):
    begun = tmp_path / "runs" / "cart" / ".cache" / "huggingface"
    begun.mkdir(parents=True)
    assert "error: " in call(tmp_path, None, "download", "me/cart", code=1)
    assert begun.exists()


def test_the_card_has_what_the_hub_reads(hub, folder):
    call(folder, hub, "upload", "runs/run", "me/cart", "--yes", "--private")
    assert hub.made["visibility"] == "private"
    card = ModelCard(hub.files["README.md"].decode())
    returns = json.loads((folder / "runs" / "run" / "evaluation.json").read_text())["returns"]
    (result,) = card.data.eval_results
    assert result.metric_value == f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}"
    assert (result.metric_type, result.metric_name) == ("mean_reward", "mean_reward")
    assert (result.dataset_type, result.dataset_name) == ("CartPole-v1", "CartPole-v1")
    assert result.task_type == card.data.pipeline_tag == "reinforcement-learning"
    tags = {"CartPole-v1", "reinforcement-learning", "deep-reinforcement-learning"}
    assert set(card.data.tags) == tags
    assert "hf download me/cart --local-dir cart" in card.text
    assert f"uv run cart/ppo.py {FLAGS}\n" in card.text
    assert "uv run cart/ppo.py --evaluate cart" in card.text
    assert "with seed 7 for 512 steps. In 3\nepisodes" in card.text


def test_the_card_of_a_lengthened_run_and_of_one_of_torchrun(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "runs" / "run", run)
    saved = torch.load(run / "checkpoint.pt")
    saved["args"]["total_timesteps"] = 1024
    torch.save(saved, run / "checkpoint.pt")
    with open(run / "ppo.py", "a") as file:
        file.write("# torchrun starts it")
    card = make_card(run, "me/cart")
    assert "for 1,024 steps" in card.text
    command = "uv run --with-requirements cart/ppo.py torchrun --standalone --nproc-per-node=1"
    assert f"{command} cart/ppo.py {FLAGS} --total-timesteps 1024\n" in card.text
    assert "uv run cart/ppo.py --evaluate cart" in card.text


def test_a_word_with_a_space_is_quoted_in_the_card(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "runs" / "run", run)
    config = json.loads((run / "config.json").read_text())
    config["command"] += ["--exp-name", "my run"]
    (run / "config.json").write_text(json.dumps(config))
    assert f"{FLAGS} --exp-name 'my run'\n" in make_card(run, "me/cart").text


def test_without_yes_nothing_is_sent(hub, folder):
    said = call(folder, hub, "upload", "runs/run", "me/cart")
    assert hub.requests == [] and "checkpoint.pt" in said and "mean_reward" in said


def test_what_is_no_run_is_not_sent(folder, tmp_path, monkeypatch, capsys):
    """Nor under a name that no repository can have. In this process: the Hub isn't asked."""
    monkeypatch.chdir(folder)
    half = tmp_path / "half"
    shutil.copytree(folder / "runs" / "run", half)

    def upload(run, repo="me/cart"):
        monkeypatch.setattr(sys, "argv", ["hub", "upload", str(run), repo])
        with pytest.raises(SystemExit, match="2"):
            main()
        return capsys.readouterr().err

    assert "no finished run" in upload("runs")
    assert "error: Repo id must" in upload("runs/run", "me//x")
    assert "cart must be USER/REPO" in upload("runs/run", "cart")
    (half / "checkpoint.pt").write_text("{}")  # a script's of another kind
    assert "no run of these scripts" in upload(half)
    for text in ('{"returns": []}', "{"):
        (half / "evaluation.json").write_text(text)
        assert "no finished run: its evaluation.json has no returns" in upload(half)
    (half / "evaluation.json").unlink()
    assert "it has no evaluation.json" in upload(half)


def test_what_the_hub_refuses_or_does_not_have(hub, folder, tmp_path):
    assert "has no run of these scripts" in call(tmp_path, hub, "download", "me/cart", code=2)
    assert "error: " in call(folder, None, "upload", "runs/run", "me/cart", "--yes", code=1)
    hub.refuse = True
    said = call(tmp_path, hub, "download", "me/cart", code=1)
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert not (tmp_path / "runs" / "cart" / "config.json").exists()
