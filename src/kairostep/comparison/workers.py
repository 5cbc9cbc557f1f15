"""Processes that train runs beside each other: a GPU for each, and none outlives the command that started it."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch

Given = TypeVar("Given")
Found = TypeVar("Found")


def visible_gpus() -> list[str]:
    """Return the GPUs of this process as CUDA_VISIBLE_DEVICES names them, none without CUDA."""
    if not torch.cuda.is_available():
        return []
    num, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    words = map(str, range(num)) if named is None else (word.strip() for word in named.split(","))
    return list(words)[:num]  # CUDA reads the names up to the first that is none


def worker_pool(jobs: int, gpus: Sequence[str]) -> ProcessPoolExecutor:
    """Return so many processes, each with one of the GPUs, in turn; without any they share the cores."""
    context = multiprocessing.get_context("spawn")
    numbers: Any = context.SimpleQueue()
    for number in range(jobs):
        numbers.put(number)
    return ProcessPoolExecutor(jobs, context, initializer=begin_worker, initargs=(numbers, jobs, tuple(gpus)))


def begin_worker(numbers: Any, jobs: int, gpus: Sequence[str]) -> None:
    """Give this process its GPU or its share of the cores, and end it once its parent is gone."""
    number = numbers.get()
    if gpus:
        # The first question to CUDA fixes what is visible, is_available() among them: none was asked here yet
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # a run saves a checkpoint first


@contextlib.contextmanager
def passing_on_sigterm() -> Iterator[None]:
    """Pass SIGTERM on to the processes of a pool, which save what they train, and leave with its exit code."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where signals have no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def work_for_parent(work: Callable[[Given], Found], given: Given) -> Found:
    """Return what work gives; without a parent to return it to, end this process.

    A pool takes SystemExit for a result, and would wait for ever for more work from a parent that is gone. Ctrl-C ends
    work at any point: while a run is built too, before it heeds signals itself.
    """
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return work(given)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(128 + signal.SIGTERM)
