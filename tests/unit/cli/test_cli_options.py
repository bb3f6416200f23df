# SPDX-License-Identifier: Apache-2.0
"""Flags, environment and file give the same fields, in the right order, and say clearly what they refuse."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from deltaserve.cli.main import COMMANDS
from deltaserve.cli.options import OptionError, add_options, load, options_of, to_argv
from deltaserve.config import ClusterConfig, EtcdConfig, RouterConfig, StoreConfig, WorkerConfig

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], command: str, argv: list[str], env: dict[str, str] | None = None) -> M:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, model, command)
    return load(model, command, parser.parse_args(argv), env or {})


def test_defaults_are_the_models() -> None:
    assert parse(RouterConfig, "router", []) == RouterConfig()


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    fields = {"port": 1, "host": "127.0.0.2", "max_model_len": 64, "etcd": {"prefix": "/x", "lease_ttl": 9}}
    file.write_text(json.dumps({"router": fields}))
    env = {
        "DELTASERVE_ROUTER_PORT": "2",
        "DELTASERVE_ROUTER_HOST": "127.0.0.3",
        "DELTASERVE_ROUTER_ETCD_PREFIX": "/y",
    }
    config = parse(RouterConfig, "router", ["--config", str(file), "--port", "3"], env)
    assert (config.port, config.host, config.max_model_len) == (3, "127.0.0.3", 64)
    assert (config.etcd.prefix, config.etcd.lease_ttl, config.etcd.timeout) == ("/y", 9, EtcdConfig().timeout)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--etcd-endpoints", "a:1, b:2"], ["a:1", "b:2"]),
        (["--etcd-endpoints", '["a:1"]'], ["a:1"]),
    ],
)
def test_lists_with_commas_or_as_json(argv: list[str], expected: list[str]) -> None:
    assert parse(RouterConfig, "router", argv).etcd.endpoints == expected


def test_switches_have_both_forms() -> None:
    assert parse(WorkerConfig, "decode", ["--no-verify"]).verify is False
    assert parse(WorkerConfig, "decode", ["--verify"], {"DELTASERVE_DECODE_VERIFY": "false"}).verify is True
    assert parse(WorkerConfig, "decode", [], {"DELTASERVE_DECODE_VERIFY": "false"}).verify is False


def test_empty_text_unsets_an_optional_path() -> None:
    env = {"DELTASERVE_ROUTER_ETCD_CA_CERT": "/ca.pem"}
    assert parse(RouterConfig, "router", [], env).etcd.ca_cert == Path("/ca.pem")
    assert parse(RouterConfig, "router", ["--etcd-ca-cert="], env).etcd.ca_cert is None


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--port", "70000"], {}, ["--port", "65535", "70000"]),
        ([], {"DELTASERVE_ROUTER_PORT": "x"}, ["DELTASERVE_ROUTER_PORT", "integer"]),
        (
            [],
            {"DELTASERVE_ROUTER_PROT": "1"},
            ["DELTASERVE_ROUTER_PROT", "did you mean DELTASERVE_ROUTER_PORT"],
        ),
        (["--placement", "never"], {}, ["--placement", "'local'"]),
        (["--etcd-lease-ttl", "1"], {}, ["--etcd-lease-ttl", "greater than or equal to 2"]),
        (["--config", "/no/such"], {}, ["--config", "/no/such", "name a readable JSON file"]),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    argv: list[str], env: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        parse(RouterConfig, "router", argv, env)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_field_in_the_file_is_named_with_a_guess(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"router": {"prot": 1}}')
    with pytest.raises(OptionError, match=r'"prot": no such field of router; did you mean port\?'):
        parse(RouterConfig, "router", ["--config", str(file)])
    file.write_text('{"router": {"port": -1}}')
    with pytest.raises(OptionError, match=r'"port" in .*c.json: input should be greater'):
        parse(RouterConfig, "router", ["--config", str(file)])


def test_json_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--extra-args.*not JSON"):
        parse(WorkerConfig, "decode", ["--extra-args", "{x"])


def test_what_rests_on_two_fields_names_both() -> None:
    with pytest.raises(OptionError, match=r"decode_dcp 2 .*decode_tp 3"):
        parse(ClusterConfig, "up", ["--decode-tp", "3", "--decode-dcp", "2"])


text = st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
workers = st.builds(
    WorkerConfig,
    model=st.sampled_from([Path("m"), Path("/a b/c=d")]),
    port=st.integers(0, 65535),
    omp_threads=st.sampled_from(["", "0|1", "0,2|1,3"]),
    verify=st.booleans(),
    damage=st.sampled_from(["none", "flip", "swap"]),
    load_timeout=st.floats(1e-6, 1e6),
    extra_args=st.dictionaries(text, st.one_of(st.integers(), text, st.none(), st.booleans()), max_size=3),
    etcd=st.builds(
        EtcdConfig, endpoints=st.lists(st.sampled_from(["a:1", "[::1]:2"]), min_size=1), password=text
    ),
    store=st.builds(StoreConfig, segment_bytes=st.integers(1, 1 << 50)),
)


@given(config=workers)
def test_flags_written_for_a_configuration_give_it_back(config: WorkerConfig) -> None:
    assert parse(WorkerConfig, "decode", to_argv(config, "decode")) == config


def test_only_fields_that_were_set_are_written() -> None:
    assert to_argv(RouterConfig(port=8000), "router") == ["--port=8000"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_field_is_described_and_has_a_flag_of_its_own(command: object) -> None:
    options = options_of(command.model, command.name)  # type: ignore[attr-defined]
    assert len({option.flag for option in options}) == len(options)
    assert all(option.field.description for option in options)
