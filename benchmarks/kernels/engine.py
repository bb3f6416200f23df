# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine on one GPU, with and without speculation on recurrent state: tokens, tokens a second, KV capacity.

    python -m benchmarks.kernels.engine --drafts 7 --out DIR

Modes: ``none`` (no drafts), ``write`` (one state a position), ``recover`` (vLLM's RecoverSSM), ``replay`` (fold at
start, this project's kernels), ``ring`` (the same, but a state is written when 16 accepted tokens have gathered).
Every mode is an engine in a process of its own; they load side by side and then run one after the other. Answers
are greedy and compared with those of ``none``; where the first difference lies, the gap of ``none``'s two best
log-probabilities says what rounding could do there. On a fresh machine the engines compile for minutes.

``--acceptance N`` makes vLLM accept N tokens a window on average whatever they are (its "synthetic" method), for a
speed that does not depend on how well a model's drafts guess; answers then mean nothing. ``--heads H`` takes random
weights and H KDA heads instead of the demonstration model's.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels.watch import StepWatch, launches

MODES = ("none", "write", "recover", "replay", "ring")
DEMO = Path("models/demo")


def load(options: argparse.Namespace, mode: str) -> Any:
    """The engine of a mode."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["DELTASERVE_REPLAY_SSM"] = {"replay": "1", "ring": "ring"}.get(mode, "0")
    from deltaserve.engine.cuda import replay_ssm

    replay_ssm.install()
    from vllm import LLM

    sizes = [1, 4, 16, 32, 64, 128]
    sizes = [size for size in sizes if size <= options.batch]
    args: dict[str, Any] = {
        "model": str(DEMO),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": options.batch,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": options.cache_bytes,
        "gpu_memory_utilization": 0.02,
        "seed": 0,
        "enable_prefix_caching": True,
        "prefix_match_unit": 16,
        "disable_log_stats": False,
        "async_scheduling": options.overlap,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
    }
    if options.heads:
        layers = json.loads((DEMO / "config.json").read_text())["linear_attn_config"]
        args["load_format"] = "dummy"
        args["hf_overrides"] = {"linear_attn_config": {**layers, "num_heads": options.heads}}
    if mode != "none":
        window = options.drafts + 1
        args["compilation_config"] = {"cudagraph_capture_sizes": [window * size for size in sizes]}
        draft: dict[str, Any] = {
            "method": "mtp",
            "model": str(DEMO / "mtp"),
            "num_speculative_tokens": options.drafts,
        }
        if options.acceptance:
            draft["rejection_sample_method"] = "synthetic"
            draft["synthetic_acceptance_length"] = options.acceptance
        args["speculative_config"] = draft
        args["use_replayssm"] = mode != "write"
    if options.eager:
        args["enforce_eager"] = True
        del args["compilation_config"]
    return LLM(**args)


def prompts(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to measure with, half of them copying and half conversations, and others to warm up with."""
    from models.demo_training import tokenizer
    from models.demo_training.cases import CaseMaker

    tokens = tokenizer.load(DEMO)
    found = []
    for seed in (7, 8):
        maker = CaseMaker(tokens, tokenizer.vocabulary(tokens), seed)
        talks = [talk[-1].prompt for talk in maker.conversations(count - count // 2)]
        found.append([case.prompt for case in maker.copies(448, count // 2)] + talks)
    return found[0], found[1]


def generate(llm: Any, asked: list[list[int]], tokens: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
    )
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counts of drafts so far."""
    names = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    return {m.name.removeprefix("vllm:"): float(m.value) for m in llm.get_metrics() if m.name[5:] in names}


def child(options: argparse.Namespace, mode: str) -> None:
    """Load, wait for the turn, measure, write ``mode``.json."""
    watch = StepWatch()
    watch.watch_compiler()
    watch.watch_graphs()
    llm = load(options, mode)
    watch.watch_steps(llm)
    asked, others = prompts(options.batch)
    generate(llm, others, 48)
    ready, go = options.out / f"{mode}.ready", options.out / f"{mode}.go"
    ready.touch()
    wait_for(go)
    record: dict[str, Any] = {"mode": mode}
    seconds, record["runs"] = [], []
    for _ in range(options.repeats):
        llm.reset_prefix_cache()
        watch.begin()
        begin = time.perf_counter()
        outputs = generate(llm, asked, options.tokens)
        seconds.append(time.perf_counter() - begin)
        record["runs"].append(watch.end())
    record["seconds"] = seconds
    record["tokens_per_second"] = options.batch * options.tokens / min(seconds)
    record["tokens"] = [list(o.outputs[0].token_ids) for o in outputs]
    record["counters"] = counters(llm)
    record["continued"] = []
    if not options.acceptance:
        # The same again with their beginnings cached, and histories that end inside an answer.
        longer = [p + t[: options.tokens // 2] for p, t in zip(asked, record["tokens"], strict=True)]
        again = generate(llm, longer, options.tokens - options.tokens // 2)
        record["continued"] = [list(o.outputs[0].token_ids) for o in again]
    if mode == "none" and not options.acceptance:
        llm.reset_prefix_cache()
        record["gaps"] = [
            [
                abs(float.__sub__(*sorted((float(v.logprob) for v in step.values()), reverse=True)[:2]))
                for step in o.outputs[0].logprobs
            ]
            for o in generate(llm, asked, options.tokens, 2)
        ]
    result = options.out / f"{mode}.json"
    result.with_suffix(".part").write_text(json.dumps(record))
    result.with_suffix(".part").replace(result)
    print(f"done {mode}: {seconds}", flush=True)
    if mode in options.profile.split(","):
        # Last of all: a profile takes its time, and no other mode may be measured beside it.
        wait_for(options.out / f"{mode}.profile.go")
        profile(llm, asked, watch, options.out / f"{mode}.profile")
    os._exit(0)


def wait_for(path: Path) -> None:
    """Until a file exists."""
    while not path.exists():
        time.sleep(0.2)


def profile(llm: Any, asked: list[list[int]], watch: StepWatch, target: Path) -> None:
    """Where the time of short runs goes: launches and kernels a step, calls of the runtime, functions of the host."""
    import torch
    from torch.profiler import ProfilerActivity

    words = io.StringIO()
    llm.reset_prefix_cache()
    host = cProfile.Profile()
    host.runcall(generate, llm, asked, 48)
    for by in ("tottime", "cumulative"):
        pstats.Stats(host, stream=words).sort_stats(by).print_stats(40)
    target.with_suffix(".host").write_text(words.getvalue())
    llm.reset_prefix_cache()
    watch.begin()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        generate(llm, asked, 24)
    steps = watch.end()["steps"]
    events = found.key_averages()
    words = io.StringIO()
    words.write(launches(events, steps))
    for order, rows in (("self_cuda_time_total", 30), ("self_cpu_time_total", 30)):
        words.write(events.table(sort_by=order, row_limit=rows, max_name_column_width=60) + "\n")
    target.write_text(words.getvalue())


def capacity(log: Path) -> str:
    """How many tokens an engine's cache holds; vLLM only logs it."""
    found = re.findall(r"GPU KV cache size: ([\d,]+) tokens", log.read_text(errors="replace"))
    return found[-1] if found else "?"


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def report(folder: Path, modes: list[str], batch: int) -> None:
    """Print what the modes wrote; ``none`` is what answers are compared with."""
    records = {m: json.loads(p.read_text()) for m in modes if (p := folder / f"{m}.json").exists()}
    reference = records.get("none")
    for mode, record in records.items():
        line = f"{mode:8} {record['tokens_per_second']:9.0f} tokens/s  capacity {capacity(folder / f'{mode}.log'):>9}"
        drafts = record["counters"].get("spec_decode_num_drafts", 0)
        if drafts:
            kept = record["counters"]["spec_decode_num_accepted_tokens"] / drafts
            line += f"  {1 + kept:.2f} tokens a window"
        median = min(run["median_ms"] for run in record["runs"])
        line += f"  {record['runs'][-1]['steps']} steps, median {median:.2f} ms"
        if reference and mode != "none" and "gaps" in reference:
            for what in ("tokens", "continued"):
                pairs = list(zip(reference[what], record[what], strict=True))
                found = [(i, first_difference(a, b)) for i, (a, b) in enumerate(pairs)]
                differ = [(i, at) for i, at in found if at is not None]
                line += f"  {what}: {batch - len(differ)} of {batch} alike"
                if what == "tokens" and differ:
                    gaps = sorted(reference["gaps"][i][at] for i, at in differ)
                    line += f" (first at {min(at for _, at in differ)}, gaps there {gaps[0]:.3f} to {gaps[-1]:.3f})"
        print(line, flush=True)
        for run, seconds in zip(record["runs"], record["seconds"], strict=True):
            print(
                f"    {seconds:.3f} s  slowest {run['slowest_ms']} ms  compiled {run['compiled']}", flush=True
            )
            print(f"    {run['graphs']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.engine", description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--drafts", type=int, default=7, help="drafts a window, at most 7")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=320, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--acceptance", type=float, default=0.0, help="tokens a window, whatever the drafts are"
    )
    parser.add_argument("--heads", type=int, default=0, help="random weights, this many KDA heads")
    parser.add_argument("--cache-bytes", type=int, default=2 << 30)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="vLLM's async scheduling: a step is prepared while the one before runs, so that the device's time counts",
    )
    parser.add_argument(
        "--profile",
        default="",
        help="modes of which to write where a short run's time goes: MODE.host, MODE.profile",
    )
    parser.add_argument("--after", type=Path, help="measure when this file exists")
    parser.add_argument(
        "--profile-after", type=Path, help="profile when this file exists; OUT/measured is made before"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options, options.child)
    end = time.monotonic() + options.limit
    modes = options.modes.split(",")
    children = {}
    for i, mode in enumerate(modes):
        log = (options.out / f"{mode}.log").open("w")
        environment = {**os.environ, "VLLM_PORT": str(20000 + os.getpid() % 100 * 400 + 40 * i)}
        command = [sys.executable, "-m", "benchmarks.kernels.engine", *sys.argv[1:], "--child", mode]
        children[mode] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait(which: list[str], suffix: str, until: float = end) -> None:
        while time.monotonic() < until:
            waiting = [m for m in which if not (options.out / f"{m}.{suffix}").exists()]
            if not any(children[m].poll() is None for m in waiting):
                return
            time.sleep(0.2)

    try:
        # Who is not ready a good while before the end must not keep the others from measuring.
        wait(modes, "ready", end - 0.35 * options.limit)
        while options.after and not options.after.exists() and time.monotonic() < end:
            time.sleep(0.2)
        for mode in modes:
            (options.out / f"{mode}.go").touch()
            wait([mode], "json")
        report(options.out, modes, options.batch)
        (options.out / "measured").touch()
        while options.profile_after and not options.profile_after.exists() and time.monotonic() < end:
            time.sleep(0.2)
        for mode in [m for m in options.profile.split(",") if m in modes]:
            (options.out / f"{mode}.profile.go").touch()
            wait([mode], "profile")
    finally:
        for process in children.values():
            process.kill()
    for mode in modes:
        if not (options.out / f"{mode}.json").exists():
            print(f"--- {mode}: no result; its last lines", flush=True)
            lines = (options.out / f"{mode}.log").read_text(errors="replace").splitlines()
            print("\n".join(line[:300] for line in lines[-25:]), flush=True)


if __name__ == "__main__":
    main()
