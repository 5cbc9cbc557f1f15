"""Draws the density of each sampler for its page: fixed ones from the class, learned ones as training left them."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from torch import Tensor, nn

import kairostep as ks

CONVERGENCE = Path(__file__).parents[2] / "results" / "convergence"
NUM_BINS = 200  # of a density that does not change
THEMES = {"light": "#3c4043", "dark": "#d0d4da"}  # colour of axes and text
COLOURS, LINES = ("#e4572e", "#2a9d8f", "#8e7cc3"), ("-", "--", "-.")
Curves = dict[str, Tensor]  # label -> density (K,), sums to 1


def fixed(**samplers: ks.TimestepSampler) -> Curves:
    """Return the densities of samplers, by label; in a label `_` stands for a blank."""
    return {label.replace("_", " "): sampler.density(NUM_BINS) for label, sampler in samplers.items()}


def logit_normal() -> Curves:
    """Return a few settings of LogitNormal."""
    shown = {(0.0, 1.0): "mean 0, std 1", (-0.5, 1.0): "mean -0.5, std 1", (0.0, 0.5): "mean 0, std 0.5"}
    return {label: ks.LogitNormal(*values).density(NUM_BINS) for values, label in shown.items()}


def by_process(make: Callable[[Any], ks.TimestepSampler]) -> Curves:
    """Return the density of a sampler on three processes."""
    processes = {"linear": ks.DiscreteProcess.linear(), "cosine": ks.DiscreteProcess.cosine(), "flow": ks.FlowProcess()}
    return {label: make(process).density(NUM_BINS) for label, process in processes.items()}


def curriculum() -> Curves:
    """Return a curriculum at its start, halfway and at its end."""
    sampler, curves = ks.Curriculum(ks.LogitNormal(), ks.Uniform(), start=0, end=10), {}
    for draw in range(11):
        if draw in (0, 5, 10):
            curves[{0: "start", 5: "halfway", 10: "end"}[draw]] = sampler.density(NUM_BINS)
        sampler.sample(torch.empty(8, 0))
    return curves


def measured(arms: dict[str, str]) -> Curves:
    """Return the densities at the end of runs of results/convergence, by label."""
    logs = {label: (CONVERGENCE / arm / "seed-0.jsonl").read_text().splitlines()[-1] for label, arm in arms.items()}
    return {label: torch.tensor(json.loads(line)["density"]) for label, line in logs.items()}


def trained(make: Callable[[nn.Module], ks.TimestepSampler], num_steps: int) -> Curves:
    """Return the density that a sampler learns in a short training on two points, with the linear schedule."""
    torch.set_num_threads(1)  # the network is small: threads would wait for each other
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 8))
    objective, optimizer = ks.Objective(ks.DiscreteProcess.linear()), torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler, num_rows = make(model), 256
    sampler.set_optimizer(optimizer)

    def losses(x0: Tensor, t: Tensor) -> Tensor:
        return objective(lambda xt, time: model(torch.cat([xt, t[:, None]], dim=1)), x0, t)

    for _ in range(num_steps):
        x0 = torch.where(torch.rand(num_rows, 1) < 0.5, -0.5, 0.5) + 0.1 * torch.randn(num_rows, 8)
        drawn = sampler.sample(x0)
        found = losses(x0, drawn.t)
        optimizer.zero_grad()
        (found * drawn.weight).mean().backward()
        with sampler.observe(x0, drawn, found.detach(), lambda rows, t, x0=x0: losses(x0[rows], t)):
            optimizer.step()
    return {"after training": sampler.density(20)}


CIFAR10 = "cifar10-small-{}/{}"
PICTURES: dict[str, tuple[str, Callable[[], Curves]]] = {  # page -> what is shown, and its curves
    "uniform": ("", lambda: fixed(uniform=ks.Uniform())),
    "logit_normal": ("", logit_normal),
    "mode": ("", lambda: {f"scale {scale}": ks.Mode(scale).density(NUM_BINS) for scale in (1.29, 0.5, -0.5)}),
    "beta": ("", lambda: {f"a {a}, b {b}": ks.FixedBeta(a, b).density(NUM_BINS) for a, b in ((2, 5), (2, 2), (5, 2))}),
    "tabulated": ("", lambda: fixed(mass_1_4_2_1=ks.Tabulated(torch.tensor([1.0, 4.0, 2.0, 1.0])))),
    "log_normal_sigma": ("", lambda: by_process(ks.LogNormalSigma)),
    "laplace": ("", lambda: by_process(ks.Laplace)),
    "speed": ("", lambda: {name: ks.Speed(ks.DiscreteProcess.linear(), name).density(200) for name in ("paper", "v1")}),
    "curriculum": ("LogitNormal, then Uniform", curriculum),
    "root_loss": (
        "learned on CIFAR-10",
        lambda: measured({name: CIFAR10.format(name, "root_loss") for name in ("linear", "cosine", "flow")}),
    ),
    "infonoise": (
        "learned on CIFAR-10 and digits",
        lambda: measured({"linear": CIFAR10.format("linear", "infonoise"), "cosine": "digits-cosine/infonoise"}),
    ),
    "adaptive": (
        "learned on CIFAR-10, paid by the bound",
        lambda: measured({name: CIFAR10.format(name, "adaptive-vlb") for name in ("linear", "cosine", "flow")}),
    ),
    "least_noise": (
        "learned on a small problem, linear schedule",
        lambda: trained(lambda model: ks.LeastNoise(), 400),
    ),
    "loss_second_moment": (
        "learned on a small problem, linear schedule",
        lambda: trained(lambda model: ks.LossSecondMoment(num_bins=20), 60),
    ),
    "gradient_variance": (
        "learned on a small problem, linear schedule",
        lambda: trained(lambda model: ks.GradientVariance(model.parameters(), every=5, decay=0.5), 300),
    ),
}


def on_files(files: Files, config: Any) -> Files:
    """Add two pictures for each sampler, for the light and the dark theme."""
    for name, (_, curves) in PICTURES.items():
        shown = curves()
        ALT_TEXTS[name] = describe(shown)
        for theme, colour in THEMES.items():
            address = f"methods/{name}-{theme}.svg"
            files.append(File.generated(config, address, content=draw(shown, colour)))
    return files


ALT_TEXTS: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Put the picture before the first code of a sampler's page, which is its formula."""
    name = Path(page.file.src_uri).stem
    if not page.file.src_uri.startswith("methods/") or name not in PICTURES:
        return markdown
    note = PICTURES[name][0]
    alt = f"Density over t relative to uniform draws{f', {note}' if note else ''}. {ALT_TEXTS[name]}"
    pictures = [f"![{alt}]({name}-{theme}.svg#only-{theme}){{ .density }}" for theme in THEMES]
    return re.sub(r"^```", lambda _: f"{' '.join(pictures)}\n\n```", markdown, count=1, flags=re.MULTILINE)


def describe(curves: Curves) -> str:
    """Return where each density is highest, for readers who do not see the picture."""
    parts = []
    for label, density in curves.items():
        relative = density * len(density)
        peak = (float(relative.argmax()) + 0.5) / len(density)
        flat = float(relative.max() - relative.min()) < 0.01
        parts.append(f"{label}: {'flat' if flat else f'highest at t = {peak:.2f}, {float(relative.max()):.1f} times'}")
    return "; ".join(parts) + "."


def draw(curves: Curves, colour: str) -> str:
    """Return a picture of densities relative to uniform, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": "kairostep", "font.size": 10, "text.color": colour}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(5.2, 2.5), layout="constrained")
        axes.axhline(1, color=colour, linewidth=0.8, alpha=0.5)
        for (label, density), line, line_colour in zip(curves.items(), LINES, COLOURS, strict=False):
            relative, edges = density * len(density), torch.linspace(0, 1, len(density) + 1)
            look = {"color": line_colour, "linestyle": line, "linewidth": 1.8}
            axes.stairs(relative.tolist(), edges.tolist(), baseline=None, label=label, **look)
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="t  (0: data, 1: noise)", ylabel="density / uniform")
        axes.tick_params(colors=colour)
        axes.xaxis.label.set_color(colour)
        axes.yaxis.label.set_color(colour)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(colour)
        if len(curves) > 1:
            axes.legend(frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return written.getvalue()
