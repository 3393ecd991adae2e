// Failures of an all-reduce: on all ranks, soon, and with the reason.

#include "testing.h"

namespace jdp {
namespace {

Status reduce_one(const Call& call, int64_t count = 1000) {
  std::vector<float> values(count);
  return collective(call, Bucket(Type::kF32, {{values.data(), values.data(), count}}));
}

void test_missing_ranks_are_named_and_late_ones_fail() {
  for (const Way& way : kWays) {
    make_segment(4);
    on_ranks(range(4), [&](int rank) { CHECK(reduce_one(call_of(way, rank, 4)).ok()); });
    set_timeout_s(0.2);
    const Stopwatch watch;
    on_ranks({0, 1}, [&](int rank) {
      const Status status = reduce_one(call_of(way, rank, 4, 3, 2));
      CHECK(status.code == Code::kDeadlineExceeded);
      CHECK(contains(status.message, "bucket 3, call 2: rank "));
      CHECK(contains(status.message, " s for ranks 2, 3: ended"));
    });
    CHECK(watch.elapsed_s() >= 0.2 && watch.elapsed_s() < 1.2);
    set_timeout_s(30);
    on_ranks({2, 3}, [&](int rank) {
      const Status status = reduce_one(call_of(way, rank, 4, 3, 2));
      CHECK(status.code == Code::kDeadlineExceeded);
      CHECK(contains(status.message, "for ranks 2, 3"));
    });
    CHECK(watch.elapsed_s() < 2);
    reset();
  }
}

void test_the_next_run_of_a_process_works_after_a_failure() {
  const Way way = kWays[0];
  set_timeout_s(0.05);
  CHECK(!reduce_one(call_of(way, 0, 2)).ok());
  on_ranks(range(2), [&](int rank) { CHECK(reduce_one(call_of(way, rank, 2, 3, 2)).ok()); });
  reset();
}

void test_abort_ends_waits_with_its_reason() {
  for (const Way& way : kWays) {
    make_segment(2);
    const Stopwatch watch;
    std::thread aborter([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      abort_waits("the launcher is leaving");
    });
    const Status status = reduce_one(call_of(way, 0, 2));
    aborter.join();
    CHECK(status.code == Code::kAborted);
    CHECK(contains(status.message, "the launcher is leaving"));
    CHECK(watch.elapsed_s() < 2);
    reset();
  }
}

void test_ranks_that_disagree_all_fail() {
  const auto differing = [](const Way& way, int rank, int what) {
    Call call = call_of(way, rank, 3);
    if (rank == 2 && what == 0) call.scale = 0.25;
    if (rank == 2 && what == 1) call.bucket = 4;
    return call;
  };
  for (const Way& way : kWays) {
    for (int what = 0; what < 3; ++what) {
      // Within a process, another bucket number is another rendezvous, which only the deadline
      // ends.
      if (way.communicator == 0 && what == 1) continue;
      make_segment(3);
      const Stopwatch watch;
      on_ranks(range(3), [&](int rank) {
        const int64_t count = what == 2 && rank == 0 ? 100000 : 1000;
        const Status status = reduce_one(differing(way, rank, what), count);
        CHECK(status.code == Code::kInvalidArgument);
        CHECK(contains(status.message, "disagree"));
      });
      CHECK(watch.elapsed_s() < 5);
      reset();
    }
  }
}

void test_types_that_differ_are_a_disagreement() {
  for (const Way& way : kWays) {
    make_segment(2);
    on_ranks(range(2), [&](int rank) {
      std::vector<float> values(8);
      const Type type = rank == 0 ? Type::kF32 : Type::kU32;
      const Bucket bucket(type, {{values.data(), values.data(), 8}});
      CHECK(collective(call_of(way, rank, 2), bucket).code == Code::kInvalidArgument);
    });
    reset();
  }
}

void test_a_rank_that_joins_twice_is_an_error() {
  const Way way = kWays[0];
  on_ranks(range(2), [&](int) {
    const Status status = reduce_one(call_of(way, 1, 3));
    CHECK(status.code == Code::kInvalidArgument);
    CHECK(contains(status.message, "rank 1 joined twice"));
  });
  reset();
}

void test_ranks_and_communicators_that_do_not_exist_are_errors() {
  CHECK(reduce_one(call_of(kWays[0], 2, 2)).code == Code::kInvalidArgument);
  CHECK(reduce_one(call_of(kWays[0], -1, 2)).code == Code::kInvalidArgument);
  const Status status = reduce_one(call_of(kWays[2], 0, 2));
  CHECK(status.code == Code::kInvalidArgument);
  CHECK(contains(status.message, "has not attached rank 0 of 2 to communicator 1"));
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::end_with_parent();
  jdp::test_missing_ranks_are_named_and_late_ones_fail();
  jdp::test_the_next_run_of_a_process_works_after_a_failure();
  jdp::test_abort_ends_waits_with_its_reason();
  jdp::test_ranks_that_disagree_all_fail();
  jdp::test_types_that_differ_are_a_disagreement();
  jdp::test_a_rank_that_joins_twice_is_an_error();
  jdp::test_ranks_and_communicators_that_do_not_exist_are_errors();
}
