"""`kairostep analyse noise`: the gradient noise of a run under each choice of t."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kairostep.analysis import GradientNoise, NoiseRatio, gradient_noise
from kairostep.analysis.noise_ratios import FEWEST_ROWS, MAX_PARTS, LeastRatio
from kairostep.analysis.panels import noise_panels
from kairostep.analysis.step_noise import METRICS
from kairostep.analysis.table import moments_table, noise_table
from kairostep.checks import count
from kairostep.commands.checkpoint_analyses import NUM_ROWS, Study, optimizer_of
from kairostep.commands.output import check_output
from kairostep.commands.run_or_preset import Train
from kairostep.diffusion import StableTarget
from kairostep.experiments import Component
from kairostep.experiments.experiment import read_reference
from kairostep.experiments.parts import make_sampler, sampler_context
from kairostep.progress_meter import ProgressMeter
from kairostep.registry import samplers
from kairostep.runs import RunHistory, Trained
from kairostep.runs.checkpoint import read
from kairostep.seed_statistics import student_quantile
from kairostep.timesteps.gradient_size import Metric
from kairostep.timesteps.histogram import rebin
from kairostep.timesteps.sampler import TimestepSampler

DECIDING: Metric = "adam"  # metric of the verdict and of the least-noise densities


def analyse_noise(known: argparse.Namespace, settings: Sequence[str], train: Train) -> None:
    """Measure single-row gradients at a checkpoint, and print the noise ratio of each density."""
    check_output(known.output)
    sizes = {
        "num_bins": count("bins", known.bins),
        "rows_per_bin": count("rows", known.rows, at_least=2, at_most=10**6, example=16),
    }
    count("measure_seed", known.measure_seed, at_least=0, at_most=2**63 - 1)
    study = Study.of(known, settings, train)
    (step,) = study.steps()
    trained, rows = study.load(step), study.rows(study.train, NUM_ROWS)
    if study.config.stable_target:
        reference = read_reference(study.config, study.train).to(study.device)
        trained.objective.target = StableTarget(reference, study.config.stable_target)
    state = read(trained.checkpoint)["trainer"]["optimizer"]
    optimizer = optimizer_of(study.config, state, list(trained.model.parameters()))
    meter = ProgressMeter(known.bins * known.rows, f"gradients at step {step}", unit="row")
    given: dict[str, Any] = {**sizes, "seed": known.measure_seed, "progress": meter.update}
    with meter:
        noise = gradient_noise(trained.model, trained.objective, rows, optimizer, **given)
    densities = noise.densities(known_densities(study, trained, step, known.bins), DECIDING)
    print(f"{study.heading}, step {step}, {known.rows} rows in each of {known.bins} bins of t\n")
    print(moments_table(noise))
    print(
        "\ngradient noise of a step over that of uniform draws, weights being 1/density; ± standard error over rows\n"
    )
    ratios = {metric: noise.ratios(densities, metric, least_in=DECIDING) for metric in METRICS}
    print(noise_table(noise, densities, ratios, study.config.batch_size))
    print(f"\n{left_out(densities)}\n{about_least(noise.least_ratio(DECIDING, least_in=DECIDING))}")
    verdict = noise_verdict(noise, study.config.batch_size, type(optimizer).__name__)
    print(f"\n{verdict}")
    result = {"verdict": verdict, **as_data(noise, densities, ratios, step, study.config.batch_size)}
    how = "Left: squared size of a single row's gradient over t, relative to its mean. Right: where draws go."
    study.write("noise", {**sizes, "rows": len(rows.x0)}, result, how, noise_panels(noise, densities))


def known_densities(study: Study, trained: Trained, step: int, num_bins: int) -> dict[str, Tensor]:
    """Return the densities to compare, (num_bins,) each: uniform, the run's own at this step, and the fixed ones."""
    found = {"uniform": torch.ones(num_bins, dtype=torch.float64)}
    recorded = RunHistory.read(study.directory).metrics.histograms.get("density")
    rows = [row for at, row in zip(recorded.steps, recorded.rows, strict=True) if at <= step] if recorded else []
    own = study.config.sampler.name
    if rows and own != "uniform":
        found[f"{own} of the run"] = rebin(torch.tensor(list(rows[-1]), dtype=torch.float64), num_bins)
    context = sampler_context(study.config, trained.objective, trained.model, tuple(study.train.shape))
    for name in samplers:
        if why_left_out(name) is None:
            found[name] = make_sampler(Component(name, {"unbiased": True}), context).density(num_bins).double()
    return found


def why_left_out(name: str) -> str | None:
    """Return why a sampler's density is not compared, None if it is."""
    options = samplers.options_of(name)
    if any(option.required for option in options.values()):
        return "options without a default"
    if samplers.find(name).observe is not TimestepSampler.observe:
        return "no density of their own before they have learned"
    return None if "unbiased" in options else "a density that changes the objective"


def left_out(shown: Iterable[str]) -> str:
    """Return one sentence on the samplers that no shown density, by name, belongs to."""
    names: dict[str, list[str]] = {}
    seen = {name.partition(" ")[0] for name in shown}  # "root_loss of these losses"
    for name in sorted(set(samplers) - seen):
        names.setdefault(why_left_out(name) or "", []).append(name)
    return "left out: " + "; ".join(f"{', '.join(own)} ({why})" for why, own in names.items())


def about_least(least: LeastRatio) -> str:
    """Return two lines on the least noisy density and how its noise is measured."""
    return (
        "`least` is about what least_noise draws by once it has learned; here it is learned from the rows measured.\n"
        f"On the same rows it has {least.same_rows:.3f} ({DECIDING}), on average too low, and on other rows "
        f"{least.other_rows:.3f}, too high: the table has a value in between"
    )


def noise_verdict(noise: GradientNoise, batch_size: int, optimizer: str) -> str:
    """Return one sentence on how much the choice of t can gain. `optimizer`: the name of its class."""
    least, num_rows = noise.least_ratio(DECIDING, least_in=DECIDING).ratio, noise.losses.shape[1]
    share = f"{100 * noise.within_share(DECIDING):.0f} % of uniform's noise is within t, from rows and noise"
    if math.isnan(least.error):
        return (
            f"{num_rows} rows in a bin are too few to say what the best density over t saves: take at least "
            f"{FEWEST_ROWS}, for instance --rows=16; {share}"
        )
    best = f"{least.value:.3f} ± {least.error:.3f} of uniform's noise"
    if least.value + student_quantile(min(MAX_PARTS, num_rows) - 1) * least.error < 1:
        like = f"like a batch of {batch_size * least.equivalent_batch:.0f} instead of {batch_size}"
        return f"in {optimizer}'s metric the best density over t has {best} ({like}); {share}"
    return f"in {optimizer}'s metric no density over t is clearly better than uniform: the best has {best}; {share}"


def as_data(
    noise: GradientNoise,
    densities: Mapping[str, Tensor],
    ratios: Mapping[Metric, Mapping[str, NoiseRatio]],
    step: int,
    batch_size: int,
) -> dict[str, Any]:
    """Return the result as plain data."""
    metrics = {}
    for metric, own in ratios.items():
        least = noise.least_ratio(metric, least_in=DECIDING)
        metrics[metric] = {
            "moments": noise.moments(metric).tolist(),
            "within_share": noise.within_share(metric),
            "noise_ratio": {name: {"value": r.value, "error": r.error} for name, r in own.items()},
            "equivalent_batch": {name: batch_size * r.equivalent_batch for name, r in own.items()},
            "least": {"same_rows": least.same_rows, "other_rows": least.other_rows},
        }
    return {
        "step": step,
        "batch_size": batch_size,
        "losses": noise.losses.mean(1).tolist(),
        "densities": {name: (density / density.sum()).tolist() for name, density in densities.items()},
        "predicted": {name: noise.predicted_ratio(density) for name, density in densities.items()},
        "metrics": metrics,
    }
