"""Would draws that depend on the image as well as on t have less gradient noise? Measured at a checkpoint of a run.

    kairostep train cifar10-small --data.path=cifar10.npz --learning_rate=16e-4 --steps=3000 --output run
    python benchmarks/samplers/row_importance.py run

For images i, bins k of t and several noises, m_ik is the second moment of a single row's gradient over the noise. The
least noise over t is (mean_k sqrt(mean_i m_ik))**2, over images and t (mean_ik sqrt(m_ik))**2, both over uniform's,
mean_ik m_ik. With few noises the root of the estimate is too small, which flatters draws by image. So there are two
figures: one from all noises, at or below the truth, and one in which half of the noises choose the draws and the other
half measures them, which is above the truth.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from kairostep.analysis import Rows
from kairostep.analysis.step_noise import METRICS
from kairostep.commands.checkpoint_analyses import optimizer_of
from kairostep.experiments.experiment import load_data
from kairostep.runs import load_trained
from kairostep.runs.checkpoint import read
from kairostep.timesteps.gradient_size import squared_size, trained_parameters
from kairostep.timesteps.probes import eval_mode


def measure(run: Path, num_bins: int, num_images: int, num_noises: int, seed: int) -> dict[str, Tensor]:
    """Return the squared size of single-row gradients in each metric, (bins, images, noises), and the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained(run, "last", "model", device)
    trained.model.requires_grad_()
    train, _ = load_data(trained.config, device)
    rows = Rows.of(train, num_images, device, classes=trained.config.label_dropout is not None)
    state = read(trained.checkpoint)["trainer"]["optimizer"]
    optimizer = optimizer_of(trained.config, state, list(trained.model.parameters()))
    parameters = trained_parameters(optimizer)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in (*METRICS, "loss")}
    with eval_mode(trained.model), torch.enable_grad():
        for bin_ in range(num_bins):
            for image in range(num_images):
                for _ in range(num_noises):
                    noise = torch.randn(rows.x0[:1].shape, generator=generator).to(rows.x0)
                    t = (bin_ + torch.rand(1, generator=generator).to(rows.x0)) / num_bins
                    one = torch.tensor([image], device=device)
                    loss = trained.objective(trained.model, rows.x0[one], t, noise=noise, **rows.cond(one)).sum()
                    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                    for metric in METRICS:
                        found[metric].append(squared_size(gradients, optimizer, metric))
                    found["loss"].append(loss.detach())
    shape = (num_bins, num_images, num_noises)
    return {name: torch.stack(values).double().cpu().view(shape) for name, values in found.items()}


def ratios(squared: Tensor) -> dict[str, float]:
    """Return the least noise over t and over images and t, over that of uniform draws; squared (K, I, J)."""
    moments = squared.mean(2)  # (K, I)
    first, second = (half.mean(2) for half in squared.chunk(2, 2))  # (K, I) each

    def chosen_by(own: Tensor, other: Tensor) -> float:
        root = own.sqrt()
        return float((other / root).mean() * root.mean() / squared.mean())

    return {
        "over t": float(moments.mean(1).sqrt().mean() ** 2 / squared.mean()),
        "over images and t, at least": float(moments.sqrt().mean() ** 2 / squared.mean()),
        "over images and t, at most": (chosen_by(first, second) + chosen_by(second, first)) / 2,
    }


def spread_between_images(losses: Tensor) -> float:
    """Return the coefficient of variation of an image's mean loss within a bin, noise taken out; losses (K, I, J)."""
    of_images = losses.mean(2)
    variance = of_images.var(1) - losses.var(2).mean(1) / losses.shape[2]
    return float((variance.clamp(min=0).sqrt() / of_images.mean(1)).mean())


def main() -> None:
    """Measure a run and print the ratios, as JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bins", type=int, default=10)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--noises", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    measured = measure(given.run, given.bins, given.images, given.noises, given.seed)
    result = {metric: ratios(measured[metric]) for metric in METRICS}
    for metric, found in result.items():
        print(f"{metric:6} " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()))
    spread = spread_between_images(measured["loss"])
    print(f"loss of images varies by {spread:.3f}")
    print(json.dumps({"ratios": result, "spread of loss": spread, "sizes": vars(given) | {"run": given.run.name}}))


if __name__ == "__main__":
    main()
