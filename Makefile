# SPDX-License-Identifier: Apache-2.0
# make serve        everything that is missing, then a cluster on this machine (Ctrl-C stops it)
# make install      the set-up step alone
# make test         unit and property tests, then scenarios and tests with real processes (ARGS=... for some)
# make lint         formatting, lint and types
# make proto        the generated half of deltaserve/wire, from worker.proto
# make lock         requirements/*.lock, from what is installed

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
DEVICE ?= cpu
PORT ?= 8000
MODEL ?= models/demo
PACKAGES := deltaserve router prefill_worker decode_worker statestore
# Threads that wait asleep: spinning ones cost ten times their work where processes share few cores.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest
SOURCES := $(wildcard $(PACKAGES) models deploy tests benchmarks)

.DEFAULT_GOAL := help
.PHONY: help install dev serve test lint format proto lock

help:
	@sed -n 's/^# make/make/p' Makefile

install:
	@sh deploy/install/install.sh --device $(DEVICE)

dev:
	@sh deploy/install/install.sh --dev --device $(DEVICE)

serve: install
	@exec $(VENV)/bin/deltaserve up --model $(MODEL) --port $(PORT) --device $(DEVICE) $(ARGS)

test: dev
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	$(PYTEST) -n 2 --dist worksteal -m "not (cluster or scenario)"
	$(PYTEST) -n 2 --dist loadfile -m "cluster or scenario" tests/unit tests/scenario
	$(PYTEST) --durations=60 --durations-min=5 -m "cluster or scenario" tests/cluster
endif

lint: dev
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy

format: dev
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/ruff format $(SOURCES)

proto: dev
	$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. deltaserve/wire/worker.proto deltaserve/wire/api.proto

lock:
	$(PY) deploy/install/lock.py
