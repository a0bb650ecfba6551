# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-long` holds the tests that take
# minutes; `make test-flower` and `make demo-flower` do the same across real processes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo demo-flower test test-long test-flower screenshots check docs clean

demo: $(READY)
	rm -rf demo
	$(BIN)/coterie compare fedprox fedper ifca fedfew fedfew:normalise=true --clients 20 --unseen 4 \
		--model mlp:hidden=64 --rounds 60 --seeds 2 --set lr=0.1 --out demo
	$(BIN)/coterie report demo

demo-flower: $(READY)
	$(BIN)/python tests/flower/kill_demo.py demo-flower

test: $(READY) check
	$(BIN)/python -m pytest -n 2

test-long: $(READY)
	$(BIN)/python -m pytest -n 2 -m long

test-flower: $(READY)
	$(BIN)/python -m pytest tests/flower -m flower

screenshots: demo
	$(BIN)/python tests/chromium.py demo/report.html docs

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

# The variable silences a notice of the theme's authors about another program.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(READY): pyproject.toml constraints.txt
	@echo "creating $(VENV): a few minutes, about 2.5 GB (more where PyTorch comes with CUDA)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,flower]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo demo-flower site build *.egg-info
