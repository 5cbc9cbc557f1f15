"""The command `kairostep patch`: the files that it reads and writes, and what it says."""

import stat
from pathlib import Path

import pytest
from training_scripts import RANDINT, SCRIPTS, SNR, script

from kairostep.cli import main
from kairostep.integrations.diffusers_scripts import names_for_scripts
from kairostep.integrations.patching import patch_script

TEXT = script(RANDINT, SNR)
SAVE = "            if (step + 1) % args.checkpointing_steps == 0:\n"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["patch", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    main(["patch", str(path)])
    assert path.read_bytes() == b"\xef\xbb\xbf" + patch_script(TEXT).text.encode()


def test_the_permissions_of_the_file_and_a_link_to_it_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text(TEXT)
    path.chmod(0o750)
    link.symlink_to(path)
    main(["patch", str(link)])
    assert link.is_symlink()
    assert path.read_text() == patch_script(TEXT).text
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    out = tmp_path / "out.py"
    path.write_text(TEXT)
    main(["patch", str(path), "-o", str(out)])
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_a_missing_folder_is_told_before_the_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "train.py", tmp_path / "none" / "out.py"
    path.write_text(TEXT)
    told = failure(capsys, str(path), "-o", str(out))
    assert f"OUT must be in a folder that exists, got {out}: mkdir -p {out.parent}" in told
    assert f"OUT must be a file, got the folder {tmp_path}: name" in failure(capsys, str(path), "-o", str(tmp_path))


def test_a_script_that_saves_no_state_is_patched_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    main(["patch", str(path), "--check"])
    assert "note:" not in capsys.readouterr().out
    path.write_text(TEXT[: TEXT.index(SAVE)] + TEXT[TEXT.index("\n\nif __name__") :])
    for arguments in (["--check"], []):
        main(["patch", str(path), *arguments])
        assert "note: the script never calls accelerator.save_state(folder), so" in capsys.readouterr().out


def test_the_weight_of_the_loss_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    for name, told in {"snr": "mse_loss_weights", "flow": "weighting", "mse": "none"}.items():
        path.write_text(SCRIPTS[name])
        main(["patch", str(path), "--check"])
        assert f"loss weight shown to the sampler: {told}\n" in capsys.readouterr().out


def test_the_samplers_that_can_be_named_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "train.py", ", ".join(names_for_scripts())
    path.write_text(TEXT)
    for name in ("adaptive", "least_noise"):
        told = failure(capsys, str(path), "--sampler", name)
        assert f"the sampler of a script must need the losses alone, got {name!r}: take one of {names}, or" in told
    for name in ("min_snr", "no_such"):
        assert f"unknown sampler {name}: valid are {names}" in failure(capsys, str(path), "--sampler", name)
    assert "unknown sampler rootloss: did you mean root_loss?" in failure(capsys, str(path), "--sampler", "rootloss")
    assert "the sampler progress was removed" in failure(capsys, str(path), "--sampler", "progress")
    with pytest.raises(SystemExit):
        main(["patch", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "uniform has the script's density" in told
    main(["patch", str(path)])
    told = capsys.readouterr().out
    assert "the script's own density" in told
    assert "as before" not in told


def test_a_missing_script_and_one_that_is_patched_already_are_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "SCRIPT must be a file that can be read, got" in failure(capsys, str(tmp_path / "nope.py"))
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS["mse"])
    main(["patch", str(path)])
    capsys.readouterr()
    assert "to change the sampler, run this one with --timestep_sampler=NAME" in failure(capsys, str(path))


def test_a_file_that_is_replaced_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "script.py", tmp_path / "patched.py"
    path.write_text(SCRIPTS["mse"])
    for told in ("lines changed; try", "lines changed, and replaced; try"):
        main(["patch", str(path), "-o", str(output)])
        assert told in capsys.readouterr().out
