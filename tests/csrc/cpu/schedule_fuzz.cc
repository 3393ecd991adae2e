// Random calls with random schedules: compares every element of every rank with the exact sum.
//
// A scenario is a sequence of calls of one group of ranks, which are threads of this process or
// spread over several processes. The seed determines the scenario; the schedule also depends on the
// machine, so a seed that failed may take some seconds to fail again.
//
// Args: seconds to run, and the first seed (0: random).

#include <sys/wait.h>

#include <chrono>
#include <random>

#include "fuzzing.h"
#include "testing.h"

namespace jdp {
namespace {

using Generator = std::mt19937_64;

int64_t between(Generator& generator, int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(generator);
}

bool one_in(Generator& generator, int64_t n) { return between(generator, 1, n) == 1; }

struct Step {
  Type type;
  Operation operation;
  std::vector<int64_t> counts;  // elements of each leaf, in an all-reduce
  std::vector<Cut> cuts;        // of each leaf, in the other operations
  bool in_place;
  int shift;
  Algorithm algorithm;
  int32_t bucket;
  int64_t salt;
};

struct Scenario {
  uint64_t seed;
  int64_t communicator;
  std::vector<std::vector<int>> processes;  // the ranks of each; a single process is this one
  int num_ranks;
  uint64_t first_round;  // initial value of the counters
  std::vector<Step> steps;
  // Some ranks are slow at one stage; all ranks pause now and then.
  Stage slow_stage;
  std::vector<bool> is_slow;
  int slow_us;
  int pause_once_in;
};

int64_t bytes_of(Type type) {
  return visit(type, [](auto zero) { return static_cast<int64_t>(sizeof zero); });
}

// Up to nine rounds; the last one mostly does not fill its slot.
int64_t random_count(Generator& generator, Type type) {
  const int64_t width = kSlotBytes / bytes_of(type);
  if (one_in(generator, 6)) return between(generator, 0, width / 16 + 1);  // one shot
  const int64_t rounds = between(generator, 0, 8);
  const int64_t rest =
      one_in(generator, 4) ? between(generator, -1, 1) : between(generator, 0, width);
  return std::max<int64_t>(0, rounds * width + rest);
}

std::vector<int64_t> random_split(Generator& generator, int64_t count) {
  std::vector<int64_t> counts;
  for (int64_t more = between(generator, 0, 3); more > 0; --more) {
    counts.push_back(one_in(generator, 4) ? 0 : between(generator, 0, count));
    count -= counts.back();
  }
  counts.push_back(count);
  return counts;
}

int64_t random_divisor(Generator& generator, int64_t count) {
  std::vector<int64_t> divisors;
  for (int64_t low = 1; low * low <= count; ++low) {
    if (count % low == 0) divisors.insert(divisors.end(), {low, count / low});
  }
  return divisors[between(generator, 0, static_cast<int64_t>(divisors.size()) - 1)];
}

// Cuts `count` elements of a slice: along the first dim, or into short runs. What arrives in an
// all-to-all is cut in the same way or in another one. A reduce-scatter leaves some leaves whole.
Cut random_cut(Generator& generator, int64_t count) {
  if (count == 0) return {1, 0};
  const int64_t run =
      one_in(generator, 2)
          ? count
          : between(generator, 1, std::min<int64_t>(count, one_in(generator, 2) ? 9 : 999));
  const int64_t num_rows = count / run;
  const int64_t out_run = one_in(generator, 3) ? 0 : random_divisor(generator, num_rows * run);
  return {num_rows, run, out_run, one_in(generator, 4)};
}

Step random_step(Generator& generator, int64_t index, int num_ranks) {
  Step step;
  step.type = static_cast<Type>(between(generator, 0, 7));
  step.operation = static_cast<Operation>(between(generator, 0, 3));
  const int64_t count = random_count(generator, step.type);
  step.counts = random_split(generator, count);
  const int64_t of_slices = one_in(generator, 3) ? count : count / num_ranks;
  for (int64_t slice : random_split(generator, of_slices)) {
    step.cuts.push_back(random_cut(generator, slice));
  }
  step.in_place = one_in(generator, 2);
  step.shift = static_cast<int>(between(generator, 0, 3));
  const bool is_ring = step.operation == Operation::kAllReduce && one_in(generator, 4);
  step.algorithm = is_ring ? Algorithm::kRing : Algorithm::kDirect;
  step.bucket = static_cast<int32_t>(between(generator, 0, 2));
  step.salt = 5 * index + 1;
  return step;
}

uint64_t random_first_round(Generator& generator) {
  const uint64_t wraps[] = {0, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{3} << 32};
  const uint64_t wrap = wraps[between(generator, 0, 3)];
  return wrap == 0 ? 0 : wrap - static_cast<uint64_t>(between(generator, 0, 20));
}

Scenario random_scenario(uint64_t seed) {
  Generator generator(seed);
  Scenario it;
  it.seed = seed;
  it.num_ranks = static_cast<int>(one_in(generator, 12) ? 1 : between(generator, 2, 5));
  it.communicator = one_in(generator, 4) ? 0 : 1;
  int64_t num_processes = 1;
#ifndef __SANITIZE_THREAD__  // ThreadSanitizer sees one process only
  if (it.communicator != 0) num_processes = between(generator, 1, it.num_ranks);
#endif
  it.processes.resize(num_processes);
  for (int rank = 0; rank < it.num_ranks; ++rank) {
    const int64_t where = rank < num_processes ? rank : between(generator, 0, num_processes - 1);
    it.processes[where].push_back(rank);
    it.is_slow.push_back(one_in(generator, 3));
  }
  it.first_round = random_first_round(generator);
  for (int64_t left = between(generator, 1, 12); left > 0; --left) {
    it.steps.push_back(random_step(generator, left, it.num_ranks));
  }
  it.slow_stage = static_cast<Stage>(between(generator, 0, 4));
  it.slow_us = static_cast<int>(between(generator, 0, 3) * 100);
  it.pause_once_in = static_cast<int>(between(generator, 4, 64));
  return it;
}

std::string text_of(const Scenario& it) {
  std::string text = "seed " + std::to_string(it.seed) + ": " + std::to_string(it.num_ranks) +
                     " ranks in " + std::to_string(it.processes.size()) + " processes, " +
                     (it.communicator == 0 ? "in process" : "segment") + ", first round " +
                     std::to_string(it.first_round) + "\n";
  for (size_t i = 0; i < it.steps.size(); ++i) {
    const Step& step = it.steps[i];
    text += "  step " + std::to_string(i) + ": " +
            (step.algorithm == Algorithm::kRing ? "ring" : "direct") + ", operation " +
            std::to_string(static_cast<int>(step.operation)) + ", bucket " +
            std::to_string(step.bucket) + ", " + std::to_string(bytes_of(step.type)) +
            " bytes an element (type " + std::to_string(static_cast<int>(step.type)) + "), leaves";
    if (step.operation == Operation::kAllReduce) {
      for (int64_t count : step.counts) text += " " + std::to_string(count);
    } else {
      for (const Cut& cut : step.cuts) {
        text += " " + std::to_string(cut.num_rows) + "x" + std::to_string(cut.run) + ">" +
                std::to_string(cut.out_run) + (cut.stays_whole ? " (whole)" : "");
      }
    }
    text += "\n";
  }
  return text;
}

// The pauses of the rank that this thread runs.
struct Pauses {
  const Scenario* scenario = nullptr;
  int rank = -1;
  bool is_slow = false;
  Generator generator;
};
thread_local Pauses pauses;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Returns what is wrong with the result; "" if nothing.
template <typename Kind>
std::string run_call(const Call& call, Kind&& leaves) {
  const Status status = collective(call, leaves.bucket());
  return status.ok() ? leaves.first_wrong(call.num_ranks) : status.message;
}

void run_step(const Scenario& it, int rank, size_t index) {
  const Step& step = it.steps[index];
  const Way way{"", it.communicator, step.algorithm};
  visit(step.type, [&](auto zero) {
    using T = decltype(zero);
    // One run for each call, like a program that is executed again; or one run for all calls.
    const int64_t run = it.seed % 2 == 0 ? 1 : static_cast<int64_t>(index);
    Call call = call_of(way, rank, it.num_ranks, step.bucket, run);
    call.operation = step.operation;
    const std::string wrong =
        step.operation == Operation::kAllReduce
            ? run_call(call, Leaves<T>(rank, step.counts, step.in_place, step.shift, step.salt))
            : run_call(call, Shards<T>(step.operation, rank, it.num_ranks, step.cuts, step.shift,
                                       step.salt, step.in_place));
    if (wrong.empty()) return;
    describe("rank " + std::to_string(rank) + ", step " + std::to_string(index) + ": " + wrong +
             "\n" + text_of(it));
    std::abort();
  });
}

void run_rank(const Scenario& it, int rank) {
  pauses.scenario = &it;
  pauses.rank = rank;
  pauses.is_slow = it.is_slow[rank];
  pauses.generator.seed(it.seed * 8 + rank);
  for (size_t index = 0; index < it.steps.size(); ++index) run_step(it, rank, index);
  pauses.scenario = nullptr;
}

struct Memory {
  int fd;
  uint64_t nonce;
  std::shared_ptr<Segment> segment;
};

std::shared_ptr<Segment> attached(const Scenario& it, pid_t maker, const Memory& memory,
                                  const std::vector<int>& ranks) {
  std::string why;
  auto segment = Segment::attach(maker, memory.fd, memory.nonce, it.num_ranks, ranks, &why);
  if (!segment) describe(why);
  CHECK(segment);
  return segment;
}

void set_counters(Segment& segment, uint64_t round) {
  for (int rank = 0; rank < segment.num_ranks(); ++rank) {
    Seat& seat = segment.seat(rank);
    seat.num_rounds = round;
    for (Counter* counter :
         {&seat.sent, &seat.reduced, &seat.mailbox.sent, &seat.mailbox.received}) {
      counter->value.store(static_cast<uint32_t>(round));
    }
  }
}

void run_in_this_process(const Scenario& it) {
  if (it.communicator != 0) {
    Memory memory{};
    memory.fd = Segment::create(it.num_ranks, &memory.nonce);
    auto segment = attached(it, getpid(), memory, range(it.num_ranks));
    set_counters(*segment, it.first_round);
    attach_communicator(1, 0, segment);
  }
  on_ranks(range(it.num_ranks), [&](int rank) { run_rank(it, rank); });
  reset();
}

void run_in_processes(const Scenario& it) {
  Memory memory{};
  memory.fd = Segment::create(it.num_ranks, &memory.nonce);
  const pid_t maker = getpid();
  const auto segment = attached(it, maker, memory, {});
  set_counters(*segment, it.first_round);
  std::vector<pid_t> children;
  for (const std::vector<int>& ranks : it.processes) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      end_with_parent();
      attach_communicator(1, 0, attached(it, maker, memory, ranks));
      on_ranks(ranks, [&](int rank) { run_rank(it, rank); });
      _exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

std::string read_to_end(int fd) {
  std::string text;
  char part[256];
  for (ssize_t size; (size = read(fd, part, sizeof part)) > 0;) text.append(part, size);
  return text;
}

std::atomic<bool> holds_tile_for_ever{false};

// A rank must not return while another thread writes into its memory, and must not wait forever.
void test_a_tile_that_is_never_done_ends_the_process_and_names_its_rank() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    end_with_parent();
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    set_timeout_s(1.0);  // in which all three ranks arrive, also on a busy machine
    holds_tile_for_ever = true;
    on_ranks(range(3), [&](int rank) {
      std::vector<float> values(1);
      pauses.rank = rank;
      (void)collective(call_of(kWays[0], rank, 3),
                       Bucket(Type::kF32, {{values.data(), values.data(), 1}}));
    });
    _exit(0);
  }
  close(ends[1]);
  const std::string said = read_to_end(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  const std::string held = "held by rank ";
  CHECK(contains(said, held));
  const std::string rank = said.substr(said.find(held) + held.size(), 1);
  CHECK(contains(said, "s for rank " + rank + ":"));
  CHECK(contains(said, "a thread of rank " + rank + " hangs"));
  close(ends[0]);
}

}  // namespace

void pause_at(Stage stage) {
  if (stage == Stage::kTile && holds_tile_for_ever.exchange(false)) {
    describe("held by rank " + std::to_string(pauses.rank));
    for (;;) pause();
  }
  if (!pauses.scenario) return;
  const Scenario& it = *pauses.scenario;
  if (pauses.is_slow && stage == it.slow_stage) sleep_us(it.slow_us);
  if (!one_in(pauses.generator, it.pause_once_in)) return;
  if (one_in(pauses.generator, 2)) {
    std::this_thread::yield();
  } else {
    sleep_us(between(pauses.generator, 0, 200));
  }
}

}  // namespace jdp

int main(int num_arguments, char** arguments) {
  using namespace jdp;
  end_with_parent();
  CHECK(num_arguments == 3);
  const double seconds = std::atof(arguments[1]);
  uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
  if (seed == 0) seed = std::random_device()();
  std::printf("first seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  test_a_tile_that_is_never_done_ends_the_process_and_names_its_rank();
  set_timeout_s(30);
  const Stopwatch watch;
  int64_t num_scenarios = 0;
  for (; num_scenarios == 0 || watch.elapsed_s() < seconds; ++num_scenarios) {
    const Scenario scenario = random_scenario(seed + num_scenarios);
    scenario.processes.size() == 1 ? run_in_this_process(scenario) : run_in_processes(scenario);
  }
  std::printf("%lld scenarios\n", static_cast<long long>(num_scenarios));
}
