# SPDX-License-Identifier: Apache-2.0
"""Each optimisation is read from where vLLM keeps it: change the attribute, and the report changes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.doctor import capabilities
from deltaserve.doctor.capabilities import (
    Capability,
    ConnectorRefused,
    report,
    report_json,
    require_state_connector,
)
from deltaserve.doctor.passes import Prefills
from deltaserve.engine.cpu import replay


class HybridConnector:
    """Stands for a connector that declares SupportsHMA."""

    def request_finished_all_groups(self) -> None: ...


class PlainConnector:
    """Stands for one that does not."""


def config(**changes: Any) -> Any:
    """A configuration as vLLM 0.32 has it on a CPU; `changes` are dotted names with _ _ for the dot."""
    made = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            max_num_batched_tokens=8192,
            max_num_scheduled_tokens=None,
        ),
        cache_config=SimpleNamespace(
            use_replayssm=False, enable_prefix_caching=True, mamba_cache_mode="align"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(quantization=None, supports_replayssm=True, is_hybrid=True),
        kv_transfer_config=SimpleNamespace(kv_connector="Hybrid"),
        num_speculative_tokens=0,
    )
    for path, value in changes.items():
        holder, _, name = path.rpartition("__")
        setattr(getattr(made, holder) if holder else made, name, value)
    return made


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that the test describes: `compute` None is a CPU."""
    state = SimpleNamespace(compute=None, connector=HybridConnector, flash=True, refuses=True, in_place=True)
    monkeypatch.setattr(capabilities, "_is_cuda", lambda: state.compute is not None)
    monkeypatch.setattr(capabilities, "_compute_capability", lambda: state.compute)
    monkeypatch.setattr(capabilities, "_connector_class", lambda config: state.connector)
    monkeypatch.setattr(
        capabilities, "_handles_hybrid_memory", lambda connector: connector is HybridConnector
    )
    monkeypatch.setattr(
        capabilities,
        "_pinning_methods",
        lambda connector: [n for n in ("request_finished_all_groups",) if hasattr(connector, n)],
    )
    monkeypatch.setattr(
        capabilities, "_flash_kda", lambda config: (state.compute is not None and state.flash, "rule")
    )
    monkeypatch.setattr(capabilities, "_refuses_connector_with_replay", lambda: state.refuses)
    monkeypatch.setattr(capabilities, "_source", lambda module: "spec_token_start" if state.in_place else "")
    monkeypatch.setattr(capabilities, "_has_module", lambda module: True)
    return state


def one(name: str, **changes: Any) -> Capability:
    return next(item for item in report(config(**changes)) if item.name.startswith(name))


def test_eight_optimisations_each_with_a_reason_and_a_place() -> None:
    items = report(config())
    assert [item.name for item in items] == [
        "adaptive scheduling budget",
        "internal KDA checkpoints",
        "one prefill pass",
        "zero-copy mixed batches",
        "deferred MXFP4 finalization",
        "ReplaySSM",
        "hybrid state offload with pins",
        "decode context parallelism (DCP)",
    ]
    assert all(item.reason and item.read_from for item in items)
    assert [Capability(**item) for item in json.loads(report_json(config()))] == items


@pytest.mark.parametrize(
    ("threshold", "adaptive", "state"),
    [(0, False, "off"), (0, True, "off"), (9, False, "off"), (9, True, "active")],
)
def test_adaptive_budget_needs_both_fields(threshold: int, adaptive: bool, state: str) -> None:
    item = one(
        "adaptive",
        scheduler_config__long_prefill_token_threshold=threshold,
        scheduler_config__long_prefill_token_threshold_adaptive=adaptive,
    )
    assert item.state == state
    assert str(threshold) in item.read_from


def test_an_attribute_that_is_not_there_is_not_in_this_version() -> None:
    made = config()
    del made.scheduler_config.long_prefill_token_threshold_adaptive
    del made.cache_config.use_replayssm
    del made.parallel_config.decode_context_parallel_size
    states = {item.name: item for item in report(made)}
    for name in ("adaptive scheduling budget", "ReplaySSM", "decode context parallelism (DCP)"):
        assert states[name].state == "unavailable"
        assert "no such feature" in states[name].reason


def test_internal_checkpoints_follow_vllm_s_rule_and_the_cache_mode(machine: Any) -> None:
    assert one("internal").state == "unavailable"
    machine.compute = (9, 0)
    assert one("internal").state == "active"
    assert one("internal", cache_config__enable_prefix_caching=False).state == "off"
    machine.flash = False
    assert "head_dim 128" in one("internal").reason


@pytest.mark.parametrize(("blocks", "state"), [(0, "unavailable"), (1, "active")])
def test_internal_checkpoints_are_read_from_a_running_engine_s_cache(blocks: int, state: str) -> None:
    spec = type("MambaSpec", (), {"num_prefill_checkpoint_blocks": blocks})()
    attention = SimpleNamespace(kv_cache_spec=type("MLAAttentionSpec", (), {})())
    cache = SimpleNamespace(kv_cache_groups=[attention, SimpleNamespace(kv_cache_spec=spec)])
    item = next(item for item in report(config(), cache) if item.name.startswith("internal"))
    assert item.state == state
    assert item.read_from.endswith(f"={blocks}")


def test_one_pass_is_what_the_limits_and_the_kernels_allow(machine: Any) -> None:
    item = one("one prefill pass")
    assert item.state == "unavailable"
    assert "one more where the last aligned state is kept" in item.reason
    cut = one("one prefill pass", scheduler_config__max_num_scheduled_tokens=512)
    assert cut.state == "off"
    assert "at most 512 tokens" in cut.reason
    assert "checkpoint" in cut.reason
    machine.compute = (9, 0)
    whole = one("one prefill pass")
    assert whole.state == "active"
    assert "at most 8192 tokens" in whole.reason
    assert one("one prefill pass", cache_config__enable_prefix_caching=False).state == "active"


def test_a_running_worker_adds_what_it_has_counted(machine: Any) -> None:
    machine.compute = (9, 0)
    configured = report(config())
    prefills = Prefills()
    assert prefills.seen(configured) == configured
    prefills.add(1, 5000, 0)
    prefills.add(2, 9000, 0)
    seen = {item.name: item for item in prefills.seen(configured)}
    assert seen.keys() == {item.name for item in configured}
    found = seen["one prefill pass"]
    assert found.state == "active"
    assert found.reason.startswith(
        "2 published prompts took 3 forward passes for 14000 tokens, 0 of them computed again; a prompt is"
    )
    # Control: one token that was computed twice is not hidden.
    prefills.add(2, 101, 1)
    (found,) = (item for item in prefills.seen(configured) if item.name == "one prefill pass")
    assert found.state == "unavailable"
    assert "1 of them computed again" in found.reason


def test_zero_copy_needs_cuda_and_speculation(machine: Any) -> None:
    assert one("zero-copy").state == "unavailable"
    machine.compute = (9, 0)
    assert one("zero-copy").state == "off"
    assert one("zero-copy", num_speculative_tokens=3).state == "active"
    machine.in_place = False
    assert one("zero-copy", num_speculative_tokens=3).state == "unavailable"


def test_deferred_mxfp4_needs_blackwell_mxfp4_and_tp(machine: Any) -> None:
    assert "this is a CPU" in one("deferred").reason
    machine.compute = (9, 0)
    assert "compute capability 9.0" in one("deferred").reason
    machine.compute = (10, 0)
    assert one("deferred").state == "off"
    changes = {"model_config__quantization": "mxfp4"}
    assert one("deferred", **changes).state == "off"
    assert one("deferred", **changes, parallel_config__tensor_parallel_size=8).state == "active"


def test_replay_ssm_by_hardware_model_version_and_setting(machine: Any) -> None:
    assert one("Replay").state == "off"
    noted: dict[str, Any] = {"additional_config": {replay.NOTE: True}}
    assert one("Replay", **noted).state == "off", "a CPU's note without drafts"
    assert one("Replay", **noted, num_speculative_tokens=2).state == "active"
    assert "folds instead" in one("Replay", num_speculative_tokens=2).reason
    machine.compute = (9, 0)
    assert "refuses use_replayssm together with a KV connector" in one("Replay").reason
    machine.refuses = False
    assert one("Replay").state == "off"
    assert one("Replay", model_config__supports_replayssm=False).state == "unavailable"
    assert one("Replay", cache_config__use_replayssm=True).state == "active"


def test_offload_needs_a_hybrid_connector_that_pins(machine: Any) -> None:
    assert one("hybrid state").state == "active"
    assert one("hybrid state", cache_config__mamba_cache_mode="none").state == "off"
    assert one("hybrid state", kv_transfer_config=None).state == "off"
    machine.connector = PlainConnector
    assert one("hybrid state").state == "unavailable"


@pytest.mark.parametrize(("tp", "dcp", "state"), [(1, 1, "off"), (4, 1, "off"), (4, 2, "active")])
def test_dcp(tp: int, dcp: int, state: str) -> None:
    changes = {
        "parallel_config__tensor_parallel_size": tp,
        "parallel_config__decode_context_parallel_size": dcp,
    }
    assert one("decode context", **changes).state == state


def test_a_connector_that_loses_kda_state_is_refused_for_hybrid_models_only(machine: Any) -> None:
    require_state_connector(config())
    machine.connector = PlainConnector
    with pytest.raises(
        ConnectorRefused, match=r"Plain.* does not declare SupportsHMA.*leave kv_transfer_config out"
    ):
        require_state_connector(config(kv_transfer_config=SimpleNamespace(kv_connector="Plain")))
    require_state_connector(config(model_config__is_hybrid=False))
    require_state_connector(config(kv_transfer_config=None))
