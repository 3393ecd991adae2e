"""`jdp timeline` on files that a crash, a copy or an editor has damaged."""

import copy
import gzip
import json
import random
import time

import pytest
from support import profiled, training
from support.profiled import bucket, computes, process, step

import jdp
from jdp.__main__ import main
from jdp.tools.profiling import trace_file

MS = 1_000_000


def two_processes(num_processes=2, **facts):
    """Two hosts with a rank each, whose clocks are compared by a bucket."""
    for number, clock in enumerate(("one", "two")):
        slices = [step(0, 0, 9 * MS, number), computes(0, 3 * MS, number)]
        slices.append(bucket("b", 3 * MS, 8 * MS, number))
        yield process(number, slices, num_processes=num_processes, clock=clock, **facts)


def content_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path, content):
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))


def nested():
    return json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    ("cat", "name", "value"),
    [
        ("step", "ts", float("inf")), ("step", "ts", float("nan")), ("step", "ts", 1e300),
        ("step", "dur", -5), ("step", "dur", True), ("step", "cat", "foo"), ("step", "cat", []),
        ("step", "name", None), ("step", "name", "\ud800"), ("step", "args", []),
        ("step", "ph", "Y"), ("step", "ph", 1), ("step", "ts", nested()), ("step", "dur", 10**400),
        ("args of step", "step", "3"), ("args of step", "step", 1.5), ("args of step", "step", -1),
        ("args of step", "rank", "one"), ("args of step", "rank", None),
        ("args of step", "rank", 7), ("args of communication", "op", []),
        ("args of communication", "collective", []), ("args of communication", "bytes", "4"),
        ("args of communication", "bytes", -4), ("args of communication", "algorithm", None),
        ("args of communication", "num_groups", "2"), ("args of communication", "leaves", nested()),
        ("facts", "host", None), ("facts", "clock", []), ("facts", "run", {}),
        ("facts", "ranks", 1), ("facts", "ranks", ["1"]), ("facts", "ranks", [1, 1]),
        ("facts", "start_ns", 1.5), ("facts", "start_ns", float("nan")), ("facts", "notes", [1]),
        ("facts", "notes", "text"), ("facts", "process", 0), ("facts", "process", "1"),
        ("facts", "num_processes", 1), ("facts", "num_processes", -1), ("facts", "platform", 1),
        ("facts", "jdp", nested()), ("content", "otherData", []), ("content", "traceEvents", {}),
        ("content", "traceEvents", [1]),
    ],
)  # fmt: skip
def test_a_value_that_a_field_cannot_have_is_named_with_its_file(
    cat, name, value, tmp_path, capsys
):
    profiled.write(tmp_path, *two_processes())
    path = trace_file.path_of(tmp_path, 1)
    content = content_of(path)
    events = {each["cat"]: each for each in content["traceEvents"] if each["ph"] == "X"}
    part = {
        "facts": content["otherData"],
        "content": content,
        **events,
        **{f"args of {kind}": each["args"] for kind, each in events.items()},
    }[cat]
    part[name] = value
    write(path, content)
    assert main(["timeline", str(tmp_path), "--json"]) == 0  # process 0 is shown
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("process 1: process-1.perfetto.json.gz is damaged and skipped: ")


@pytest.mark.parametrize("name", ["run", "process", "num_processes", "host", "clock", "start_ns",
                                  "ranks", "platform"])  # fmt: skip
def test_a_file_without_a_fact_is_an_error_that_names_both(name, tmp_path, capsys):
    [first, _] = two_processes()
    profiled.write(tmp_path, first)
    path = trace_file.path_of(tmp_path, 0)
    content = content_of(path)
    del content["otherData"][name]
    write(path, content)
    assert main(["timeline", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert path.name in error and f"it has no '{name}'" in error


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'"\xff"', b"\xff\xfe\x00", b"", b"NaN", b"9" * 5000]
)
def test_content_that_is_no_object_of_json_is_an_error_that_names_the_file(
    content, tmp_path, capsys
):
    path = trace_file.path_of(tmp_path, 0)
    path.write_bytes(gzip.compress(content))
    assert main(["timeline", str(tmp_path)]) == 1
    assert f"{path.name} is damaged" in capsys.readouterr().err


def test_10_to_the_12_processes_are_missing_in_one_note(tmp_path, capsys):
    profiled.write(tmp_path, *two_processes(num_processes=10**12))
    trace_file.path_of(tmp_path, 0).rename(tmp_path / "away")
    begin = time.monotonic()
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    assert time.monotonic() - begin < 5
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "process 0", "processes 2 to 999999999999"
    ]  # fmt: skip


# Copies by hand: their times would count twice.
@pytest.mark.parametrize("copied", ["process-1", "process-00"])
def test_a_copy_of_a_file_does_not_count_again(copied, tmp_path, capsys):
    first, second = two_processes()
    profiled.write(tmp_path, first, second)
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["collectives"][0]["runs"]
    copy_of = trace_file.path_of(tmp_path, 0).read_bytes()
    (tmp_path / f"{copied}.perfetto.json.gz").write_bytes(copy_of)
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["collectives"][0]["runs"] == runs
    assert bool(found["notes"]) == (copied == "process-1")


def test_a_rank_of_two_processes_is_shown_once_and_named(tmp_path, capsys):
    first, second = two_processes()
    facts = {**second.facts, "ranks": [0, 1]}
    profiled.write(tmp_path, first, trace_file.ProcessTrace(facts, second.slices))
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in found["ranks"]] == [0]
    [note] = found["notes"]
    assert note.startswith("process 1: ") and "rank 0 " in note and "process 0" in note


def test_a_step_that_a_rank_has_twice_is_named(tmp_path, capsys):
    profiled.write(tmp_path, process(0, [step(3, 0, 5, 0), step(3, 5, 9, 0)]))
    assert main(["timeline", str(tmp_path)]) == 1
    assert "rank 0 has step 3 twice" in capsys.readouterr().err


ODD = [None, True, -1, 0, 1, 2**31, 10**12, 2**63, 10**400, 1.5, float("nan"), float("inf"),
       1e300, -1e300, "", "0", "step", "\ud800", "communication", [], [0], {}]  # fmt: skip


def changed(draw, content):
    """Change a field, or an element of a list, anywhere in the content."""
    part = content
    while True:
        key = draw.choice(list(part)) if isinstance(part, dict) else draw.randrange(len(part))
        if not isinstance(part[key], dict | list) or not part[key] or draw.random() < 0.1:
            break
        part = part[key]
    how = draw.random()
    if how < 0.2:
        del part[key]
    elif how < 0.3:
        part[key] = nested()
    elif how < 0.4 and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = copy.copy(draw.choice(ODD))


def damage(draw, path):
    content = bytearray(path.read_bytes())
    how = draw.randrange(8)
    if how == 0:
        path.write_bytes(content[: draw.randrange(len(content))])
    elif how == 1:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == 2:
        text = bytearray(gzip.decompress(content))
        text[draw.randrange(len(text))] = draw.randrange(256)
        path.write_bytes(gzip.compress(text, 1))
    else:
        found = content_of(path)
        for _ in range(draw.choice((1, 1, 3))):
            changed(draw, found)
        write(path, found)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The files of two processes, of which the second is a profile of the first, with rank 2."""
    folder = tmp_path_factory.mktemp("real")
    training.ranks(2)
    state = training.state()
    train_step = jdp.train_step(training.plain_step)
    with jdp.profile(folder, steps=range(1, 3)):
        for batch in jdp.batches(training.batch(), training.NUM_ROWS, num_steps=4, prefetch=0):
            state, _ = train_step(state, batch)
    first = content_of(trace_file.path_of(folder, 0))
    first["otherData"]["num_processes"] = 2
    second = copy.deepcopy(first)
    second["otherData"] |= {"process": 1, "ranks": [2, 3], "clock": "another"}
    for each in second["traceEvents"]:
        if "rank" in each["args"]:
            each["args"]["rank"] += 2
    write(trace_file.path_of(folder, 0), first)
    write(trace_file.path_of(folder, 1), second)
    return {path.name: path.read_bytes() for path in folder.glob("process-*.gz")}


def test_a_real_profile_is_read_without_a_note(real, tmp_path, capsys):
    for name, content in real.items():
        (tmp_path / name).write_bytes(content)
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["rank"] for each in found["ranks"]) == [0, 1, 2, 3]
    assert found["notes"] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_profile_with_random_damage_is_shown_or_refused_with_the_name_of_a_file(
    seed, real, tmp_path, capsys
):
    draw = random.Random(seed)
    for _ in range(10):
        for name, content in real.items():
            (tmp_path / name).write_bytes(content)
        for name in draw.choice((list(real), list(real)[:1])):
            damage(draw, tmp_path / name)
        code = main(["timeline", str(tmp_path), "--json"])
        output = capsys.readouterr()
        if code == 0:
            json.loads(output.out, parse_constant=pytest.fail)
            assert main(["timeline", str(tmp_path)]) == 0
            capsys.readouterr().out.encode()
        else:
            assert code == 1 and "process-0.perfetto" in output.err
