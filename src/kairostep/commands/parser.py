"""The parser of all commands: an unknown option is an error that names the nearest one."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from kairostep.commands.failures import USAGE_ERROR, fail
from kairostep.registry import nearest


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, and takes - for _ in the names of options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options: list[str] = []  # set before --help is added
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)  # the parsed arguments have the parser of the command

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument, and keep its names if it is an option."""
        self.options += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; the parser of each command does so for those after its name."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self.spell(argument) for argument in given], namespace)

    def spell(self, argument: str) -> str:
        """Return `--num-images=4` as `--num_images=4` if that is an option here, other arguments as they are."""
        name, equals, value = argument.partition("=")
        for option in self.options if name.startswith("--") else ():
            same_beginning = option[: len(name)].replace("-", "_") == name.replace("-", "_")
            if same_beginning and (self.allow_abbrev or len(option) == len(name)):
                return option[: len(name)] + equals + value
        return argument

    def error(self, message: str) -> NoReturn:
        """Exit with the code of wrong usage."""
        fail(f"{message}{' See' if message.endswith('?') else ': see'} {self.prog} --help", USAGE_ERROR)


def refuse_unread(parser: Parser, unread: Sequence[str]) -> None:
    """Exit with an error if a command without settings was given arguments that it has not read."""
    if unread:
        names = [name_of(word) for word in unread if word.startswith("-")]
        near = {one: None for name in names for one in nearest(name, parser.options) if one != name}
        meant = f": did you mean {' or '.join(near)}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unread)}{meant}")


def refuse_misspelled(parser: Parser, settings: Sequence[str]) -> None:
    """Exit with an error if what should be a setting of training is nearer to an option of the command itself.

    Other wrong settings are refused where settings are read, which knows the options of parts too.
    """
    from kairostep.experiments.settings import Config

    keys = [f"--{field.name}" for field in fields(Config)]
    for word in settings:
        name = name_of(word)
        is_setting = name.partition(".")[0].replace("-", "_") in {key.replace("-", "_") for key in keys}
        near = nearest(name, [*keys, *parser.options]) if name.startswith("--") and not is_setting else []
        if set(near) & set(parser.options):
            parser.error(f"unknown option {name}: did you mean {' or '.join(near)}?")


def name_of(argument: str) -> str:
    """Return the name of an option without its value."""
    return argument.partition("=")[0]
