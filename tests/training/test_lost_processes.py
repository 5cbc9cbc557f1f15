"""One of two processes ends: the other says so in one message of ours, not in a traceback of gloo's."""

import signal
from pathlib import Path

import pytest
import torch
from small_runs import ADAPTIVE, arguments, num_lines, start_ranks

from kairostep.ranks import is_lost_rank
from kairostep.runs.directory import DirectoryLock

LOST = "kairostep: error: process {} of 2 stops, since another has ended or cannot be reached: the output of that one"


@pytest.mark.parametrize("killed", [0, 1])
def test_the_loss_of_a_killed_process_is_one_message(killed: int, tmp_path: Path) -> None:
    directory, left = tmp_path / "pair", 1 - killed
    children = start_ranks(arguments(directory, {**ADAPTIVE, "steps": 10**6}), tmp_path / "log")
    assert children[0].wait_until(lambda: num_lines(directory) >= 1)
    assert children[killed].send(signal.SIGKILL) == -signal.SIGKILL
    assert children[left].join() == 1
    complaints = children[left].output[children[left].output.find("kairostep: error") :].splitlines()
    assert len(complaints) == 1
    assert complaints[0].startswith(LOST.format(left))
    assert "Traceback" not in children[left].output
    assert "gloo" not in children[left].output


def test_a_process_that_fails_alone_tells_why_and_the_other_that_it_is_alone(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "pair")  # which the first process alone asks for
    children = start_ranks(arguments(tmp_path / "pair", ADAPTIVE), tmp_path / "log")
    assert [child.join() for child in children] == [2, 1]
    lock.release()
    assert "in which another is at work" in children[0].output
    assert children[1].output.startswith(LOST.format(1))
    assert children[1].output.count("\n") == 1


def test_only_the_loss_of_another_process_is_taken_for_one() -> None:
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:61104: Connection reset by peer"
    assert not is_lost_rank(RuntimeError(gloo))  # one process has no other
    assert is_lost_rank(torch.distributed.DistNetworkError("the server is gone"))
    assert not is_lost_rank(RuntimeError("shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError(gloo))
