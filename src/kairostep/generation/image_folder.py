"""Writes many images into a folder: in batches, by one process or several, and resumable."""

import signal
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from accelerate import PartialState
from torch import Tensor

from kairostep.checks import choice, count, nonnegative
from kairostep.experiments.experiment import trained_classes
from kairostep.generation.generate import generate
from kairostep.generation.grid import to_bytes
from kairostep.generation.image_files import FORMATS, GeneratedFiles
from kairostep.generation.noise import NoiseOfImages, noise_of_images
from kairostep.generation.record import check_record, write_record
from kairostep.generation.solvers import network_evaluations, steps_of
from kairostep.progress_meter import ProgressMeter
from kairostep.runs.trained import Trained
from kairostep.shares import WHOLE, Share
from kairostep.stopping import has_launcher, repeats, stopping_signals

DECODED_ROWS = 32  # samples that an autoencoder decodes at once: images are much larger than latents


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which images to make. Image i depends on the seed and other settings, but not on `num` or `batch_size`."""

    num: int = 50_000
    solver: str = "ddim"
    steps: int | None = None  # the solver's default
    seed: int = 0
    guidance: float = 1.0
    classes: tuple[int, ...] = ()  # in turn; none: all that the model was trained on
    precision: str = "fp32"
    format: str = "png"
    batch_size: int = 256  # per process

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        count("num", self.num, at_most=10**7, example=64)
        count("batch_size", self.batch_size, at_most=10**6, example=64)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number in [0, 2**63), got {self.seed}: pass for instance --seed 0")
        nonnegative("guidance", self.guidance, example=1.5)
        choice("precision", self.precision, ("fp32", "bf16"))
        choice("format", self.format, FORMATS)

    def classes_for(self, trained: Trained) -> tuple[int, ...]:
        """Return the classes in turn for a model, none if it has none. Raise ValueError if it cannot make them."""
        known = trained_classes(trained.config, trained.num_classes)
        wrong = [label for label in self.classes if label not in known]
        if not known and (wrong or self.guidance != 1):
            what = f"classes {self.classes}" if wrong else f"guidance {self.guidance}"
            raise ValueError(
                f"classes and guidance need a model with classes, got {what} for one without: leave them out, "
                "or train with --label_dropout=0.1"
            )
        if wrong:
            all_of_them = len(known) == trained.num_classes
            there = f"in 0..{len(known) - 1}" if all_of_them else f"among those trained, {', '.join(map(str, known))}"
            raise ValueError(f"classes must be {there}, got {wrong[0]}: leave out what is not there")
        if self.guidance != 1 and trained.config.label_dropout == 0:
            raise ValueError(
                f"guidance needs a model that was trained without labels too, got guidance {self.guidance} for one of "
                "--label_dropout=0: leave it out, or train with --label_dropout=0.1"
            )
        return self.classes or known


def describe(trained: Trained, request: Request) -> dict[str, Any]:
    """Return the record of these images; ValueError if the model cannot make them."""
    steps = steps_of(trained.process, request.solver, request.steps)
    return {
        "run": str(trained.checkpoint.parents[1]),
        "checkpoint": trained.checkpoint.name,
        "step": trained.step,
        "weights": trained.weights,
        "digest": trained.digest,
        "solver": request.solver,
        "steps": steps,
        "network_evaluations": network_evaluations(request.solver, steps, request.guidance),
        "seed": request.seed,
        "guidance": request.guidance,
        "classes": list(request.classes_for(trained)),
        "precision": request.precision,
        "format": request.format,
        "num": request.num,
        "complete": False,
    }


def default_folder(trained: Trained, request: Request) -> Path:
    """Return RUN/generated/ and a name made of the settings, with unusual ones at the end."""
    steps = steps_of(trained.process, request.solver, request.steps)
    parts = [request.solver, str(steps), f"seed{request.seed}", f"step{trained.step}"]
    parts += ["model"] if trained.weights == "model" else []
    parts += [f"guidance{request.guidance:g}"] if request.guidance != 1 else []
    parts += [f"classes{'_'.join(map(str, request.classes))}"] if request.classes else []
    parts += [request.precision] if request.precision != "fp32" else []
    parts += [request.format] if request.format != "png" else []
    return trained.checkpoint.parents[1] / "generated" / "-".join(parts)


def generate_images(
    trained: Trained,
    request: Request,
    folder: Path,
    state: PartialState,
    lock: Callable[[Path], AbstractContextManager[Any]] = nullcontext,  # on the folder, while images are written
    before: Callable[[int], None] = lambda num_missing: None,  # is told how many will be made
) -> int:
    """Make the images that are missing in a folder and return how many; all processes call it."""
    record = describe(trained, request)
    there = check_record(folder, record)
    record["num_complete"] = there.get("num" if there.get("complete") else "num_complete", 0)
    state.wait_for_everyone()  # all have checked what is there before it is written anew
    files = FORMATS[request.format](folder, request.num)
    if state.is_main_process:
        write_record(folder, record)
    share = Share(state.process_index, state.num_processes)
    missing = share.from_first(array("q", files.missing() if share.is_first else ()))  # one list for all processes
    before(len(missing))
    with lock(folder) if state.is_main_process else nullcontext():
        make_missing(trained, request, files, missing, state.device, share)
        state.wait_for_everyone()
        if state.is_main_process:
            files.finish(record["classes"])
            write_record(folder, {**record, "num_complete": request.num, "complete": True})
    state.wait_for_everyone()
    return len(missing)


def num_there(request: Request, folder: Path) -> int:
    """Return how many of the images are in the folder."""
    return request.num - sum(1 for _ in FORMATS[request.format](folder, request.num).missing())


def make_missing(
    trained: Trained,
    request: Request,
    files: GeneratedFiles,
    missing: Sequence[int],
    device: torch.device,
    share: Share = WHOLE,
) -> None:
    """Make this process's share of the images that are missing. Batches are smaller where some would have none."""
    done = request.num - len(missing)
    meter = ProgressMeter(request.num, "making", unit="image", done=done, shown=share.is_first)
    steps = steps_of(trained.process, request.solver, request.steps)
    each = share.num_processes / network_evaluations(request.solver, steps, request.guidance)  # of an image, per row
    batch_size = max(1, min(request.batch_size, -(-len(missing) // share.num_processes)))
    with meter, meter.watching(trained.model, lambda num: num * each), Writer(files) as writer:
        for rows in share.batches(len(missing), batch_size):
            writer.put(make_batch(trained, request, list(missing[rows.start : rows.stop]), device))


@dataclass(frozen=True)
class PendingImages:
    """Images that the device may still be computing."""

    images: list[int]
    pixels: Tensor  # (B, H, W, C) uint8
    finite: Tensor  # () bool


def make_batch(trained: Trained, request: Request, images: list[int], device: torch.device) -> PendingImages:
    """Return the images of these numbers."""
    numbers = torch.tensor(images).to(device, non_blocking=True)  # the batch before may still be in the making
    layout = torch.channels_last if device.type == "cuda" and len(trained.shape) == 3 else torch.contiguous_format
    classes = request.classes_for(trained)
    labels = (
        torch.tensor([classes[image % len(classes)] for image in images]).to(device, non_blocking=True)
        if classes
        else None
    )

    added = NoiseOfImages(request.seed, numbers, trained.shape)
    with torch.autocast(device.type, torch.bfloat16) if request.precision == "bf16" else nullcontext():
        samples = generate(
            trained.model,
            trained.process,
            trained.prediction,
            noise_of_images(request.seed, numbers, 0, trained.shape).contiguous(memory_format=layout),
            solver=request.solver,
            steps=request.steps,
            clip=trained.clip,
            labels=labels,
            guidance=request.guidance,
            null_label=trained.num_classes,
            step_noise=lambda step: added(step).contiguous(memory_format=layout),
        )
    pixels = torch.cat([to_bytes(trained.to_pixels(part)) for part in torch.split(samples, DECODED_ROWS)])
    return PendingImages(images, pixels.permute(0, 2, 3, 1), samples.isfinite().all())


class Writer:
    """Writes a batch in a thread while the next one is made. At the end of the block everything is written."""

    def __init__(self, files: GeneratedFiles) -> None:
        self.files = files
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def put(self, batch: PendingImages) -> None:
        """Pass on a batch, once the one before is on disk."""
        pixels, finite = (tensor.to("cpu", non_blocking=True) for tensor in (batch.pixels, batch.finite))
        copied = torch.Event(batch.pixels.device) if batch.pixels.is_cuda else None
        if copied is not None:
            copied.record()
        if self.pending is not None:
            self.pending.result()
        self.pending = self.thread.submit(self._write, PendingImages(batch.images, pixels, finite), copied)

    def _write(self, batch: PendingImages, copied: torch.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        if not batch.finite:
            raise ValueError(
                f"samples must be finite, got others in images {batch.images[0]} to {batch.images[-1]}: "
                "choose another --checkpoint, less --guidance, or --precision fp32"
            )
        self.files.write(batch.images, batch.pixels.contiguous().numpy())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.shutdown()  # also after a signal: what was made is written
        if kind is None and self.pending is not None:
            self.pending.result()


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP in a block into `Interrupted`; a second one acts as it did before.

    Under a launcher the same signal does nothing from then on: it may be the launcher's copy, and this process ends.
    """
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    ignored: set[int] = set()

    def restore() -> None:
        for number, handler in before.items():
            if number not in ignored:
                signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        if repeats(number):
            ignored.add(number)
            signal.signal(number, signal.SIG_IGN)
        restore()
        raise Interrupted(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        if not has_launcher():
            ignored.clear()  # those of a lost terminal
        restore()
