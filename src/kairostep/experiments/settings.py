"""The settings of one experiment, as data; `config` reads and writes them. Imports nothing but torch."""

from dataclasses import dataclass, field, fields
from typing import Any

from kairostep.checks import LARGEST, below_one, choice, count, nonnegative, positive

AUTO = "auto"  # value of label_dropout: use the classes of a folder of images if it has any


@dataclass(frozen=True)
class Component:
    """A named part and its options. In YAML: a name, or a mapping with `name` and the options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def setting(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and the line that `kairostep train --help` shows for it."""
    if isinstance(default, Component):
        return field(default_factory=lambda: default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def whole(default: int, text: str, *, at_least: int = 1, at_most: int = LARGEST, example: int = 0) -> Any:
    """Return a setting that is a whole number, with the bounds and the example that `checks.count` takes."""
    bounds = {"at_least": at_least, "at_most": at_most, "example": example}
    return field(default=default, metadata={"help": text, "bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment. On the command line each setting is `--key=value`."""

    data: Component = setting(Component("digits"), "data set; its options as --data.option=value")
    autoencoder: str | None = setting(None, "folder of a diffusers AutoencoderKL or VQModel: train on its latents")
    cache: str = setting("~/.cache/kairostep", "where latents are kept")
    network: Component = setting(Component("unet"), "backbone; its options as --network.option=value")
    initial_weights: str | None = setting(
        None, "begin with the weights of this run, diffusers folder or safetensors file: fine-tuning"
    )
    process: Component = setting(Component("linear"), "noising process or schedule")
    prediction: str | None = setting(None, "epsilon, x0, v, velocity or edm; by default what the process is used with")
    weighting: Component = setting(Component("constant"), "factor on the loss: what is optimised")
    sampler: Component = setting(Component("root_loss"), "timestep sampler: where compute goes")
    pairs: bool = setting(False, "at low noise, train pairs of neighbours in t on one image and opposite noise")
    stable_target: int = whole(
        0, "targets averaged over so many random images, by how likely they are; 0: off", at_least=0
    )

    steps: int = whole(10_000, "optimizer steps", example=1000)
    batch_size: int = whole(
        128, "images per optimizer step, over all processes and accumulated batches", at_most=10**6, example=64
    )
    accumulate: int = whole(1, "batches whose gradients are summed in one optimizer step")
    optimizer: str = setting("adam", "adam or adamw")
    learning_rate: float = setting(2e-4, "of the optimizer, after warm-up")
    schedule: str = setting("constant", "constant or cosine (down to 0), after warm-up")
    warmup_steps: int = whole(
        0, "steps in which the learning rate rises linearly to its value", at_least=0, example=100
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "of the optimizer")
    weight_decay: float = setting(0.0, "of the optimizer")
    max_grad_norm: float | None = setting(1.0, "gradients are clipped to this norm; null: not clipped")
    ema_decay: float = setting(0.9999, "of the averaged weights, at most (1 + n) / (10 + n) after n steps")
    label_dropout: float | str | None = setting(
        None, "train with classes, this share of labels hidden; null: no classes; auto: 0.1 if a folder has classes"
    )

    precision: str = setting("fp32", "fp32, bf16 or fp16")
    speed: str = setting("auto", "plain, graph (replay CUDA graphs), compile (the network first), auto: what pays")
    deterministic: bool = setting(False, "same bits on every GPU run, slower; a CPU always gives them")
    workers: int = whole(4, "processes that read data sets too large for memory", at_least=0, example=4)

    rank_timeout: int = whole(
        60,
        "seconds after which a process that is silent counts as lost, and the others end; 0: no watch",
        at_least=0,
        at_most=86_400,
        example=60,
    )

    output: str | None = setting(None, "run directory; by default runs/ and the preset with what was changed")
    seed: int = whole(0, "a step is a function of seed, process and step number", at_least=0, at_most=2**63 - 1)
    resume: bool = setting(True, "go on from the last checkpoint in the run directory")
    log_every: int = whole(100, "steps between lines in metrics.jsonl", example=100)
    density_every: int = whole(1000, "steps between records of the sampler's density", example=1000)
    evaluate_every: int = whole(1000, "steps between held-out losses", example=1000)
    held_out_images: int = whole(1024, "images of the held-out loss, 0: none", at_least=0, example=1024)
    sample_every: int = whole(5000, "steps between grids of generated images, 0: at the end only", at_least=0)
    sample_steps: int = whole(50, "network evaluations per generated image in a grid", at_most=10**6, example=50)
    fid_every: int = whole(
        0, "steps between FID, KID, precision and recall of generated images, 0: none", at_least=0, example=5000
    )
    fid_images: int = whole(
        5000,
        "images generated for each of them, in sample_steps evaluations each",
        at_least=2,
        at_most=10**7,
        example=5000,
    )
    inception: str | None = setting(None, "file of the network that FID is defined on, as in `kairostep evaluate`")
    inception_sha256: str | None = setting(None, "of another network than that")
    features: str | None = setting(None, "MODULE:FUNCTION that gives the features of images, instead of Inception")
    checkpoint_every: int = whole(1000, "steps between checkpoints", example=1000)
    keep_checkpoints: int = whole(2, "last checkpoints that are kept, besides the best", example=2)
    keep_every: int = whole(0, "steps between checkpoints that are never removed, 0: none", at_least=0, example=10_000)
    trackers: tuple[str, ...] = setting((), "also log to tensorboard, wandb, ...: any tracker of accelerate")

    def __post_init__(self) -> None:
        """Check the values that can be checked without building anything."""
        for own in fields(self):
            if "bounds" in own.metadata:
                count(own.name, getattr(self, own.name), **own.metadata["bounds"])
        if self.features and (self.inception or self.inception_sha256):
            raise ValueError("features must come from one network, got --features and --inception: pass one of them")
        positive("learning_rate", self.learning_rate, example=2e-4)
        nonnegative("weight_decay", self.weight_decay)
        for beta in self.betas:
            below_one("betas", beta)
        if self.max_grad_norm is not None:
            positive("max_grad_norm", self.max_grad_norm)
        below_one("ema_decay", self.ema_decay, example=0.9999)
        if isinstance(self.label_dropout, str) and self.label_dropout != AUTO:
            raise ValueError(
                f"label_dropout must be a share in [0, 1), null or auto, got {self.label_dropout!r}: "
                "pass for instance --label_dropout=0.1"
            )
        if isinstance(self.label_dropout, float | int):
            below_one("label_dropout", self.label_dropout, example=0.1)
        choice("speed", self.speed, ("auto", "plain", "graph", "compile"))
        choice("optimizer", self.optimizer, ("adam", "adamw"))
        choice("schedule", self.schedule, ("constant", "cosine"))
        choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of accumulate, got {self.batch_size} and {self.accumulate}: "
                f"pass for instance --batch_size={self.accumulate * max(1, self.batch_size // self.accumulate)}"
            )
