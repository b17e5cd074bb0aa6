# Everything is installed in .venv, from which all commands here run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAGE := build/stage

.PHONY: run test test-deploy deploy-demo check compare docs stage clean

# pip, not uv: a machine may offer torch for its own kind of hardware to pip.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: $(STAMP)
	$(BIN)/flower-adsp run $(ARGS)

# Two files of tests at a time; most of what they do is waiting for processes to start.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Real SuperNodes on the loopback interface; takes seven minutes.
test-deploy: $(STAMP)
	$(BIN)/python -m pytest -m deploy tests/deploy $(ARGS)

deploy-demo: $(STAMP)
	$(BIN)/flower-adsp deploy-demo $(ARGS)

compare: $(STAMP)
	$(BIN)/python benchmarks/time_to_loss.py --quick $(ARGS)

# The strategies and clients are looked at where a wheel has them: inside the package.
stage:
	rm -rf $(STAGE)
	mkdir -p $(STAGE)
	cp -R flower_adsp $(STAGE)/
	cp -R strategies clients $(STAGE)/flower_adsp/

check: $(STAMP) stage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd $(STAGE) && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p flower_adsp

docs: $(STAMP) stage
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
