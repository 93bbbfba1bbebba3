"""What every test has: the scripts on sys.path, one thread, fixed seeds; and helpers for all."""

import random
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_collection_modifyitems(items):
    """Groups for pytest -n 2 --dist loadgroup: a file, but of test_behaviour.py a script."""
    for item in items:
        group = item.path.stem
        if group == "test_behaviour":
            group = item.callspec.params["script"]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def server():
    """A process that has done the imports and forks for every command line."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch):
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setattr(sys, "path", list(sys.path))  # read_flags() adds to it


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """run_script(path, *flags, code=0): `python path *flags` in an empty folder.

    It must end with that exit code. Returns the module with its variables.
    """
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)

    def run(path, *flags, code=0):
        module = types.ModuleType("__main__")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__", module)
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        ended = 0
        try:
            exec(compile(Path(path).read_text(), path, "exec"), vars(module))
        except SystemExit as stop:
            ended = 1 if isinstance(stop.code, str) else stop.code or 0  # a text is printed
        assert ended == code
        return module

    yield run
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(module, flags): the sentence with which it refuses its flags, exit code 2."""

    def parse(module, flags):
        monkeypatch.setattr(sys, "argv", [module.__file__, *flags])
        with pytest.raises(SystemExit) as stop:
            args, _ = module.read_flags()
            module.check_args(args)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return parse
