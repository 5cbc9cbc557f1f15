"""Does this tree train as another commit did, bit for bit? What a refactoring has to show before it lands.

    python benchmarks/same_numbers.py COMMIT [--steps 100] [--only root_loss flow ...]

Trains the digits preset on the CPU with every sampler, and with other processes, predictions and weightings, with two
seeds, in this tree and in a copy of the other commit, through the command line of each. Compares the loss of every step
and the averaged weights at the end. Exits with 1 where something differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CASES: dict[str, tuple[str, ...]] = {
    **{
        name: (f"--sampler={name}",)
        for name in (
            *("uniform", "logit_normal", "mode", "log_normal_sigma", "laplace", "speed", "loss_second_moment"),
            *("root_loss", "infonoise", "least_noise", "gradient_variance", "adaptive"),
        )
    },
    "beta": ("--sampler=beta", "--sampler.a=2.0", "--sampler.b=1.5"),
    "tabulated": ("--sampler=tabulated", "--sampler.mass=[1,2,1]"),
    "speed-v1": ("--sampler=speed", "--sampler.version=v1"),
    "adaptive-published": ("--sampler=adaptive", "--sampler.as_published=true"),
    "adaptive-pair": ("--sampler=adaptive", "--sampler.policy=pair", "--sampler.reward=loss"),
    "curriculum": ("--sampler=curriculum", "--sampler.start=20", "--sampler.end=60"),
    "flow": ("--process=flow", "--sampler=logit_normal"),
    "edm": ("--process=edm", "--sampler=log_normal_sigma", "--weighting=edm"),
    "v": ("--process=cosine", "--prediction=v", "--sampler=root_loss"),
    "min_snr": ("--weighting=min_snr", "--sampler=root_loss"),
    "accumulated": ("--accumulate=2", "--sampler=root_loss"),
    "pairs": ("--pairs=true", "--sampler=root_loss", "--stable_target=64"),
}
SEEDS = (0, 1)


def train_all(cases: list[str], steps: int) -> dict[str, str]:
    """Return for each case and seed a digest of its losses and weights, or what went wrong."""
    from kairostep.cli import main

    found = {}
    for case in cases:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                settings = [f"--steps={steps}", "--log_every=1", f"--seed={seed}", f"--output={folder}/run"]
                settings += [f"--{name}_every={steps}" for name in ("evaluate", "checkpoint", "density")]
                try:
                    main(["train", "digits", *CASES[case], *settings, "--sample_every=0", "--sample_steps=1"])
                    found[f"{case}, seed {seed}"] = digest(Path(folder) / "run")
                except SystemExit as error:
                    found[f"{case}, seed {seed}"] = f"failed: {error.code}"
    return found


def digest(run: Path) -> str:
    """Return a digest of the loss of every step and of the weights in the exported model."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = hashlib.sha256(repr([line["loss"] for line in lines if "loss" in line]).encode())
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((run / "model").rglob("*.safetensors"))))
    return f"losses {losses.hexdigest()[:12]}, weights {weights.hexdigest()[:12]}"


def digests_of(tree: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the digests of the code in a tree, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        command = [sys.executable, __file__, "--write", out, "--steps", arguments.steps, "--only", *arguments.only]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        subprocess.run([str(part) for part in command], env=environment, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, str] = json.loads(out.read_text())
        return found


def main() -> None:
    """Compare this tree with a commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(json.dumps(train_all(arguments.only, arguments.steps)))
        return
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tree"
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(there), arguments.commit], check=True)
        try:
            before, now = digests_of(there, arguments), digests_of(here, arguments)
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
    different = [name for name in before if before[name] != now[name] or now[name].startswith("failed")]
    for name in before:
        print(f"{name}: {'differs' if name in different else 'the same'} ({before[name]} | {now[name]})")
    print(f"{len(before) - len(different)} of {len(before)} the same as {arguments.commit}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
