import subprocess
import sys

import pytest

from benchmark.flags import words_of


def test_words_of_flags():
    """A script's parser makes the same flags of them."""
    flags = {"hidden_sizes": [3, 5], "norm_adv": False, "amp": True, "target_kl": 0.02}
    words = "--hidden-sizes 3 5 --no-norm-adv --amp --target-kl 0.02"
    assert words_of(flags) == tuple(words.split())


@pytest.mark.parametrize("module", ["suite", "sweep", "status", "worker"])
def test_sweeps_do_not_import_pandas(module):
    """It takes longer than all the rest of a command's start."""
    code = f"import sys; import benchmark.{module}; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert f"benchmark.{module}" in modules and "pandas" not in modules
