# `make help` lists the targets. Everything is installed into .venv, nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.ready

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(DONE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "feddkd needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(DONE)

setup: $(DONE) ## install the package and what its tests need into .venv

demo: $(DONE) ## FedAvg, FedProx, FedDKD and two controls on real handwritten digits, in a minute
	$(BIN)/feddkd demo

test: $(DONE) ## format, lint, types, tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --ignore tests/reproduction  # neighbours share what they compute

long: $(DONE) ## the long tests: laws of every method, all tasks on all engines, walks of processes; CI runs them
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m long

docs: $(DONE) ## the documentation as a site: build/site/index.html; nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

federation: $(DONE) ## Flower for real, the long tests: nodes killed in each phase, restarts, strangers, plain Flower, Ray (where it is installed)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m federation tests/flower/test_deployment.py tests/flower/test_secure_deployment.py

networks: $(DONE) ## users' networks, Hugging Face's and peft's among them, with every method on every engine
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[networks]'
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m networks tests/models/test_own_networks.py tests/models/test_hugging_face.py

methods-docs: $(DONE) ## write docs/methods, and the list behind `feddkd methods`, from the methods' own files
	$(BIN)/python -m feddkd.method_docs.snapshot
	$(BIN)/feddkd methods --markdown docs/methods

methods-table: $(DONE) ## every method with and without DKD on the digits, five seeds: docs/methods/table.md; goes on where it was stopped
	OMP_NUM_THREADS=1 $(BIN)/python tools/measure/methods.py

reproduction: $(DONE) ## write docs/reproduction and its pictures from papers/feddkd/results; check published numbers
	$(BIN)/feddkd paper report
	$(BIN)/python tools/recompute.py
	OMP_NUM_THREADS=1 $(BIN)/feddkd paper verify --papers papers/small --rounds 5
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/reproduction

mutants: $(DONE) ## break the code on purpose, one thing at a time, and see a test fail for each
	$(BIN)/python tools/mutants.py

report-bench: $(DONE) ## size of a report of 90 runs x 660 rounds, and how long a browser takes to open it
	PYTHONPATH=tests/support $(BIN)/python tools/report_bench.py

screenshots: $(DONE) ## docs/pictures: the report of the demo in light, dark, narrow and on paper; needs chromium
	PYTHONPATH=tests/support $(BIN)/python tools/screenshots.py

faults: $(DONE) ## kill runs at 1,000 random moments, and damage 10,000; see each go on to the same bits, or be refused
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/sigkills.py 1000
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/damage.py 10000

federation-faults: $(DONE) ## 10,000 federations by seed in one process each: lost, late and damaged messages, crashes, kills, lies
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/federation_faults.py

soak: $(DONE) ## 2,000 rounds of a tiny job on three engines: memory must stay flat
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/soak.py serial
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/soak.py batched
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tools/soak.py pool

fuzz: $(DONE) ## feed damaged input to the experiment loader, the method parser and the data readers
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py

format: $(DONE) ## put the code in order
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

clean: ## remove what the targets above made, except runs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup demo test long docs federation networks methods-docs methods-table reproduction mutants report-bench screenshots faults federation-faults soak fuzz format clean
