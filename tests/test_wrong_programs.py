import re

import jax
import pytest
from wrong_programs import KINDS, RIGHT, WRONG

import jdp

WRONG_HERE = [program for program in WRONG if program.exists()]
RIGHT_HERE = [program for program in RIGHT if program.exists()]


@pytest.fixture(autouse=True)
def four_ranks():
    jdp.init(devices=jax.devices()[:4])


def lower(program):
    return jdp.train_step(program.step, **program.options).lower(*program.make())


def name_of(program):
    return program.step.__name__


@pytest.mark.parametrize("program", WRONG_HERE, ids=name_of)
def test_refuses_with_the_right_path(program):
    with pytest.raises(ValueError) as caught:
        lower(program)
    message = str(caught.value)
    found = re.findall(r"^- (?:the gradient of )?`([^`]+)`", message, re.MULTILINE)
    assert KINDS[program.kind] in message, message
    assert (program.line() or "") in message, message
    for name in found:
        assert name.startswith(program.blames), message
    for name in program.blames:
        assert any(each.startswith(name) for each in found), message


@pytest.mark.parametrize("program", RIGHT_HERE, ids=name_of)
def test_accepts_the_right_twin(program):
    lower(program)


def test_is_a_corpus():
    names = [name_of(program) for program in WRONG + RIGHT]
    assert len(set(names)) == len(names)
    assert len(WRONG_HERE) >= 80 and len(RIGHT_HERE) >= 15
