# Two commands do everything on a fresh machine: `make demo` and `make test`; `make test-flower` adds real processes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOWER := $(VENV)/.ready-flower

.PHONY: demo test test-flower screenshots check clean

demo demo/report.html: $(READY)
	rm -rf demo
	$(BIN)/coterie compare fedprox fedper ifca fedfew fedfew:normalise=true --clients 20 --unseen 4 \
		--model mlp:hidden=64 --rounds 60 --seeds 2 --set lr=0.1 --out demo
	$(BIN)/coterie report demo -o demo/report.html

test: $(READY) check
	$(BIN)/python -m pytest -n 2

test-flower: $(FLOWER)
	$(BIN)/python -m pytest tests/flower -m flower

screenshots: demo/report.html
	$(BIN)/python tests/chromium.py demo/report.html docs

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

$(FLOWER): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,flower]"
	touch $(FLOWER)

clean:
	rm -rf $(VENV) demo build *.egg-info
