"""Run directories as `train` and `evaluate` leave them, made without training: of any length and in any state."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

import kairostep

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "flip": False},
    "autoencoder": None,
    "cache": "~/.cache/kairostep",
    "network": {"name": "unet", "channels": 8, "multipliers": [1, 2]},
    "process": {"name": "linear", "num_steps": 1000},
    "prediction": "epsilon",
    "weighting": {"name": "constant"},
    "sampler": {"name": "uniform"},
    "steps": 1000,
    "batch_size": 128,
    "learning_rate": 2e-4,
    "output": "runs/x",
    "seed": 0,
    "log_every": 10,
    "held_out_images": 1024,
}
PROVENANCE = {"kairostep": kairostep.__version__, "torch": "2.13.0", "device": "cpu: x86_64", "commit": "abc"}
NUM_BINS = 100
# How fast an arm learns, and how long its step takes
PACE = {"uniform": (1.0, 10e-3), "adaptive": (1.2, 12e-3), "root_loss": (1.4, 10e-3), "min_snr": (0.9, 10e-3)}


def make_run(
    directory: Path,
    sampler: str = "uniform",
    seed: int = 0,
    *,
    steps: int = 1000,
    reach: int | None = None,
    log_every: int = 10,
    density_every: int = 100,
    evaluate_every: int = 100,
    options: dict[str, Any] | None = None,
    weighting: str = "constant",
    **settings: Any,
) -> Path:
    """Write a run that has taken `reach` of its steps, and return its directory."""
    directory.mkdir(parents=True)
    part = {"name": sampler, **({"num_selected": 3, "every": 40} if sampler == "adaptive" else {}), **(options or {})}
    config = {**CONFIG, "sampler": part, "weighting": {"name": weighting}, "seed": seed, "steps": steps, **settings}
    config |= {"output": str(directory), "log_every": log_every}
    (directory / "config.yaml").write_text(yaml.safe_dump({**config, "provenance": PROVENANCE}, sort_keys=False))
    draw = random.Random(f"{sampler}{seed}{part}{weighting}")
    pace, seconds = PACE.get(weighting if weighting in PACE else sampler, (1.0, 10e-3))
    end = 0.05 * (1 + 0.02 * draw.gauss(0, 1))  # where this seed's loss goes
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(log_every, (steps if reach is None else reach) + 1, log_every):
            line = _line(step, steps, pace, seconds, draw, sampler)
            if step % density_every == 0:
                line["density"] = _density(sampler, step / steps)
                if weighting != "constant":
                    line["weights"] = [1 / (0.05 + (i + 0.5) / NUM_BINS) for i in range(NUM_BINS)]
            if step % evaluate_every == 0:
                line["held_out"] = _held_out(step, steps, pace, end, draw)
            file.write(json.dumps(line) + "\n")
    return directory


def _line(step: int, steps: int, pace: float, seconds: float, draw: random.Random, sampler: str) -> dict[str, Any]:
    loss = 0.05 + 0.95 * math.exp(-8 * pace * step / steps)
    noisy = [loss * scale * math.exp(0.05 * draw.gauss(0, 1)) for scale in (3.0, 1.0, 0.5, 0.3)]
    probes = 640 * (step // 40) if sampler == "adaptive" else 0
    diagnostics: dict[str, float] = {}
    if sampler == "root_loss":
        ratio = 1 - 0.45 * min(1.0, 4 * step / steps) + 0.01 * math.sin(step)
        diagnostics = {"noise_ratio": ratio, "equivalent_batch": 128 / ratio, "gate": 1, "skipped_losses": 0}
    if sampler == "adaptive":
        share = step / steps
        diagnostics = {
            "a_mean": 1 - 0.4 * share + 0.01 * draw.gauss(0, 1),
            "a_std": 0.02,
            "b_mean": 1 + 0.8 * share + 0.01 * draw.gauss(0, 1),
            "b_std": 0.03,
            "entropy": -0.3 * share,
            "reward_mean": 1e-3 * draw.gauss(0, 1),
            "reward_std": 1e-4,
            "skipped_rewards": 0,
            "probe_evaluations": probes,
            **{f"selected_t_{i}": draw.random() ** 2 for i in range(3)},
        }
    return {
        "step": step,
        "images": step * 128,
        "seconds": step * seconds,
        "training_evaluations": step * 128,
        "probe_evaluations": probes,
        "loss": sum(noisy) / 4,
        "loss_quartiles": noisy,
        "learning_rate": 2e-4 * min(1.0, step / 100),
        "sampler": diagnostics,
    }


def _density(sampler: str, share: float) -> list[float]:
    power = {"adaptive": 2.0 * share, "root_loss": 0.7 * share}.get(sampler, 0.0)
    raw = [(1.02 - (i + 0.5) / NUM_BINS) ** power for i in range(NUM_BINS)]
    return [mass / sum(raw) for mass in raw]


def _held_out(step: int, steps: int, pace: float, end: float, draw: random.Random) -> dict[str, float]:
    loss = end + 0.95 * math.exp(-8 * pace * step / steps) * math.exp(0.01 * draw.gauss(0, 1))
    return {
        "loss": loss,
        "loss_error": 0.01 * loss,
        "vlb": 0.02 * loss,
        "vlb_error": 1e-3 * loss,
        "num_evaluations": 1024,
    }


def add_grids(directory: Path, steps: list[int], size: int = 64, noisy: bool = False) -> None:
    """Write pictures of samples."""
    (directory / "samples").mkdir()
    for step in steps:
        image = Image.effect_noise((size, size), 60 if noisy else 10 + step % 40)
        image.save(directory / "samples" / f"step-{step:08d}.png")


def add_evaluations(directory: Path, checkpoint: int, level: float = 1.0) -> None:
    """Append what `evaluate` found of a checkpoint."""
    common = {"n": 1024, "checkpoint": checkpoint, "weights": "ema", "on": "held-out data", "kairostep": "0.1.0"}
    lines: list[dict[str, Any]] = [
        {"what": "vlb_bits_per_dim", "value": 3.2 * level, "standard_error": 0.02, **common},
        {"what": "fid", "value": 12.5 * level, "standard_error": 0.4, **common},
        {"what": "kid", "value": 0.004 * level, "standard_error": 0.0005, **common},
    ]
    for i in range(20):
        t = [i / 20, (i + 1) / 20]
        error = level * (0.02 + 0.8 * math.exp(-5 * t[0]))
        lines.append({"what": "epsilon_mse_at", "value": error, "standard_error": 0.01 * error, "t": t, **common})
    with (directory / "evaluations.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
