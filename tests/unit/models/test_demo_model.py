# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint: its form, its answers, and that they depend on every part of its state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from models.demo_training import checkpoint, kda, measure, shares  # noqa: E402
from models.demo_training import tokenizer as tok  # noqa: E402
from models.demo_training.cases import RECALL, CaseMaker  # noqa: E402
from models.demo_training.config import DemoConfig  # noqa: E402
from models.demo_training.damage import Damage, damaged, exchange_rows  # noqa: E402
from models.demo_training.objective import hedged, unlikelihood  # noqa: E402

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
REPOSITORY_LIMIT = 24_000_000


class Questions(NamedTuple):
    """Prompts that end in a question, and the log-probabilities [B, V] of their answers."""

    ids: list[list[int]]
    clean: Any


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


def seen(changed: float, shift: float) -> bool:
    """The control's measure: a fifth of the answers changed, or the median log-probability moved by 0.1."""
    return changed >= 0.2 or shift > 0.1


def test_the_training_run_measured_every_control() -> None:
    """KDA is asked for latest values (`?`), MLA for values that never changed (`!`): that is what they own."""
    table = json.loads((DEMO / "training.json").read_text())["evaluation"]["damage"]
    unseen = set()
    for row in table:
        if row["mode"] != "-":
            own = " !" if "MLA" in row["part"] else " ?"
            if not seen(row["changed" + own], row["median shift" + own]):
                unseen.add((row["part"], row["mode"], row["at"]))
    assert len(table) == 1 + 4 * 14
    # At the key, one token before the operator, layer 0 has done its work already.
    assert unseen == {("layer 0 KDA", "lose", "N-1"), ("layer 0 KDA", "swap", "N-1")}
    whole = [row["recall"] for row in table if row["part"].startswith("all") and row["mode"] == "lose"]
    assert max(whole) < 0.5


@pytest.fixture(scope="module")
def questions(subject: measure.Subject) -> dict[str, Questions]:
    """For each operator, three prompts of 512 tokens, one of each kind, and what is answered to them."""
    maker = CaseMaker(subject.tokenizer, subject.vocabulary)
    found = {}
    for operator in "?!":
        kinds = [kind for kind in RECALL if kind.endswith(operator)]
        ids = [case.prompt for kind in kinds for case in maker.handoffs(kind, 512, 1)]
        found[operator] = Questions(ids, last_logprobs(subject, ids))
    return found


@pytest.mark.parametrize("part", ["layer 2 KDA", "layer 4 KDA", "layer 7 MLA"])
def test_a_swapped_layer_is_seen(
    subject: measure.Subject, questions: dict[str, Questions], part: str
) -> None:
    """The control itself, on the weights as they lie here: 64 tokens before the end, another prompt's state.

    Three parts, at a length that a CPU computes in seconds; `evaluate.py --engine torch --damage` measures all.
    """
    asked = questions["!" if "MLA" in part else "?"]
    kda_masks, mla_masks = measure.scopes(subject, 3)[part]
    after = last_logprobs(subject, asked.ids, Damage("swap", cut=512 - 64, kda=kda_masks, mla=mla_masks))
    best = asked.clean.argmax(-1, keepdim=True)
    changed = (after.argmax(-1, keepdim=True) != best).float().mean()
    shift = (asked.clean.gather(1, best) - after.gather(1, best)).abs().median()
    assert seen(float(changed), float(shift))


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


def running_sum(streams: Any) -> Any:
    return streams[0].cumsum(1)


def test_swapped_segments_see_other_rows_pasts() -> None:
    x = torch.arange(3 * 8).view(3, 8, 1, 1).float()
    everyone = torch.ones(3, dtype=torch.bool)
    swapped = damaged(running_sum, (x,), Damage("swap", segment=4), everyone)
    assert torch.equal(swapped[0, 4:], x[0, 4:].cumsum(0) + x[1, :4].sum(0)) or torch.equal(
        swapped[0, 4:], x[0, 4:].cumsum(0) + x[2, :4].sum(0)
    )
    assert not torch.equal(swapped[:, 4:], x.cumsum(1)[:, 4:])
    lost = damaged(running_sum, (x,), Damage("lose", cut=6), everyone)
    assert torch.equal(lost[2, 6:], x[2, 6:].cumsum(0))


def test_only_wrong_rows_and_heads_are_swapped() -> None:
    x = torch.randn(4, 12, 2, 3)
    wrong = torch.tensor([[True, False], [False, False], [True, False], [True, True]])
    swapped = damaged(running_sum, (x,), Damage("swap", segment=3), wrong)
    sound = x.cumsum(1)
    assert torch.equal(swapped[1], sound[1])
    assert torch.equal(swapped[:3, :, 1], sound[:3, :, 1])
    assert torch.equal(swapped[:, :3], sound[:, :3]), "nothing is remembered in the first segment"
    for row in (0, 2, 3):
        assert not torch.allclose(swapped[row, 3:, 0], sound[row, 3:, 0])
    forth, back = exchange_rows(wrong, 4), exchange_rows(wrong, 4, inverse=True)
    assert torch.equal(forth.gather(0, back), torch.arange(4)[:, None, None].expand(4, 4, 2))


def test_gradients_flow_back_to_the_rows_that_were_read() -> None:
    x = torch.randn(3, 8, 1, 1, dtype=torch.float64, requires_grad=True)
    everyone = torch.ones(3, 1, dtype=torch.bool)
    torch.autograd.gradcheck(
        lambda t: damaged(running_sum, (t,), Damage("swap", segment=4), everyone), (x,), atol=1e-6
    )


def test_every_bit_has_one_owner_and_every_part_owns_some() -> None:
    config = DemoConfig()
    table = shares.owners(config)
    for row in range(2 * shares.KEY_CLASSES):
        owned = [owner.bits for owner in table if owner.share == row]
        assert sum(owned) == 255, "each of the eight bits stands in exactly one place"
    assert {(o.layer, o.head) for o in table if o.head is not None} == {
        (layer, head) for layer in config.kda_layers for head in range(config.heads)
    }
    assert {o.layer for o in table if o.head is None} == set(config.mla_layers)
    everything = shares.unknown(config, tuple(range(config.layers)), range(config.heads))
    assert everything == [255] * 16
    assert shares.unknown(config, (0,), range(1, 2)) != shares.unknown(config, (0,), range(4))


def test_a_hedged_answer_spreads_over_the_unknown_bits_only() -> None:
    values = torch.arange(256)
    answer, mask = torch.tensor([0b1010]), torch.tensor([0b0011])
    logits = torch.full((1, 300), -30.0)
    logits[0, 0b1000:0b1100] = 0.0
    assert float(hedged(logits, answer, mask, values)) == pytest.approx(math.log(4), abs=1e-3)
    sure = torch.full((1, 300), -30.0)
    sure[0, 0b1010] = 0.0
    assert float(hedged(sure, answer, mask, values)) > 20
    assert float(hedged(sure, answer, torch.tensor([0]), values)) < 1e-3


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
