"""Silva on Modal: train, evaluate and serve in GPU containers that share a volume of runs.

    modal secret create silva SILVA_API_KEY=...
    modal run examples/modal/app.py::train --config examples/countdown/countdown_gpu.toml
    modal run examples/modal/app.py::evaluate --name countdown_gpu
    SILVA_RUN=countdown_gpu modal deploy examples/modal/app.py

A run that Modal stops or that fails is started again, and goes on after its last checkpoint.
"""

import os
import subprocess
from pathlib import Path

import modal

IN_IMAGE, RUNS = "/silva", "/runs"
REPOSITORY = Path(__file__).parents[2] if modal.is_local() else Path(IN_IMAGE)
SENT = ["src", "configs", "examples", "benchmarks/environments", "pyproject.toml", "README.md", "LICENSE"]

app = modal.App("silva")
runs = modal.Volume.from_name("silva-runs", create_if_missing=True)
image = modal.Image.debian_slim(python_version="3.12")
for path in SENT:
    if (REPOSITORY / path).is_dir():
        image = image.add_local_dir(REPOSITORY / path, f"{IN_IMAGE}/{path}", copy=True)
    elif (REPOSITORY / path).is_file():
        image = image.add_local_file(REPOSITORY / path, f"{IN_IMAGE}/{path}", copy=True)
image = image.run_commands(f"pip install '{IN_IMAGE}[hub]'").workdir(IN_IMAGE)
image = image.env({"SILVA_RUN": os.environ.get("SILVA_RUN", "")})


@app.function(image=image, gpu="H100", volumes={RUNS: runs}, timeout=24 * 3600, retries=3)
def train(config: str) -> None:
    """Train what a file of this repository says; `--resume` begins where no run is yet."""
    try:
        subprocess.run(["silva", "rl", f"@{config}", "--output-dir", RUNS, "--resume"], check=True)
    finally:
        runs.commit()


@app.function(image=image, gpu="H100", volumes={RUNS: runs}, timeout=4 * 3600)
def evaluate(name: str) -> None:
    """Evaluate a run's last weights on its held-out tasks."""
    try:
        subprocess.run(["silva", "eval", "--weights", f"{RUNS}/{name}"], cwd=RUNS, check=True)
    finally:
        runs.commit()


@app.function(image=image, gpu="H100", volumes={RUNS: runs}, secrets=[modal.Secret.from_name("silva")])
@modal.concurrent(max_inputs=64)
@modal.web_server(8000, startup_timeout=600)
def serve() -> None:
    """Serve the run `SILVA_RUN` under OpenAI's API; requests need the key of the secret."""
    weights = f"{RUNS}/{os.environ['SILVA_RUN']}"
    subprocess.Popen(["silva", "inference", "--weights", weights, "--host", "0.0.0.0", "--port", "8000"])
