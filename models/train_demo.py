# SPDX-License-Identifier: Apache-2.0
"""Train the demonstration model: one run of under ten minutes on one H200, from fixed seeds.

    python models/train_demo.py --out models/demo

Needs torch with CUDA and the fla-core library's KDA kernels. The output folder receives the text model, its
MTP draft (`mtp/`), the tokenizer, `prompts.json`, and `training.json` with the loss curve and the evaluation.
`--tiny` trains a few steps of a toy shape on a CPU, to see that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from models.demo_training import chat, checkpoint, corpus, kda, measure, objective, ops, tokenizer
from models.demo_training.config import TINY, DemoConfig
from models.demo_training.dialogue import Dialogues
from models.demo_training.kernels import prepare_gpu
from models.demo_training.mixture import Mixture, lengths
from models.demo_training.model import DemoModel, MtpHead
from models.demo_training.optim import Optimizer
from models.demo_training.questions import TOPICS
from models.demo_training.tasks import Tasks

SEED = 20
DAMAGE_FROM, DAMAGE_SHARE = 0.1, 0.4
"""Progress at which damaged steps begin, and their share from then on."""
FLAT_UNTIL = 0.45
"""The learning rate is flat until here and then falls linearly."""


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=6000, help="training steps")
    parser.add_argument("--seconds", type=float, default=475.0, help="wall-clock limit of training, s")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a step")
    parser.add_argument("--longest", type=int, default=8192, help="longest row, tokens")
    parser.add_argument("--lr-muon", type=float, default=4e-3, help="learning rate of the matrices")
    parser.add_argument("--lr-adam", type=float, default=3e-3, help="learning rate of everything else")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay")
    parser.add_argument("--probe", type=float, default=0.5, help="weight of the bits each part must hold")
    parser.add_argument("--hedge", type=float, default=0.5, help="weight of answers under swapped memory")
    parser.add_argument("--cases", type=int, default=1000, help="answers of each kind in the evaluation")
    parser.add_argument("--lengths", default="512,2048,8192,16384", help="prompt lengths in the evaluation")
    parser.add_argument("--tiny", action="store_true", help="toy shape on a CPU")
    return parser.parse_args()


def build_tokenizer(documents: list[str], vocab_size: int) -> Any:
    """The tokenizer, learned from the questions, generated conversations and a part of the free text."""
    asked = [text for topic in TOPICS for text in (*topic.phrasings, topic.answer)]
    rng = Random(SEED)
    talks = [chat.plain(chat.conversation(rng)) for _ in range(3000)]
    return tokenizer.build([*asked * 20, *talks, *documents[:600]], vocab_size)


class Run:
    """One training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.log: list[dict[str, Any]] = []
        self.device = torch.device("cpu" if args.tiny else "cuda")
        torch.manual_seed(SEED)
        kernel = prepare_gpu(self.note) if self.device.type == "cuda" else "chunked"
        kda.use_kernel(kernel)
        config = TINY if args.tiny else DemoConfig()
        documents = corpus.documents(SEED)
        self.tokenizer = build_tokenizer(documents, config.vocab_size)
        self.vocabulary = tokenizer.vocabulary(self.tokenizer)
        self.filler = measure.training_text(self.tokenizer, documents, self.vocabulary, SEED)
        cut = int(len(self.filler) * 0.97)
        tasks = Tasks(self.vocabulary, self.filler[:cut], self.device, SEED)
        talks = 2000 if args.tiny else 60_000
        dialogues = Dialogues(self.tokenizer, talks, self.device, SEED)
        self.note("data", f"{len(self.filler)} text tokens, {len(dialogues.ids)} conversation tokens")
        self.mixture = Mixture(config, tasks, dialogues)
        self.text = DemoModel(config).to(self.device)
        self.head = MtpHead(config).to(self.device)
        self.probes = objective.Probes(config).to(self.device)
        self.optimizer = Optimizer(
            [self.text, self.head, self.probes], args.lr_muon, args.lr_adam, args.decay
        )
        if self.device.type == "cuda":
            ops.compile_all()

    def note(self, what: str, value: object) -> None:
        """Print with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f}] {what}: {value}", flush=True)

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def ordinary_step(self, rows: int, length: int, progress: float) -> Callable[[], dict[str, Any]]:
        """Forward and backward on a batch of all skills; returns what to log."""
        batch, counts = self.mixture.ordinary(rows, length, progress)
        with self.autocast():
            output = self.text(batch.ids)
            losses = objective.token_losses(output.logits, batch.ids)
            loss = objective.weighted(losses, batch.weight)
            draft, agreement = objective.draft_loss(self.head, self.text, batch, output)
            probe, bits = self.probes(batch, output, self.mixture.tasks)
        (loss + draft + self.args.probe * probe).backward()

        def report() -> dict[str, Any]:
            hit = (output.logits[:, :-1].argmax(-1) == batch.ids[:, 1:]) & batch.answer[:, 1:]
            right: dict[str, float] = {}
            row = 0
            for name, count in counts:
                part = slice(row, row + count)
                row += count
                answers = batch.answer[part, 1:].sum()
                value = losses[part].mean() if name == "text" else hit[part].sum() / answers.clamp(min=1)
                right[name] = round(value.item(), 3)
            return {
                "loss": round(loss.item(), 4),
                "draft": round(agreement.item(), 3),
                "bits": round(bits.item(), 3),
                **right,
            }

        return report

    def damaged_step(self, rows: int, length: int, progress: float) -> Callable[[], dict[str, Any]]:
        """Forward and backward on rows with damaged memories."""
        work = self.mixture.damaged(rows, length, progress)
        with self.autocast():
            grown = min(1.0, (progress - DAMAGE_FROM) / 0.15)  # slowly, so that recall survives its start
            loss, left = objective.damaged_loss(
                self.text, work, self.mixture.tasks, 0.02 + 0.2 * grown, self.args.hedge * (0.1 + 0.9 * grown)
            )
        loss.backward()
        return lambda: {work.damage.mode: round(left.item(), 4), "damaged_loss": round(loss.item(), 4)}

    def train(self) -> None:
        """All steps. The run ends early, with the schedule complete, when the time limit is near."""
        args, started, logged = self.args, 0.0, 0.0
        step, progress = 0, 0.0
        tasks = self.mixture.tasks
        while progress < 1.0:
            pick = lengths(progress, args.longest)
            damaged = progress >= DAMAGE_FROM and float(tasks.uniform(1)) < DAMAGE_SHARE
            length = (
                tasks.one_of(tuple(n for n in pick if n <= 2048) or pick) if damaged else tasks.one_of(pick)
            )
            rows = max(1, args.tokens // length)
            report = (self.damaged_step if damaged else self.ordinary_step)(rows, length, progress)
            rate = 1.0 if progress < FLAT_UNTIL else 0.03 + 0.97 * (1 - progress) / (1 - FLAT_UNTIL)
            norm = self.optimizer.step(min(1.0, (step + 1) / 60) * rate)
            if progress < 0.9:
                self.balance()
            step += 1
            now = time.monotonic() - self.began
            if step == 3:  # kernels are compiled: time and the schedule count from here
                started = now
            spent = (now - started) / max(args.seconds - started, 1e-6) if started else 0.0
            progress = max(step / args.steps, spent)
            if now - logged > 8 or step in (3, 20):
                logged = now
                entry = {"step": step, "seconds": round(now, 1), "length": length, **report()}
                self.log.append(entry)
                self.note(f"{100 * progress:3.0f}%", f"{json.dumps(entry)} norm {float(norm):.2f}")
        self.note("trained", f"{step} steps of {args.tokens} tokens")

    @torch.no_grad()
    def balance(self, rate: float = 1e-3) -> None:
        """Move each router's correction bias towards an even load, without an auxiliary loss."""
        for layer in self.text.mixtures():
            layer.gate.e_score_correction_bias += rate * torch.sign(layer.load.mean() - layer.load)

    def finish(self) -> None:
        """Save, read back what was saved, evaluate it and write the log."""
        out = self.args.out
        size = checkpoint.save(self.text, self.head, out)
        tokenizer.save(self.tokenizer, out, self.text.config.max_length)
        record: dict[str, Any] = {
            "tensor_bytes": size,
            "arguments": vars(self.args) | {"out": "", "seed": SEED},
        }
        record["curve"] = self.log
        path = out / "training.json"
        path.write_text(json.dumps(record) + "\n")
        self.note("saved", f"{size} bytes of tensors")
        text, head = checkpoint.load(out)
        ops.use_eager()
        subject = measure.Subject(text.to(self.device), head.to(self.device), self.tokenizer, self.vocabulary)
        sizes = tuple(int(n) for n in self.args.lengths.split(","))
        with self.autocast():
            record["evaluation"] = measure.everything(subject, self.args.cases, sizes, self.note)
            path.write_text(json.dumps(record) + "\n")
            witnesses = measure.witnesses(subject)
        (out / "prompts.json").write_text(json.dumps(witnesses, separators=(",", ":")) + "\n")
        self.note("done", sorted(os.listdir(out)))


def main() -> None:
    """Train, save, evaluate."""
    run = Run(arguments())
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
