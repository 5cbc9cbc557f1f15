"""Lists in the reference the arguments that a docstring explains line by line, as `floor: share of uniform draws`."""

import re
from typing import Any

import griffe

LINE = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.+)$")


class ArgumentLists(griffe.Extension):
    """Turns such lines into a list, where each name is an argument of the function or class."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Rewrite the docstring of a class by the arguments of its `__init__`, or its fields."""
        init = cls.members.get("__init__")
        names = {argument.name for argument in init.parameters} if isinstance(init, griffe.Function) else set()
        self.rewrite(cls, names | set(cls.members))

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Rewrite the docstring of a function."""
        self.rewrite(func, {argument.name for argument in func.parameters})

    def rewrite(self, thing: griffe.Object, names: set[str]) -> None:
        """Put a bullet before each line that explains arguments; what follows it, indented, belongs to it."""
        if thing.docstring is None:
            return
        lines, in_list = [], False
        for line in thing.docstring.value.splitlines():
            found = LINE.match(line)
            if found and set(found["names"].split(", ")) <= names:
                lines += [] if in_list else [""]
                shown = ", ".join(f"`{name}`" for name in found["names"].split(", "))
                lines.append(f"- {shown}: {found['text']}")
                in_list = True
            else:
                in_list = in_list and line.startswith("    ")
                lines.append(line)
        thing.docstring.value = "\n".join(lines)
