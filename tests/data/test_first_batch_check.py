"""First batches that do not fit together are an error that names a process."""

import pytest

from jdp.data.batch_checks import FirstBatch, require_agreement, why_repeated

USUAL = FirstBatch("3f2a", 2, "['x'] float32[4, 8]")


def test_equal_reports_agree():
    require_agreement({0: USUAL})
    # The text may differ: a process with more ranks has more rows.
    require_agreement({0: USUAL, 1: USUAL._replace(text="['x'] float32[8, 8]")})
    end = FirstBatch("", 0, "no batches")
    require_agreement({0: end, 1: end})


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_process_is_named_with_both_numbers_of_rows(odd):
    reports = dict.fromkeys(range(3), USUAL)
    reports[odd] = USUAL._replace(rows_per_rank=3, text="['x'] float32[6, 8]")
    other = 1 if odd == 0 else 0
    message = (
        rf"process {odd} .*3.*\['x'\] float32\[6, 8\].*"
        rf"process {other} .*2.*\['x'\] float32\[4, 8\].*JDP209"
    )
    with pytest.raises(ValueError, match=message):
        require_agreement(reports)


def test_other_shapes_are_named():
    wide = USUAL._replace(digest="77", text="['x'] float32[4, 9]")
    with pytest.raises(ValueError, match=r"process 1 .*\[4, 9\].*, process 0 .*\[4, 8\]"):
        require_agreement({0: USUAL, 1: wide})


def test_a_process_without_batches_is_named():
    with pytest.raises(ValueError, match=r"process 1 .* 0 rows .*JDP209"):
        require_agreement({0: USUAL, 1: FirstBatch("", 0, "no batches")})


def test_arguments_that_differ_are_named_alone():
    usual = USUAL._replace(text="Sampler(num_rows=9, seed=0), position=0, ['x'] float32[4, 8]")
    odd = usual._replace(digest="77", text=usual.text.replace("seed=0", "seed=1"))
    with pytest.raises(ValueError, match="process 1 has seed=1 .*process 0 has seed=0") as caught:
        require_agreement({0: usual, 1: odd})
    assert "num_rows" not in str(caught.value) and "JDP209" in str(caught.value)


def test_different_rows_of_processes_with_the_same_ranks_are_refused():
    places = (0, 7), (0, 7), (4, 5), (4, 6)  # of 2 ranks, each on the devices of 2 processes
    reports = [USUAL._replace(first_row=row, checksum=number) for row, number in places]
    with pytest.raises(ValueError, match="processes 2 and 3 .* different rows .*(?s:.*)JDP209"):
        require_agreement(dict(enumerate(reports)))
    require_agreement(dict(enumerate(reports[:3])))


# (first row in the global batch, checksum) of each process
@pytest.mark.parametrize(
    "parts, is_repeated",
    [
        ([(0, 5), (4, 5)], True),
        ([(0, 5), (4, 6)], False),
        ([(0, 5), (0, 5)], False),  # along another mesh axis processes share rows
        ([(0, 5), (0, 5), (4, 5), (4, 5)], True),
        ([(0, None), (4, None)], False),  # of jdp.batches
        ([(0, 5)], False),
    ],
)
def test_equal_rows_of_a_loader_on_processes_with_other_rows_are_reported(parts, is_repeated):
    reports = {
        process: USUAL._replace(first_row=first_row, checksum=checksum)
        for process, (first_row, checksum) in enumerate(parts)
    }
    text = why_repeated(reports)
    assert bool(text) == is_repeated
    assert text is None or "counts 2 times" in text
