"""Random faults, one after the other, change nothing in what is learnt."""

import pytest
from victim import COMMIT_EVERY

from benchmarks.elastic import faults


@pytest.mark.thorough
@pytest.mark.xdist_group("processes")
def test_chaos_costs_no_bits_and_no_row(tmp_path, oracle):
    outcome = faults.chaos(tmp_path, oracle, num_faults=6, seed=1, pace=faults.QUICK)
    assert len(outcome.incidents) == 6
    assert not outcome.wrong_bits + outcome.miscounted
    assert max(outcome.lost_steps) <= 2 * COMMIT_EVERY
    for section in (faults.run_section(outcome), faults.kinds_section(outcome)):
        print(faults.report.table(section))
