# make train: set up, train the default model, sample from it.   make test: set up, run every test.
PYTHON ?= python3
BIN = .venv/bin

train: .venv/ready
	$(BIN)/python train.py
	$(BIN)/python sample.py

test: .venv/ready-for-tests
	$(BIN)/python -m pytest

test-quick: .venv/ready-for-tests
	$(BIN)/python -m pytest -m "not slow"

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-for-tests: requirements-test.txt .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

.PHONY: train test test-quick
