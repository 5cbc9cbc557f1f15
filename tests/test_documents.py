"""What the documents show, runs; what they list, exists."""

import re
import textwrap
from pathlib import Path

import torch
from torch.testing import assert_close

import kairostep as ks
from kairostep.timesteps import fixed, sampler

ROOT = Path(__file__).parents[1]


def python_blocks(document: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [textwrap.dedent(block) for block in blocks]


def test_python_code_of_the_readme_runs() -> None:
    for block in python_blocks("README.md"):
        exec(compile(block, "README.md", "exec"), {})


def test_the_sampler_in_the_recipe_for_new_ones_works() -> None:
    namespace = {**vars(fixed), **vars(sampler)}
    exec(compile(python_blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), namespace)
    triangle = namespace["Triangle"](unbiased=True)
    drawn = triangle.sample(torch.zeros(1000, 1))
    assert_close(triangle.density(2), 0.9 * torch.tensor([0.25, 0.75]) + 0.1 * 0.5)
    assert_close((drawn.weight * drawn.t).mean(), torch.tensor(0.5), rtol=0.02, atol=0)


def test_every_sampler_and_weighting_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    classes = {name: value for name, value in vars(ks).items() if isinstance(value, type)}
    samplers = [name for name, value in classes.items() if issubclass(value, ks.TimestepSampler)]
    weightings = ["constant", "vlb", "min_snr", "soft_min_snr", "p2", "debias", "edm"]
    missing = [name for name in (*samplers, *weightings) if f"`{name}(" not in text]
    assert missing == ["TimestepSampler"]  # the contract, not a sampler


def test_local_links_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_lines_quoted_in_the_method_stand_in_the_source() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    text = (ROOT / "docs" / "method.md").read_text().replace("\n", " ")
    quoted = [code for code in text.split("`")[1::2] if len(code) > 35]
    assert len(quoted) > 10
    missing = [code for code in quoted if code not in source]
    assert missing == []
