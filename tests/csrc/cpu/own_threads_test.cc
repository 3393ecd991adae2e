// Threads of jdp's own: no task waits for another to end, and each has the float mode of its
// caller.

#include "own_threads.h"

#include "float_mode.h"
#include "testing.h"

namespace jdp {
namespace {

struct Meeting {
  Counter begun, ended;
  std::atomic<uint32_t> num_begun{0}, num_ended{0};
};

// Each task waits until all have begun, so that one that stood behind another would never begin.
void test_tasks_that_wait_for_each_other_all_run() {
  constexpr uint32_t kNumTasks = 40;
  for (int round = 0; round < 20; ++round) {
    const auto meeting = std::make_shared<Meeting>();
    for (uint32_t i = 0; i < kNumTasks; ++i) {
      run_on_own_thread([meeting] {
        if (++meeting->num_begun == kNumTasks) advance(meeting->begun, 1);
        while (!wait_briefly(meeting->begun, 1)) continue;
        if (++meeting->num_ended == kNumTasks) advance(meeting->ended, 1);
      });
    }
    const Stopwatch watch;
    while (!wait_briefly(meeting->ended, 1)) CHECK(!watch.expired());
  }
}

#ifdef __SSE2__
void test_a_task_has_the_float_mode_of_its_caller() {
  for (bool flushes : {true, false, true}) {
    flushes_subnormals = flushes;
    set_float_mode();
    const FloatMode of_caller = float_mode();
    const auto is_done = std::make_shared<std::atomic<bool>>(false);
    run_on_own_thread([is_done, of_caller] {
      CHECK(float_mode() == of_caller);
      *is_done = true;
    });
    while (!*is_done) std::this_thread::yield();
  }
}
#endif

}  // namespace
}  // namespace jdp

int main() {
  jdp::end_with_parent();
  jdp::set_timeout_s(30);
  jdp::test_tasks_that_wait_for_each_other_all_run();
#ifdef __SSE2__
  jdp::test_a_task_has_the_float_mode_of_its_caller();
#endif
}
