"""`report --watch` follows runs while they train."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import OpenPage
from made_runs import make_run

from kairostep.reports.watch import PORT, make_server


@contextmanager
def served(*directories: Path) -> Iterator[str]:
    """Yield the address of a server of some directories."""
    server = make_server(directories, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(address: str, host: str | None = None) -> str:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def grow(directory: Path, step: int) -> None:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    line = {**json.loads(lines[-1]), "step": step, "loss": 0.123456}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_version_changes_with_the_files_and_only_then(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reach=500)
    with served(tmp_path) as address:
        first = get(f"{address}version")
        assert get(f"{address}version") == first
        assert "0.123456" not in get(address)
        grow(run, 510)
        second = get(f"{address}version")
        assert second != first
        content = json.loads(get(f"{address}content"))
        assert content["version"] == json.loads(second)["version"]
        assert "0.123456" in content["content"]
        assert "<script>" not in content["content"]
        make_run(tmp_path / "other", "speed")
        assert get(f"{address}version") != second
        assert "speed" in get(address)


def test_others_are_turned_away(tmp_path: Path) -> None:
    make_run(tmp_path / "run", reach=500)
    with served(tmp_path) as address:
        asked = (("nothing", None, 404), ("../config.yaml", None, 404))
        hosts = ("evil.example:80", "evil.example", "localhost.example", "evil.example:localhost")
        for path, host, code in (*asked, *(("", host, 403) for host in hosts)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(address + path, host)
            assert refused.value.code == code
            refused.value.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:80", "LOCALHOST"])
def test_localhost_is_answered_with_and_without_a_port(host: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", reach=500)
    with served(tmp_path) as address:
        assert "version" in get(f"{address}version", host)  # at port 80 browsers send the name alone


def test_a_folder_without_runs_waits_for_them(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        assert "No run has begun here yet" in get(address)
        make_run(tmp_path / "run")
        assert "No run has begun here yet" not in get(address)


def test_an_open_page_follows_and_keeps_its_place(browser: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{name}", name, reach=500) for name in ("uniform", "adaptive")]
    with served(tmp_path) as address:
        page = OpenPage(browser, address)
        curves = "page.data.figures.find(f => f.title == 'Training loss').panels[0].curves"
        curve = f"{curves}.find(c => c.name == 'uniform').x.length"
        assert page.ask(curve) == 50
        page.page.click("nav .arm:nth-child(2) .chip")
        page.page.locator("#figure-2").scroll_into_view_if_needed()
        page.page.locator("#configurations details summary").first.click()
        place = page.ask("scrollY")
        grow(runs[0], 510)
        page.until(f"{curve} == 51")
        page.wait()
        assert page.page.locator("#live").inner_text() == "live"
        assert page.ask("scrollY") == place
        assert page.page.locator("nav .arm:nth-child(2) .chip").get_attribute("aria-pressed") == "false"
        assert page.page.locator("#configurations details[open]").count() == 1
        assert "adaptive" not in page.ask(
            "document.querySelector('#figure-0 .plot').data.filter(t => t.visible).map(t => t.name)"
        )
        assert page.complaints == []
        page.close()


def hear_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background, whose children would not hear it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_quietly(tmp_path: Path) -> None:
    make_run(tmp_path / "run", reach=500)
    command = [sys.executable, "-u", "-m", "kairostep", "report", "--watch", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": dict(os.environ)}
    with subprocess.Popen(command, preexec_fn=hear_ctrl_c, **pipes) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("http://127.0.0.1:")
            assert "run" in get(line.split()[0])
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 0
    assert errors == ""


def test_the_usual_port_may_be_taken(tmp_path: Path) -> None:
    make_run(tmp_path / "run", reach=10)
    with make_server([tmp_path]) as first, make_server([tmp_path]) as second:
        assert first.server_address[1] != second.server_address[1]
        assert PORT in (first.server_address[1], PORT)
