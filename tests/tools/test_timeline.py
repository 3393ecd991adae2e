"""`jdp timeline`, from profiles that were written by hand, so that each answer is known."""

import errno
import gzip
import json
import random

import pytest
from support import profiled
from support.profiled import bucket, computes, phase, process, step

from jdp.__main__ import main
from jdp.tools.profiling import summary, trace_file
from jdp.tools.profiling.summary import Activity, step_parts, summarize
from jdp.worker import process_status

MS = 1_000_000


def drawn(draw, size):
    times = [sorted(draw.sample(range(-5, size + 5), 2)) for _ in range(draw.randrange(6))]
    return [(begin, end) for begin, end in times]


# The oracle looks at each nanosecond by itself.
@pytest.mark.parametrize("seed", range(40))
def test_parts_are_those_of_each_nanosecond_and_add_up_to_the_step(seed):
    draw, size = random.Random(seed), 40
    given = [drawn(draw, size) for _ in range(4)]
    at = [{t for begin, end in times for t in range(begin, end)} for times in given]
    computing, communicating, running, waiting = at
    expected = [0, 0, 0, 0]
    for t in range(size):
        if t in computing:
            part = 1
        elif t in communicating:
            part = 2
        elif t in running:
            part = 1
        else:
            part = 0 if t in waiting else 3
        expected[part] += 1
    found = step_parts(Activity(*map(summary.span_union, given)), (0, size))
    assert list(found) == expected
    assert sum(found) == size


def two_ranks(begin=0, process_number=0, ranks=(0, 1), **facts):
    """Rank 1 computes 6 ms of a step of 10, and rank 0 waits for it for 4 of them."""
    first, second = ranks
    slices = [phase(process_status.DATA, begin, begin + 1 * MS)]
    for number in (3, 4):
        at = begin + (number - 3) * 10 * MS
        slices += [
            step(number, at, at + 10 * MS, first),
            computes(at + 1 * MS, at + 3 * MS, first),
            bucket("b", at + 3 * MS, at + 8 * MS, first, num_bytes=4096),
            step(number, at, at + 10 * MS, second),
            computes(at + 1 * MS, at + 7 * MS, second),
            bucket("b", at + 7 * MS, at + 8 * MS, second, num_bytes=4096),
        ]
    return process(process_number, slices, **facts)


def test_the_table_has_the_rank_that_others_wait_for_first_and_its_parts(tmp_path):
    profiled.write(tmp_path, two_ranks())
    slow, fast = summarize(tmp_path).ranks
    assert (slow.rank, fast.rank) == (1, 0)
    # Waiting for data in the first step alone.
    assert slow.steps[3]._asdict() == dict(
        data=MS, computation=6 * MS, communication=MS, host=2 * MS
    )
    assert slow.steps[4]._asdict() == dict(
        data=0, computation=6 * MS, communication=MS, host=3 * MS
    )
    assert fast.mean() == (0.5 * MS, 2 * MS, 5 * MS, 2.5 * MS)
    [sent] = summarize(tmp_path).collectives
    assert (sent.name, sent.num_bytes, sent.runs, sent.took_ns) == ("b", 4096, 1, 3 * MS)
    assert (sent.longest_rank, sent.shortest_rank) == (0, 1)


def test_time_between_operations_is_computation_on_cpus_and_host_on_gpus(tmp_path):
    slices = [
        step(0, 0, 10, 0),
        computes(0, 4, 0),
        computes(6, 10, 0),
        trace_file.Slice(trace_file.PROGRAM, "jit_step", 0, 10, 0),
    ]
    for platform, expected in (("cpu", (0, 10, 0, 0)), ("gpu", (0, 8, 0, 2))):
        profiled.write(tmp_path, process(0, slices, platform=platform))
        assert tuple(summarize(tmp_path).ranks[0].steps[0]) == expected


def test_the_command_prints_a_table_or_json_and_writes_a_picture(tmp_path, capsys):
    profiled.write(tmp_path, two_ranks())
    assert main(["timeline", str(tmp_path), "--png", str(tmp_path / "lanes.png")]) == 0
    assert "rank" in (text := capsys.readouterr().out) and "4096" in text
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in found["ranks"]] == [1, 0]
    for each in found["ranks"]:
        assert all(sum(parts.values()) == 10 * MS for parts in each["steps_ns"].values())
    assert found["collectives"][0]["num_bytes"] == 4096
    assert found["notes"] == []


# A reader of Chrome's format: begins and ends of slices, by track.
def slices_by_track(path):
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {}
    for each in events:
        if each["ph"] == "X":
            found.setdefault((each["pid"], each["tid"]), []).append(
                (round(each["ts"] * 1000), round(each["dur"] * 1000), each["name"])
            )
    assert set(found) <= set(names)
    return {(pid, names[pid, tid], tid): sorted(each) for (pid, tid), each in found.items()}


def test_slices_of_a_track_do_not_overlap_and_keep_their_nanoseconds(tmp_path):
    slices = [step(0, 0, 1_000_003, 0), computes(1, 5, 0), computes(3, 8, 0), computes(5, 7, 0)]
    profiled.write(tmp_path, process(0, slices))
    tracks = slices_by_track(trace_file.path_of(tmp_path, 0))
    assert sum(len(each) for each in tracks.values()) == len(slices)
    for each in tracks.values():
        for (begin, duration, _), (after, *_) in zip(each, each[1:], strict=False):
            assert begin + duration <= after
    assert list(profiled.read(tmp_path).slices) == [slices[0], slices[1], slices[3], slices[2]]


def test_the_merged_trace_has_all_processes_on_one_clock(tmp_path):
    profiled.write(
        tmp_path,
        two_ranks(num_processes=2),
        two_ranks(process_number=1, ranks=(2, 3), num_processes=2,
                  start_ns=profiled.START_NS - 2 * MS, begin=2 * MS),
    )  # fmt: skip
    assert main(["timeline", str(tmp_path)]) == 0
    tracks = slices_by_track(tmp_path / trace_file.MERGED)
    begins = {(pid, name): each[0][0] for (pid, name, _), each in tracks.items() if "steps" in name}
    assert begins == {(process, f"rank {rank}: steps"): 2 * MS
                      for process, rank in ((0, 0), (0, 1), (1, 2), (1, 3))}  # fmt: skip


# A stale file of a host whose clock is an hour ahead looks later than all others.
def test_the_profile_is_that_of_process_0_also_if_clocks_differ(tmp_path):
    profiled.write(
        tmp_path,
        two_ranks(num_processes=2, run="new"),
        two_ranks(process_number=1, ranks=(2, 3), num_processes=4, run="old",
                  start_ns=profiled.START_NS + 3_600_000 * MS, clock="two"),
    )  # fmt: skip
    found = summarize(tmp_path)
    assert sorted(each.rank for each in found.ranks) == [0, 1]
    assert [note for note in found.notes if note.startswith("process 1: ")]


def test_a_profile_in_a_folder_that_cannot_be_written_is_shown(tmp_path, capsys, monkeypatch):
    profiled.write(tmp_path, two_ranks())

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(trace_file, "write", refuse)
    assert main(["timeline", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "2 ranks, steps 3 to 4" in output.out and "--trace" in output.err


def test_a_trace_in_a_folder_that_is_missing_is_refused(tmp_path, capsys):
    profiled.write(tmp_path, two_ranks())
    trace = tmp_path / "missing" / "trace.json.gz"
    assert main(["timeline", str(tmp_path), "--trace", str(trace)]) == 2
    output = capsys.readouterr()
    assert not output.out and "does not exist" in output.err


@pytest.mark.parametrize("name", ["process-1.perfetto.json.gz", "link"])
def test_a_trace_in_the_place_of_a_file_of_the_profile_is_refused(
    name, tmp_path, capsys, monkeypatch
):
    profiled.write(tmp_path, two_ranks(), two_ranks(process_number=1, ranks=(2, 3)))
    path = trace_file.path_of(tmp_path, 1)
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", ".", "--trace", str(tmp_path / name)]) == 2
    assert "--trace" in capsys.readouterr().err and path.read_bytes() == before


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path, capsys):
    profiled.write(tmp_path, two_ranks())
    assert main(["timeline", str(tmp_path), "--png", f"{tmp_path}/steps.xyz"]) == 2
    assert ".xyz" in capsys.readouterr().err


def damaged(path, how):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a changed byte":  # the first of the data: zlib's error, not gzip's
        first = content.index(b"\0", 10) + 1
        path.write_bytes(content[:first] + b"\xff" + content[first + 1 :])
    elif how == "not compressed":
        path.write_bytes(b"{}")
    else:
        event = {"ph": "X", "ts": 0, "dur": 1, "cat": "step", "name": "step", "args": {}}
        other = {"a list": [],
                 "a text as facts": {"otherData": {"jdp": 1}, "traceEvents": [event | {"ts": "0"}]},
                 "a list as event": {"otherData": {"jdp": 1}, "traceEvents": [[]]},
                 "other JSON": {}, "another format": {"otherData": {"jdp": 2}},
                 "no events": {"otherData": {"jdp": 1}}}[how]  # fmt: skip
        path.write_bytes(gzip.compress(json.dumps(other).encode()))


@pytest.mark.parametrize("how", ["cut", "empty", "a changed byte", "not compressed",
                                 "a text as facts", "a list as event", "a list", "other JSON",
                                 "another format", "no events"])  # fmt: skip
def test_damaged_and_missing_processes_are_named_and_the_others_are_shown(how, tmp_path, capsys):
    profiled.write(
        tmp_path,
        two_ranks(num_processes=4),
        two_ranks(process_number=1, ranks=(2, 3), num_processes=4),
        two_ranks(process_number=2, ranks=(4, 5), num_processes=4, run="b", start_ns=1),
    )
    damaged(trace_file.path_of(tmp_path, 1), how)
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["rank"] for each in found["ranks"]) == [0, 1]
    assert sorted(note[:10] for note in found["notes"]) == [
        "process 1:", "process 2:", "process 3:"
    ]  # fmt: skip


def test_a_rank_without_steps_is_named(tmp_path):
    trace = two_ranks()
    slices = [each for each in trace.slices if each.rank != 1]
    profiled.write(tmp_path, trace_file.ProcessTrace(trace.facts, slices))
    found = summarize(tmp_path)
    assert [each.rank for each in found.ranks] == [0]
    assert [note for note in found.notes if "process 0" in note and "ranks 1" in note]


def test_a_folder_without_a_profile_is_an_error(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    profiled.write(tmp_path, two_ranks())
    damaged(trace_file.path_of(tmp_path, 0), "cut")
    assert main(["timeline", str(tmp_path)]) == 1
    assert "process 0" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "none")]) == 2
