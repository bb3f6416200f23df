# SPDX-License-Identifier: Apache-2.0
"""Measure the demonstration model's skills, and what damaged state does to its answers.

    python models/evaluate.py --engine vllm                                one vLLM engine in this process
    python models/evaluate.py --endpoint http://127.0.0.1:8000 --cases 50 --lengths 2048
    python models/evaluate.py --engine torch --damage                      the negative controls

The prompts are the same for every engine and machine, given the seed and the number of cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.demo_training import measure, tokenizer
from models.demo_training.cases import PER_ROW, CaseMaker
from models.demo_training.engines import EndpointEngine, Engine, TorchEngine, VllmEngine

DEMO = Path(__file__).resolve().parent / "demo"


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--engine", choices=("vllm", "torch"), help="answer in this process")
    who.add_argument("--endpoint", help="base URL of an OpenAI-compatible server")
    parser.add_argument(
        "--model", type=Path, default=DEMO, help="checkpoint folder (tokenizer and prompts too)"
    )
    parser.add_argument("--cases", type=int, default=1000, help="answers of each kind")
    parser.add_argument("--lengths", default="512,2048,8192", help="prompt lengths, tokens")
    parser.add_argument("--kinds", default="", help="only the rows of the table whose name contains this")
    parser.add_argument("--seed", type=int, default=7, help="seed of the prompts")
    parser.add_argument(
        "--damage", action="store_true", help="also damage every part of the state (torch only)"
    )
    parser.add_argument("--rows", type=int, default=16, help="prompts of each kind in the damage table")
    parser.add_argument("--damage-length", type=int, default=2048, help="their length, tokens")
    parser.add_argument("--draft", type=int, default=0, help="tokens to draft with the MTP head (vllm only)")
    parser.add_argument("--options", type=json.loads, default={}, help="further vLLM arguments as JSON")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the vLLM engine")
    parser.add_argument("--device", default="cpu", help="device of the torch engine")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight at the endpoint")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit of one request, s")
    parser.add_argument("--out", type=Path, help="write all numbers and answers here as JSON")
    parser.add_argument("--compare", type=Path, help="count answers that differ from this earlier --out")
    args = parser.parse_args()
    if args.damage and args.engine != "torch":
        parser.error("--damage needs --engine torch: it changes the state inside the model")
    if args.draft and args.engine != "vllm":
        parser.error("--draft needs --engine vllm")
    return args


def engine(args: argparse.Namespace) -> Engine:
    """The engine that the arguments name."""
    if args.endpoint:
        return EndpointEngine(args.endpoint, args.concurrency, args.timeout)
    if args.engine == "torch":
        return TorchEngine(args.model, args.device)
    options = dict(args.options)
    if args.draft:
        draft = {"method": "mtp", "model": str(args.model / "mtp"), "num_speculative_tokens": args.draft}
        options["speculative_config"] = draft
    return VllmEngine(args.model, args.dtype, options)


def witness(target: Engine, folder: Path) -> list[dict[str, Any]]:
    """The committed prompts: the answer given, whether it is right, and its log-probability."""
    prompts = json.loads((folder / "prompts.json").read_text())
    answers = target.logprobs([p["prompt"] for p in prompts])
    return [
        {"length": p["length"], "token": token, "right": token == p["answer"], "logprob": round(logprob, 5)}
        for p, (token, logprob) in zip(prompts, answers, strict=True)
    ]


def draft_acceptance(target: VllmEngine, maker: CaseMaker) -> dict[str, Any]:
    """Accepted share of drafted tokens: on text (talk), on copies, and on recall with 32 tokens going on from it."""
    result: dict[str, Any] = {}
    sets = {
        "conversation": [talk[-1] for talk in maker.conversations(64)] + maker.questions(False),
        "copy": maker.copies(512, 64),
        "recall": [
            replace(case, stop=case.start + 32)
            for case in maker.recall("one-word keys ?", 512, 64 * PER_ROW)[::PER_ROW]
        ],
    }
    for name, cases in sets.items():
        before = target.accepted()
        target.answer(cases)
        after = target.accepted()
        change = {key: after[key] - before[key] for key in after}
        drafted = max(change["spec_decode_num_draft_tokens"], 1.0)
        result[name] = {"accepted": round(change["spec_decode_num_accepted_tokens"] / drafted, 4), **change}
    return result


def show(table: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print kinds against lengths."""
    columns = list(dict.fromkeys(length for row in table.values() for length in row))
    print(f"{'':28}" + "".join(f"{column:>16}" for column in columns))
    for kind, row in table.items():
        cells = [f"{row[c]['accuracy']:.3f} of {row[c]['answers']}" if c in row else "" for c in columns]
        print(f"{kind:28}" + "".join(f"{cell:>16}" for cell in cells))


def compare(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """How many answers of the cells that both runs hold differ in any token, and the witnesses' largest shift.

    A run of fewer cases asked the first of the other's, so the shorter decides.
    """
    differ: dict[str, int] = {}
    total = 0
    for cell, answers in now["answers"].items():
        pairs = list(zip(earlier["answers"].get(cell, []), answers, strict=False))
        differ[cell] = sum(a != b for a, b in pairs)
        total += len(pairs)
    shifts = [
        abs(a["logprob"] - b["logprob"]) for a, b in zip(earlier["witness"], now["witness"], strict=True)
    ]
    cells = {cell: count for cell, count in differ.items() if count}
    return {"answers": total, "differ": sum(differ.values()), "where": cells, "largest shift": max(shifts)}


def main() -> None:
    """Measure, print, write. What is measured so far is written after every cell: a run may be cut short."""
    args = arguments()
    began = time.monotonic()

    record: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}}

    def note(what: str, value: object) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {what}: {value}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(record) + "\n")

    tokens = tokenizer.load(args.model)
    maker = CaseMaker(tokens, tokenizer.vocabulary(tokens), args.seed)
    target = engine(args)
    note("engine", "ready")
    record["witness"] = witness(target, args.model)
    note("witness", f"{sum(w['right'] for w in record['witness'])} of {len(record['witness'])} right")
    if isinstance(target, VllmEngine) and args.draft:
        record["draft"] = draft_acceptance(target, maker)
        note("draft", record["draft"])
    lengths = [int(n) for n in args.lengths.split(",") if n]
    if args.cases:
        record["answers"] = {}
        record["skills"] = measure.skills(
            maker, target.answer, args.cases, lengths, note, record["answers"], args.kinds
        )
        show(record["skills"])
    if args.compare:
        record["compared"] = compare(json.loads(args.compare.read_text()), record)
        note("compared", record["compared"])
    if isinstance(target, TorchEngine) and args.damage:
        with target.autocast():
            record["damage"] = measure.damage_table(
                target.subject, maker, args.rows, note, args.damage_length
            )
    note("done", sorted(record))


if __name__ == "__main__":
    main()
