"""Counts the bytes of a training step: those of each parameter, and those that an image leaves for the backward pass.

`python benchmarks/speed/memory.py --output results/memory/cpu.json`. It needs no GPU: a step on the CPU shows which
tensors the trainer keeps, and networks of any size run with tensors that have a shape and no content.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from kairostep.data import Batch
from kairostep.diffusion import EPSILON, DiscreteProcess, Objective
from kairostep.diffusion.conditions import class_condition
from kairostep.experiments import preset
from kairostep.experiments.parts import make_network
from kairostep.experiments.settings import Config
from kairostep.networks import ddpm_unet
from kairostep.timesteps import Uniform
from kairostep.training import Trainer

SHAPES = {  # preset -> channels and side of a sample, classes
    "cifar10-small": (3, 32, None),
    "cifar10-ddpm": (3, 32, None),
    "imagenet-dit": (4, 32, 1000),
    "imagenet-uvit": (4, 32, 1000),
}
BATCHES = (2, 4)  # the difference is what two images need


def bytes_of(tensors: Any) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_per_parameter() -> dict[str, float]:
    """Return the bytes that the trainer keeps for a parameter when the optimizer steps."""
    model = ddpm_unet(8, 1, channels=32, multipliers=(1, 2), blocks=1, attention=(4,), dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(model, Objective(DiscreteProcess.linear(), EPSILON), Uniform(), optimizer)
    found: dict[str, float] = {}
    num = sum(parameter.numel() for parameter in model.parameters())

    def count(*_: Any) -> None:
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        parts = {
            "weights": model.parameters(),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "moments of Adam": moments,
            "averaged weights": trainer.ema.model.parameters(),
        }
        found.update({name: bytes_of(tensors) / num for name, tensors in parts.items()})

    optimizer.register_step_pre_hook(count)
    for _ in range(2):  # the moments are there from the second step on
        trainer.step([Batch(torch.zeros(4, 1, 8, 8), None)])
    return found


def saved_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, besides the parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in weights}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return size


def count_network(config: Config, channels: int, side: int, num_classes: int | None) -> dict[str, float]:
    """Return the parameters, and the bytes kept for the backward pass in bf16: of each image, and of copied weights."""
    sizes = []
    with torch.device("meta"):
        model = make_network(config.network, side, channels, num_classes)
    with FakeTensorMode():
        weights = {name: torch.empty(value.shape, requires_grad=True) for name, value in model.named_parameters()}
        buffers = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in model.named_buffers()}
        for batch in BATCHES:
            x, time = torch.zeros(batch, channels, side, side), torch.zeros(batch)
            labels = torch.zeros(batch, dtype=torch.int64) if num_classes else None

            def run(x: Tensor = x, time: Tensor = time, labels: Tensor | None = labels) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    returned = functional_call(model, weights | buffers, (x, time), class_condition(labels))
                output = getattr(returned, "sample", returned)
                return output.float().square().mean()

            sizes.append(saved_bytes(run, weights.values()))
    num = sum(parameter.numel() for parameter in model.parameters())
    image = (sizes[1] - sizes[0]) / (BATCHES[1] - BATCHES[0])
    copies = (sizes[0] - BATCHES[0] * image) / num
    return {"parameters": num, "bytes per image": image, "bytes per parameter of copies": round(copies, 2)}


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    found: dict[str, Any] = {"torch": torch.__version__, "bytes per parameter": bytes_per_parameter(), "networks": {}}
    for name, sizes in SHAPES.items():
        found["networks"][name] = count_network(preset(name), *sizes)
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if output is not None:
        output.write_text(text)


if __name__ == "__main__":
    main()
