"""The program of `jdp run`: mistakes in its name and in the order of flags are named."""

import pytest

from jdp.__main__ import main
from jdp.launch.options import misplaced_flags, require_program


@pytest.mark.parametrize("python", ["python", "python3", "/usr/bin/python3.12"])
def test_python_before_the_program_is_left_out(python):
    with pytest.raises(ValueError, match=f"Remove '{python}', as in jdp run train.py"):
        require_program([python, "train.py"])


def test_the_command_refuses_it_before_a_process_is_started(capsys):
    assert main(["run", "--nproc-per-node", "2", "python", "train.py"]) == 2
    assert "'python'" in capsys.readouterr().err
    assert main(["run", ""]) == 2
    assert "empty" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_refused_before_a_process_is_started(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--nproc-per-node", "2", "nope.py"]) == 2
    error = capsys.readouterr().err
    assert "'nope.py'" in error and str(tmp_path) in error and "-m package.train" in error


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--nproc", "--nproc-per-node"), ("--max-restart=3", "--max-restarts"), ("--xyz", None)],
)
def test_a_flag_that_is_none_is_named_with_the_nearest_one(capsys, given, meant):
    assert main(["run", given, "2", "train.py"]) == 2
    error = capsys.readouterr().err
    assert f"the flag {given.partition('=')[0]} does not exist." in error
    assert (f"Did you mean {meant}?" in error) if meant else ("Did you mean" not in error)


def test_a_program_with_that_name_is_accepted():
    require_program(["python"])
    require_program(["python_train.py", "--lr", "1"])


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node", "--nnodes=2"])
def test_a_flag_of_the_launcher_behind_the_program_is_reported(flag):
    text = misplaced_flags(["train.py", "--lr", "1", flag, "2"])
    assert text is not None and text.startswith(flag.partition("=")[0].replace("_", "-"))


def test_flags_that_programs_have_themselves_are_theirs():
    assert misplaced_flags(["train.py", "--resume", "--seed", "2", "--timeout-s=3"]) is None
