# `make run` starts everything, `make test` checks everything; both install what they need first.
# PYTHON=python3.12 chooses another interpreter for the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# torch's threads otherwise spin while they wait, and two processes on the same cores starve each other.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help run test check bench format chromium

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.requirements ## start Redis, the workers and the page on http://127.0.0.1:7860
	@$(BIN)/python app.py

test: $(VENV)/.requirements-dev chromium ## run every test
	$(BIN)/python -m pytest --ignore=tests/browser $(ARGS)
	@# A process of their own: Playwright keeps an event loop in the main thread, and other tests start theirs.
	$(BIN)/python -m pytest tests/browser $(ARGS)

check: $(VENV)/.requirements-dev ## formatter, linter and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.requirements ## measure speed on this machine into benchmarks/RESULTS.md (minutes, on a quiet machine)
	@export OMP_WAIT_POLICY=PASSIVE; { \
		printf '# Results\n'; \
		for script in linears whole_model batching modes rows two_workers load_memory gpu_27b; do \
			echo "benchmarks/$$script.py" >&2; printf '\n## %s\n\n' $$script; \
			$(BIN)/python -W ignore benchmarks/$$script.py 2>/dev/null || echo "not measured: it failed"; \
		done; } > benchmarks/RESULTS.md
	@echo "wrote benchmarks/RESULTS.md"

format: $(VENV)/.requirements-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ". Choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# A stamp is touched only after a complete installation, so an interrupted one starts again.
$(VENV)/.requirements: requirements.txt | $(BIN)/python
	@echo "Installing requirements.txt into $(VENV) (minutes the first time: torch is large)"
	$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.requirements-dev: requirements-dev.txt $(VENV)/.requirements
	@echo "Installing requirements-dev.txt into $(VENV)"
	$(PIP) -r requirements-dev.txt
	@touch $@

# The browser tests drive a real Chromium; without one they skip and say so.
chromium:
	@if command -v chromium >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the browser tests"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
			|| echo "Chromium could not be installed: the browser tests will skip"; \
	else echo "Chromium is not installed: the browser tests will skip"; fi
