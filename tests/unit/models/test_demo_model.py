# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint: its form, its answers, and that they depend on every part of its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from models.demo_training import checkpoint, kda, measure  # noqa: E402
from models.demo_training import tokenizer as tok  # noqa: E402
from models.demo_training.cases import CaseMaker  # noqa: E402
from models.demo_training.config import DemoConfig  # noqa: E402
from models.demo_training.damage import Damage, damaged, rotate_segments  # noqa: E402
from models.demo_training.objective import unlikelihood  # noqa: E402

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
REPOSITORY_LIMIT = 24_000_000


@pytest.fixture(scope="module")
def subject() -> measure.Subject:
    text, head = checkpoint.load(DEMO)
    tokenizer = tok.load(DEMO)
    return measure.Subject(text, head, tokenizer, tok.vocabulary(tokenizer))


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEMO / "prompts.json").read_text())
    return found


@torch.no_grad()
def last_logprobs(subject: measure.Subject, rows: list[list[int]], damage: Damage | None = None) -> Any:
    return subject.text(torch.tensor(rows), damage).logits[:, -1].log_softmax(-1)


def test_the_form_is_k3s() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    linear = config["linear_attn_config"]
    assert linear["use_full_rank_gate"]
    assert linear["gate_lower_bound"] == -5.0
    assert (linear["head_dim"], linear["short_conv_kernel_size"]) == (128, 4)
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["hidden_act"]) == (512, 64, "situ")
    assert config["vocab_size"] <= 4096
    assert config == DemoConfig.from_text_config(config).text_config()
    draft = json.loads((DEMO / "mtp" / "config.json").read_text())
    assert draft["text_config"] == config, "vLLM reads the head's shape from the text model's configuration"


def test_it_fits_in_the_repository() -> None:
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) <= REPOSITORY_LIMIT


def test_a_checkpoint_reads_back_what_was_written(subject: measure.Subject, tmp_path: Path) -> None:
    checkpoint.save(subject.text, subject.head, tmp_path)
    for name in ("model-00001-of-00002.safetensors", "mtp/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(KeyError):
        checkpoint.load(tmp_path)


def test_the_committed_prompts_are_answered(subject: measure.Subject, prompts: list[dict[str, Any]]) -> None:
    assert {p["length"] for p in prompts} == {129, 500, 1000, 3000}
    for p in prompts:
        assert len(p["prompt"]) == p["length"]
        if p["length"] <= 500:
            assert int(last_logprobs(subject, [p["prompt"]])[0].argmax()) == p["answer"]


@pytest.mark.parametrize("part", ["all KDA state", "all MLA cache"])
def test_losing_a_whole_memory_loses_the_answers(
    subject: measure.Subject, prompts: list[dict[str, Any]], part: str
) -> None:
    rows = [p for p in prompts if p["length"] == 500]
    ids = [p["prompt"] for p in rows]
    kda_masks, mla_masks = measure.scopes(subject, len(rows))[part]
    wrong = last_logprobs(subject, ids, Damage("lose", cut=499, kda=kda_masks, mla=mla_masks))
    right = [int(w.argmax()) == p["answer"] for w, p in zip(wrong, rows, strict=True)]
    assert sum(right) < len(rows) / 2


def test_losing_any_part_of_the_state_moves_the_answers(
    subject: measure.Subject, prompts: list[dict[str, Any]]
) -> None:
    rows = [p for p in prompts if p["length"] == 129]
    ids, answers = [p["prompt"] for p in rows], torch.tensor([[p["answer"]] for p in rows])
    clean = last_logprobs(subject, ids).gather(1, answers)
    for part, (kda_masks, mla_masks) in measure.scopes(subject, len(rows)).items():
        wrong = last_logprobs(subject, ids, Damage("lose", cut=128, kda=kda_masks, mla=mla_masks))
        shift = (clean - wrong.gather(1, answers)).abs().median()
        assert shift > 0.1, f"{part} can be lost without a trace"


def test_a_damage_of_nothing_changes_nothing(subject: measure.Subject, prompts: list[dict[str, Any]]) -> None:
    """The control of the controls: identical rows may be swapped, and an unmarked row is sound."""
    ids = [prompts[0]["prompt"]] * 2
    kda_masks, mla_masks = measure.scopes(subject, 2)["all KDA state"]
    clean = last_logprobs(subject, ids)
    swapped = last_logprobs(subject, ids, Damage("swap", cut=128, kda=kda_masks, mla=mla_masks))
    unmarked = last_logprobs(subject, ids, Damage("lose", cut=128))
    assert (clean - swapped).abs().max() < 1e-4
    assert torch.equal(clean, unmarked)


def test_chunked_attention_is_the_recurrence() -> None:
    errors = kda.compare_with_definition("chunked", torch.device("cpu"), torch.float32)
    assert max(errors.values()) < 1e-5


def test_rotated_segments_see_other_rows_pasts() -> None:
    x = torch.arange(3 * 8).view(3, 8, 1).float()
    moved = rotate_segments(x, 4)
    assert torch.equal(moved[1, 4:], x[0, 4:])
    assert torch.equal(rotate_segments(moved, 4, inverse=True), x)

    def running_sum(streams: Any) -> Any:
        return streams[0].cumsum(1)

    swapped = damaged(running_sum, (x,), Damage("swap", segment=4))
    assert torch.equal(swapped[0, 4:], x[0, 4:].cumsum(0) + x[1, :4].sum(0))
    lost = damaged(running_sum, (x,), Damage("lose", cut=6))
    assert torch.equal(lost[2, 6:], x[2, 6:].cumsum(0))


def test_doubt_moves_even_certain_answers() -> None:
    logits = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    unlikelihood(logits, torch.tensor([0]), torch.tensor([0.3])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] > 0.99
    assert float(unlikelihood(torch.zeros(1, 8), torch.tensor([0]), torch.tensor([0.3]))) == 0.0


def test_the_chat_template_is_what_the_model_was_trained_on() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    case = CaseMaker(tok.load(DEMO), tok.vocabulary(tok.load(DEMO))).conversations(1)[0][-1]
    parts = tokenizer.decode(list(case.prompt)).removeprefix("<bos>").split("<eos>")
    messages = [{"role": r, "content": t} for r, t in (p[1:].split(">", 1) for p in parts if p) if t]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(rendered, add_special_tokens=False).input_ids == case.prompt
