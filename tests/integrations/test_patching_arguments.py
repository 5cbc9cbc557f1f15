"""kairostep patch: the parser that gets --timestep_sampler, and the samplers that it can name."""

import pytest
from training_scripts import SCRIPTS

from kairostep.by_name import from_name
from kairostep.integrations.diffusers_scripts import names_for_scripts, sampler_for_script
from kairostep.integrations.patching import Refused, patch_script
from kairostep.registry import samplers

SCRIPT = SCRIPTS["mse"]
PARSE = "    args = parser.parse_args(input_args)\n"
GUARD = 'if __name__ == "__main__":\n'
ADDED = 'add_argument("--timestep_sampler", '


def line_before_ours(text: str) -> str:
    lines = patch_script(text).text.splitlines()
    at = next(number for number, line in enumerate(lines) if ADDED in line)
    return lines[at - 1]


@pytest.mark.parametrize("makes", ["return p.parse_args()", "args = p.parse_args()\n    return args"])
def test_of_two_parsers_the_one_that_makes_args_gets_the_argument(makes: str) -> None:
    second = f'def parse_eval():\n    p = argparse.ArgumentParser()\n    p.add_argument("--fid")\n    {makes}\n\n\n'
    patched = patch_script(SCRIPT.replace(GUARD, second + GUARD)).text
    assert f"    parser.{ADDED}" in patched
    assert f"p.{ADDED}" not in patched.replace("parser.", "")


def test_arguments_added_after_parsing_are_no_place_for_ours() -> None:
    late = SCRIPT.replace("    args.__dict__.update(SETTINGS)\n", '    parser.add_argument("--late")\n')
    assert patch_script(late).text.index(ADDED) < patch_script(late).text.index("parser.parse_args(")


def test_a_parser_made_elsewhere_gets_the_argument_before_it_parses() -> None:
    text = SCRIPT.replace(
        PARSE, "    return parser\n\n\ndef parse():\n    parser = parse_args()\n" + PARSE.replace("input_args", "")
    )
    text = text.replace("    args = parse_args()\n", "    args = parse()\n")
    assert line_before_ours(text) == "    parser = parse_args()"


def test_both_branches_of_parsing_follow_the_argument() -> None:
    branches = "    if input_args is None:\n        args = parser.parse_args()\n"
    branches += "    else:\n        args = parser.parse_args(input_args)\n"
    text = SCRIPT.replace(PARSE, branches)
    assert line_before_ours(text) == "    )"
    assert patch_script(text).text.index(ADDED) < patch_script(text).text.index("if input_args is None")


def test_parsers_that_cannot_be_told_apart_and_parsing_within_a_line_are_refused() -> None:
    both = SCRIPT.replace(PARSE, PARSE + "    other = argparse.ArgumentParser()\n    args = other.parse_args()\n")
    by_hand = ".*, and patch again, or by hand, write drawn = sampler.sample"
    told = r"line 27: one parser must make args, got parsing in lines 25, 27: call the arg"
    with pytest.raises(Refused, match=told + by_hand):
        patch_script(both)
    shared = SCRIPT.replace("    )\n\n" + PARSE, "    ); " + PARSE.strip() + "\n")
    with pytest.raises(Refused, match=r"line 23: parser.parse_args\(\) must start its line, got \); args = .* by hand"):
        patch_script(shared)


def test_a_script_that_adds_no_argument_itself_names_its_sampler() -> None:
    patched = patch_script(SCRIPT.replace(".add_argument(", ".register("))
    assert 'timestep_sampler = ScriptSampler("root_loss", accelerator, seed=args.seed)\n' in patched.text
    assert not patched.has_argument


def test_a_script_that_prepares_its_model_elsewhere_is_told_the_way_by_hand() -> None:
    text = SCRIPT.replace("model, optimizer = accelerator.prepare(", "model, optimizer = prepare(")
    text = text.replace("    accelerator = Accelerator(", "    accelerator, other = Accelerator(", 1)
    with pytest.raises(Refused, match=r"accelerator\.prepare\(\.\.\.\) must come before .* or by hand, write drawn ="):
        patch_script(text)


def test_the_names_are_of_all_samplers_that_a_script_can_make_without_arguments() -> None:
    possible = []
    for name in samplers:
        try:
            sampler_for_script(from_name(name))
            sampler_for_script(name)
        except ValueError:
            continue
        possible.append(name)
    assert names_for_scripts() == possible
