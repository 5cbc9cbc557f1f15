"""`evaluations.jsonl` is appended to whole and read line by line."""

import json
from pathlib import Path

from kairostep.runs.evaluations import append_evaluations, read_evaluations


def test_lines_are_appended_and_a_torn_one_stays_alone(tmp_path: Path) -> None:
    path, problems = tmp_path / "evaluations.jsonl", list[str]()
    assert (read_evaluations(path, problems), problems) == ([], [])
    lines = [{"what": "fid", "value": None, "n": 10}, {"what": "kid", "value": 0.1, "n": 9}]
    append_evaluations(path, lines)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    assert (read_evaluations(path, problems), problems) == (lines, [])
    before = path.read_bytes()
    path.write_bytes(before + b'{"what": "fi')
    append_evaluations(path, lines[1:])
    assert path.read_bytes().startswith(before + b'{"what": "fi\n{"what": "kid"')
    assert path.read_text().endswith("}\n")
    assert read_evaluations(path, problems) == [*lines, lines[1]]
    assert problems == ["1 of 4 lines of evaluations.jsonl cannot be read"]
