# make install: .venv with all packages; make train: a trained HalfCheetah; make test: lint and tests; make test-engines:
# sweeps on a real Docker, Slurm and Ray; make results: the committed figures and tables, redrawn from the committed CSVs.
# make sync: a definition that scripts share, copied from the script it was changed in to all others.
# All of them install first where that hasn't been done.
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: install train test test-engines results lint sync

install: .venv/installed

train: .venv/installed
	$(RUN) ppo_continuous_action.py

test: lint
	$(RUN) -m pytest -q -n 2 --dist loadgroup tests

test-engines: .venv/installed
	$(RUN) -m pytest -q -s tests/benchmark/real_engines.py

results: .venv/installed
	$(RUN) -m benchmark.report.results

sync: .venv/installed
	$(RUN) tests/sync.py

lint: .venv/installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

.venv/installed: requirements.txt requirements-sweep.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("make needs Python 3.10 or newer: make PYTHON=python3.12")'
	$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(RUN) -m pip install --quiet --requirement requirements.txt --requirement requirements-sweep.txt
	touch $@
