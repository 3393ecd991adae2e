"""What counts as done is told from what was done and taken back."""

import lineage


def life(generation, restored, rows, launch=0):
    """Entries of a life with one row of each rank in each step: {step: [row of each rank]}."""
    who = {"launch": launch, "generation": generation}
    return [{**who, "rank": 0, "restored": restored}] + [
        {**who, "rank": rank, "step": step, "rows": [row]}
        for step, of_ranks in rows.items()
        for rank, row in enumerate(of_ranks)
    ]


def test_each_row_once_is_right():
    entries = life(0, 0, {1: [2, 0], 2: [1, 3], 3: [3, 2], 4: [1, 0]})
    assert not lineage.miscounted(entries, num_rows=4, num_steps=4)


def test_what_was_taken_back_does_not_count():
    entries = life(0, 0, {1: [0, 1], 2: [2, 3], 3: [9]}) + life(1, 1, {2: [2, 3]})
    assert not lineage.miscounted(entries, num_rows=4, num_steps=2)
    assert lineage.lost_steps(entries) == [1]


def test_what_is_not_made_again_after_it_was_taken_back_is_missing():
    entries = life(0, 0, {1: [0, 1], 2: [2, 3]}) + life(1, 1, {})
    assert "step 2 is missing" in lineage.miscounted(entries, num_rows=4, num_steps=2)


def test_a_second_launcher_counts_generations_anew():
    entries = life(3, 0, {1: [0, 1], 2: [0, 1]}) + life(0, 1, {2: [2, 3]}, launch=1)
    assert not lineage.miscounted(entries, num_rows=4, num_steps=2)


def test_a_row_that_counts_twice_or_never_is_named():
    entries = life(0, 0, {1: [0, 1], 2: [2, 1]})
    assert lineage.miscounted(entries, num_rows=4, num_steps=2) == [
        "row 1 counts 2 times in epoch 0",
        "row 3 counts 0 times in epoch 0",
    ]


def test_a_step_that_not_all_have_begun_is_not_lost():
    entries = life(0, 0, {1: [0, 1], 2: [2, 3], 3: [0]}) + life(1, 0, {1: [0, 1]})
    assert lineage.lost_steps(entries) == [2]


def test_a_rank_that_makes_a_step_twice_counts_its_rows_twice():
    entries = life(0, 0, {1: [0, 1], 2: [2, 3]})
    assert lineage.rows_by_step([*entries, entries[-1]]) == {1: [0, 1], 2: [2, 3, 3]}
    assert lineage.miscounted([*entries, entries[-1]], num_rows=4, num_steps=2)
