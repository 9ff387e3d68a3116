PYTHON = .venv/bin/python

.PHONY: test lint soak docs

test:
	$(PYTHON) -m pytest -n 2

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# kills at random instants, each resumed and compared: about twenty minutes on two cores
soak:
	$(PYTHON) tests/soak.py --kills 50 --seed 0

# the documentation, to be opened at docs/_build/index.html
docs:
	$(PYTHON) -m sphinx -q -W --keep-going docs docs/_build
