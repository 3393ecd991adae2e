// Ranks in several processes: equal sums, and errors when one of the processes dies.

#include <dirent.h>
#include <fcntl.h>
#include <sys/wait.h>

#include <chrono>

#include "process.h"
#include "progress.h"
#include "testing.h"

namespace jdp {
namespace {

struct Memory {
  int pid;
  int fd;
  uint64_t nonce;
  int num_ranks;
};

Memory make(int num_ranks) {
  Memory memory{getpid(), -1, 0, num_ranks};
  memory.fd = Segment::create(num_ranks, &memory.nonce);
  CHECK(memory.fd >= 0);
  return memory;
}

void attach(const Memory& memory, const std::vector<int>& ranks) {
  std::string why;
  auto segment =
      Segment::attach(memory.pid, memory.fd, memory.nonce, memory.num_ranks, ranks, &why);
  if (!segment) describe(why);
  CHECK(segment);
  attach_communicator(1, 0, segment);
}

pid_t start(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  end_with_parent();
  body();
  std::exit(0);
}

// Marks that processes give each other, so that no test depends on how fast they run.
class Marks {
 public:
  Marks() { CHECK(pipe(ends_) == 0); }
  ~Marks() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void give(int count = 1) const {
    for (int i = 0; i < count; ++i) CHECK(write(ends_[1], "x", 1) == 1);
  }
  // Waits for so many marks, and uses them up.
  void take(int count = 1) const {
    char mark;
    for (int i = 0; i < count; ++i) CHECK(read(ends_[0], &mark, 1) == 1);
  }

 private:
  int ends_[2];
};

// Opens every file of this process again, and closes it.
void close_again(const std::string& folder) {
  DIR* files = opendir(folder.c_str());
  CHECK(files);
  while (const dirent* entry = readdir(files)) {
    const int fd = open((folder + "/" + entry->d_name).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) close(fd);
  }
  closedir(files);
}

void expect_success(pid_t child) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_processes_with_one_and_with_several_ranks_get_the_sum() {
  const std::vector<std::vector<std::vector<int>>> hosts = {
      {{0}, {1}}, {{0, 1}, {2, 3}}, {{2, 0}, {1}}};
  for (const auto& processes : hosts) {
    int num_ranks = 0;
    for (const auto& ranks : processes) num_ranks += static_cast<int>(ranks.size());
    const Memory memory = make(num_ranks);
    std::vector<pid_t> children;
    for (const std::vector<int>& ranks : processes) {
      children.push_back(start([&] {
        attach(memory, ranks);
        on_ranks(ranks, [&](int rank) {
          for (int step = 0; step < 12; ++step) {
            const Way way = kWays[2 + step % 2];
            Leaves<float> leaves(rank, {1, 300, 40001 * (step % 4)}, step % 3 == 0, step % 2);
            CHECK(collective(call_of(way, rank, num_ranks, step % 5), leaves.bucket()).ok());
            leaves.check(num_ranks);
          }
        });
      }));
    }
    for (pid_t child : children) expect_success(child);
    close(memory.fd);
  }
}

// The rank that comes last waits for nobody, and a process waits once, whatever its number of
// ranks.
void test_a_process_counts_how_long_it_waits_for_others() {
  constexpr int64_t kLateNs = 200'000'000;
  constexpr int kSteps = 2;
  const std::vector<std::vector<int>> processes = {{0, 2}, {1, 4}, {3}};
  for (const Way& way : {kWays[2], kWays[3]}) {
    const Memory memory = make(5);
    std::vector<pid_t> children;
    for (const std::vector<int>& ranks : processes) {
      children.push_back(start([&] {
        Progress progress{};
        set_progress(&progress);
        attach(memory, ranks);
        const int64_t begin = now_ns();
        on_ranks(ranks, [&](int rank) {
          for (int step = 0; step < kSteps; ++step) {
            Leaves<float> leaves(rank, {300}, true, 0);
            if (rank == 2) std::this_thread::sleep_for(std::chrono::nanoseconds(kLateNs));
            CHECK(collective(call_of(way, rank, 5), leaves.bucket()).ok());
          }
        });
        const int64_t waited = progress.waited_ns.load();
        if (ranks[0] == 0) {
          CHECK(waited == 0);
        } else {
          CHECK(waited > kSteps * kLateNs / 2 && waited <= now_ns() - begin);
        }
      }));
    }
    for (pid_t child : children) expect_success(child);
    close(memory.fd);
  }
}

// Rank 2 is killed in the middle of many steps; the others must not wait for the deadline.
void test_a_killed_process_is_named_at_once() {
  for (const Way& way : {kWays[2], kWays[3]}) {
    const Memory memory = make(3);
    const Marks has_summed;
    std::vector<pid_t> children;
    for (int rank : range(3)) {
      children.push_back(start([&] {
        attach(memory, {rank});
        set_timeout_s(1000);  // longer than the test may take
        Status status;
        for (int step = 0; status.ok(); ++step) {
          Leaves<float> leaves(rank, {5000}, true, 0);
          status = collective(call_of(way, rank, 3), leaves.bucket());
          if (step == 0) has_summed.give();
        }
        CHECK(status.code == Code::kDeadlineExceeded);
        CHECK(contains(status.message, "for rank 2, whose process has ended"));
      }));
    }
    has_summed.take(3);
    // waitpid only after the others have ended: a zombie must count as dead.
    kill(children[2], SIGKILL);
    expect_success(children[0]);
    expect_success(children[1]);
    waitpid(children[2], nullptr, 0);
    close(memory.fd);
  }
}

void test_one_process_ends_the_waits_of_all() {
  const Memory memory = make(3);
  std::vector<pid_t> children;
  for (int rank : {0, 1}) {
    children.push_back(start([&] {
      attach(memory, {rank});
      Leaves<float> leaves(rank, {10}, true, 0);
      const Status status = collective(call_of(kWays[2], rank, 3), leaves.bucket());
      CHECK(status.code == Code::kAborted);
      CHECK(contains(status.message, "rank 2 gives up"));
    }));
  }
  children.push_back(start([&] {
    attach(memory, {2});
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop_communicators("rank 2 gives up");
  }));
  for (pid_t child : children) expect_success(child);
  close(memory.fd);
}

// A launcher that has only the file sets the word at byte 64.
void test_the_abort_word_ends_waits() {
  const Memory memory = make(2);
  const pid_t child = start([&] {
    attach(memory, {0});
    Leaves<float> leaves(0, {10}, true, 0);
    const Status status = collective(call_of(kWays[2], 0, 2), leaves.bucket());
    CHECK(status.code == Code::kAborted);
    CHECK(contains(status.message, "another process ended this communicator"));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const uint32_t stop = 1;
  CHECK(pwrite(memory.fd, &stop, sizeof stop, 64) == sizeof stop);
  expect_success(child);
  close(memory.fd);
}

void test_a_segment_that_was_not_announced_is_refused() {
  const Memory memory = make(2);
  expect_success(start([&] {
    std::string why;
    CHECK(!Segment::attach(memory.pid, memory.fd, memory.nonce + 1, 2, {0}, &why));
    CHECK(contains(why, "not the announced segment"));
    CHECK(!Segment::attach(memory.pid, memory.fd, memory.nonce, 3, {0}, &why));
    CHECK(contains(why, "not a segment for 3 ranks"));
    CHECK(!Segment::attach(memory.pid, 1000, memory.nonce, 2, {0}, &why));
    CHECK(contains(why, "cannot open"));
    CHECK(!Segment::attach(memory.pid, memory.fd, memory.nonce, 2, {2}, &why));
    CHECK(contains(why, "cannot attach rank 2"));
  }));
  close(memory.fd);
}

void test_a_seat_is_taken_once() {
  const Memory memory = make(2);
  const pid_t first = start([&] {
    attach(memory, {1});
    pause();
  });
  std::string why;
  auto segment = Segment::attach(memory.pid, memory.fd, memory.nonce, 2, {0}, &why);
  while (segment->seat(1).owner.load() == 0) std::this_thread::yield();
  expect_success(start([&] {
    CHECK(!Segment::attach(memory.pid, memory.fd, memory.nonce, 2, {1}, &why));
    CHECK(contains(why, "cannot attach rank 1"));
  }));
  CHECK(!segment->is_gone(1));
  kill(first, SIGKILL);
  waitpid(first, nullptr, 0);
  CHECK(segment->is_gone(1));
}

// Any code in a process may open and close all of its files, for example by reading /proc/self/fd.
void test_a_process_that_closes_the_file_again_lives_on() {
  const Memory memory = make(2);
  std::vector<pid_t> children;
  for (int rank : {0, 1}) {
    children.push_back(start([&] {
      attach(memory, {rank});
      for (int step = 0; step < 20; ++step) {
        if (rank == 1) {
          close_again("/proc/self/fd");
          std::this_thread::sleep_for(
              std::chrono::milliseconds(30));  // rank 0 checks rank 1 meanwhile
        }
        Leaves<float> leaves(rank, {10}, true, 0);
        const Status status = collective(call_of(kWays[2], rank, 2), leaves.bucket());
        if (!status.ok()) describe(status.message);
        CHECK(status.ok());
        leaves.check(2);
      }
    }));
  }
  for (pid_t child : children) expect_success(child);
  close(memory.fd);
}

// A forked child inherits all files and memory of its parent, and lives on.
void test_a_killed_process_is_gone_though_its_child_lives() {
  const Memory memory = make(2);
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t first = start([&] {
    attach(memory, {1});
    const pid_t child = fork();
    if (child == 0) {
      for (;;) pause();
    }
    CHECK(write(ends[1], &child, sizeof child) == sizeof child);
    pause();
  });
  pid_t grandchild = 0;
  CHECK(read(ends[0], &grandchild, sizeof grandchild) == sizeof grandchild);
  std::string why;
  auto segment = Segment::attach(memory.pid, memory.fd, memory.nonce, 2, {0}, &why);
  CHECK(segment && !segment->is_gone(1));
  kill(first, SIGKILL);
  while (!segment->is_gone(1)) std::this_thread::yield();
  CHECK(kill(grandchild, 0) == 0);
  kill(grandchild, SIGKILL);
  waitpid(first, nullptr, 0);
}

void test_a_reused_pid_counts_as_ended() {
  const Process me = this_process();
  CHECK(me != 0 && pid_of(me) == getpid());
  CHECK(!has_ended(me));
  CHECK(has_ended(me + 1));
  CHECK(!has_ended(me));
}

// A process is alive as long as any of its threads runs.
void test_a_process_whose_first_thread_has_ended_lives_on() {
  const Memory memory = make(2);
  static const Marks was_looked_at;  // pthread_exit destroys what is on the stack
  const pid_t child = start([&] {
    attach(memory, {1});
    std::thread([] {
      was_looked_at.take();
      _exit(0);
    }).detach();
    pthread_exit(nullptr);
  });
  std::string why;
  auto segment = Segment::attach(memory.pid, memory.fd, memory.nonce, 2, {0}, &why);
  while (segment->seat(1).owner.load() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(!segment->is_gone(1));
  was_looked_at.give();
  while (!segment->is_gone(1)) std::this_thread::yield();
  waitpid(child, nullptr, 0);
}

bool gives_sums(int rank) {
  Leaves<float> leaves(rank, {300, 400001}, true, 0);
  const Status status = collective(call_of(kWays[2], rank, 3), leaves.bucket());
  if (status.ok()) leaves.check(3);
  return status.ok();
}

void renew() {
  std::string why;
  const bool is_done = renew_communicators(&why);
  if (!is_done) describe(why);
  CHECK(is_done);
}

// Rank 2 is late, and all ranks restart, in different orders and a different number of times each.
void test_all_processes_restart_after_a_failure() {
  for (int late : {0, 1, 2}) {
    const Memory memory = make(3);
    const Marks has_failed;
    std::vector<pid_t> children;
    for (int rank : range(3)) {
      children.push_back(start([&] {
        attach(memory, {rank});
        for (int failures = 0; failures < 3; ++failures) {
          CHECK(gives_sums(rank) && gives_sums(rank));
          set_timeout_s(0.3);
          if (rank == 2) has_failed.take(2);
          CHECK(!gives_sums(rank));
          if (rank != 2) has_failed.give();
          CHECK(!gives_sums(rank));  // the failure persists
          set_timeout_s(30);
          if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
          for (int times = 0; times <= (rank + failures) % 3; ++times) renew();
          // A rank whose peer has restarted once more gets an error, and restarts too.
          while (!gives_sums(rank)) renew();
        }
      }));
    }
    for (pid_t child : children) expect_success(child);
    close(memory.fd);
  }
}

// The creator of the latest segment has ended: the others create another one.
void test_restart_without_the_creator_of_the_memory() {
  const Memory memory = make(3);
  const Marks is_over, has_renewed[2];
  std::vector<pid_t> children;
  for (int rank : {0, 1}) {
    children.push_back(start([&] {
      attach(memory, {rank});
      is_over.take();
      renew();
      has_renewed[rank].give();
      has_renewed[1 - rank].take();
      set_timeout_s(2);
      Leaves<float> leaves(rank, {10}, true, 0);
      const Status status = collective(call_of(kWays[2], rank, 3), leaves.bucket());
      CHECK(contains(status.message, "s for rank 2: ended"));
    }));
  }
  expect_success(start([&] {
    attach(memory, {2});
    renew();
  }));
  is_over.give(2);
  for (pid_t child : children) expect_success(child);
  close(memory.fd);
}

void test_a_process_that_did_not_restart_gets_an_error() {
  const Memory memory = make(2);
  attach(memory, {0});
  expect_success(start([&] {
    detach_communicators();
    attach(memory, {1});
    renew();
  }));
  Leaves<float> leaves(0, {10}, true, 0);
  const Status status = collective(call_of(kWays[2], 0, 2), leaves.bucket());
  CHECK(status.code == Code::kAborted);
  CHECK(contains(status.message, "must call reset()"));
  reset();
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::end_with_parent();
  jdp::test_processes_with_one_and_with_several_ranks_get_the_sum();
  jdp::test_a_process_counts_how_long_it_waits_for_others();
  jdp::test_a_killed_process_is_named_at_once();
  jdp::test_one_process_ends_the_waits_of_all();
  jdp::test_the_abort_word_ends_waits();
  jdp::test_a_segment_that_was_not_announced_is_refused();
  jdp::test_a_seat_is_taken_once();
  jdp::test_a_process_that_closes_the_file_again_lives_on();
  jdp::test_a_killed_process_is_gone_though_its_child_lives();
  jdp::test_a_reused_pid_counts_as_ended();
  jdp::test_all_processes_restart_after_a_failure();
  jdp::test_restart_without_the_creator_of_the_memory();
  jdp::test_a_process_that_did_not_restart_gets_an_error();
  jdp::test_a_process_whose_first_thread_has_ended_lives_on();
}
