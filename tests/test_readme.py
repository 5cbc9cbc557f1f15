"""What the documents show, runs; what they list, exists."""

import re
from pathlib import Path

import kairostep as ks

ROOT = Path(__file__).parents[1]


def test_python_code_of_the_readme_runs() -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})


def test_every_sampler_and_weighting_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    public = [
        name for name in vars(ks) if isinstance(vars(ks)[name], type) and issubclass(vars(ks)[name], ks.TimestepSampler)
    ]
    public += ["constant", "vlb", "min_snr", "soft_min_snr", "p2", "debias", "edm"]
    missing = [name for name in public if f"`{name}(" not in text and name != "TimestepSampler"]
    assert missing == []


def test_local_links_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
