// Results of an all-reduce: the sum over ranks, with equal bits on all ranks.

#include <chrono>
#include <cmath>
#include <random>

#include "testing.h"

namespace jdp {
namespace {

template <typename T>
void gives_sums(const Way& way, int num_ranks, const std::vector<int64_t>& counts, bool in_place,
                int shift) {
  on_ranks(range(num_ranks), [&](int rank) {
    Leaves<T> leaves(rank, counts, in_place, shift);
    const Status status = collective(call_of(way, rank, num_ranks), leaves.bucket());
    if (!status.ok()) describe(status.message);
    CHECK(status.ok());
    leaves.check(num_ranks);
  });
}

void test_gives_sums_of_all_types_and_sizes() {
  const std::vector<std::vector<int64_t>> buckets = {
      {0}, {1}, {15}, {16}, {17}, {997}, {3, 0, 1, 129, 0, 4099, 2}};
  // Any two of the edges meet, and not all at once.
  size_t turn = flushes_subnormals ? 2 : 0;
  for (const Way& way : kWays) {
    for (int num_ranks : {1, 2, 3, 4, 5, 8}) {
      make_segment(num_ranks);
      for (size_t i = 0; i < buckets.size(); ++i) {
        on_some_types(turn + i, [&](auto element) {
          const bool in_place = turn / 3 % 2 == 0;
          const int shift = static_cast<int>((turn / 2 + i) % 4);
          gives_sums<decltype(element)>(way, num_ranks, buckets[i], in_place, shift);
        });
      }
      reset();
      ++turn;
    }
    ++turn;
  }
}

void test_gives_sums_of_many_tiles_and_rounds() {
  for (const Way& way : kWays) {
    for (int num_ranks : {2, 3}) {
      make_segment(num_ranks);
      gives_sums<float>(way, num_ranks, {(1 << 20) + 3}, true, 1);
      gives_sums<BFloat16>(way, num_ranks, {100, (1 << 18) + 3, 7}, false, 3);
      gives_sums<uint8_t>(way, num_ranks, {(1 << 20) + 3}, true, 3);
      reset();
    }
  }
}

template <typename T>
T smallest(uint8_t times) {
  T element;
  std::memset(&element, 0, sizeof element);
  std::memcpy(&element, &times, 1);  // little-endian
  return element;
}

// Random numbers whose sum depends on the order of additions.
std::vector<float> random_vector(int rank, int64_t count) {
  std::mt19937 generator(rank);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// The sum of a binary tree over numbers of ranks.
float sum_of_tree(std::vector<float> numbers) {
  while (numbers.size() > 1) {
    std::vector<float> sums;
    for (size_t i = 0; i + 1 < numbers.size(); i += 2) sums.push_back(numbers[i] + numbers[i + 1]);
    if (numbers.size() % 2 == 1) sums.push_back(numbers.back());
    numbers = sums;
  }
  return numbers[0];
}

void test_ranks_have_equal_bits_close_to_the_sum_in_double() {
  constexpr int64_t kCount = 10007;
  for (const Way& way : kWays) {
    for (int num_ranks : {2, 3, 5, 6, 7, 8, 11}) {
      make_segment(num_ranks);
      std::vector<std::vector<float>> results(num_ranks);
      on_ranks(range(num_ranks), [&](int rank) {
        results[rank] = random_vector(rank, kCount);
        const Bucket bucket(Type::kF32, {{results[rank].data(), results[rank].data(), kCount}});
        CHECK(collective(call_of(way, rank, num_ranks, 3, 1, 0, 1.0 / 3), bucket).ok());
      });
      std::vector<double> sums(kCount);
      std::vector<std::vector<float>> numbers(kCount);
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::vector<float> values = random_vector(rank, kCount);
        for (int64_t i = 0; i < kCount; ++i) {
          sums[i] += values[i];
          numbers[i].push_back(values[i]);
        }
      }
      for (int64_t i = 0; i < kCount; ++i) {
        CHECK(std::fabs(results[0][i] - sums[i] / 3) < 1e-5);
        const float exact = sum_of_tree(numbers[i]) * static_cast<float>(1.0 / 3);
        CHECK(way.algorithm == Algorithm::kRing || results[0][i] == exact);
      }
      for (const std::vector<float>& result : results) {
        CHECK(std::memcmp(result.data(), results[0].data(), kCount * sizeof(float)) == 0);
      }
      reset();
    }
  }
}

void test_half_types_add_in_float_and_round_once() {
  // 256 + 1 + 1 is 258 in float; in bfloat16 each addition of 1 would be lost.
  const float values[] = {256, 1, 1};
  for (const Way& way : kWays) {
    make_segment(3);
    on_ranks(range(3), [&](int rank) {
      BFloat16 element = to_bfloat16(values[rank]);
      const Bucket bucket(Type::kBF16, {{&element, &element, 1}});
      CHECK(collective(call_of(way, rank, 3, 3, 1, 0, 1.0), bucket).ok());
      CHECK(to_float(element) == 258);
    });
    reset();
  }
}

// In all formats, the bits of a subnormal number count multiples of the smallest one.
template <typename T>
void adds_smallest_numbers(const Way& way) {
  const uint8_t values[] = {3, 5, 4}, sum = 6;  // halved
  on_ranks(range(3), [&](int rank) {
    for (int64_t count : {1, 37, 20000}) {  // one-shot, or several rounds
      std::vector<T> elements(count);
      const T expected = smallest<T>(sum);
      for (T& element : elements) element = smallest<T>(values[rank]);
      const Bucket bucket(type_of<T>(), {{elements.data(), elements.data(), count}});
      CHECK(collective(call_of(way, rank, 3), bucket).ok());
      for (const T& element : elements) CHECK(std::memcmp(&element, &expected, sizeof(T)) == 0);
    }
  });
}

void test_subnormal_numbers_are_added_exactly() {
  for (const Way& way : kWays) {
    make_segment(3);
    adds_smallest_numbers<Float16>(way);
    adds_smallest_numbers<BFloat16>(way);
    adds_smallest_numbers<float>(way);
    adds_smallest_numbers<double>(way);
    reset();
  }
}

void test_ranks_may_come_at_any_time() {
  for (const Way& way : kWays) {
    make_segment(4);
    on_ranks(range(4), [&](int rank) {
      std::mt19937 generator(rank);
      for (int step = 0; step < 100; ++step) {
        // Some pauses exceed the time that a rank spins.
        const int delay_us = generator() % 8 == 0 ? 300 : static_cast<int>(generator() % 20);
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        Leaves<float> leaves(rank, {1, 50, 20000}, step % 2 == 0, 0);
        CHECK(collective(call_of(way, rank, 4, step % 3), leaves.bucket()).ok());
        leaves.check(4);
      }
    });
    reset();
  }
}

void test_many_small_steps(int num_steps) {
  for (const Way& way : kWays) {
    make_segment(2);
    on_ranks(range(2), [&](int rank) {
      for (int step = 0; step < num_steps; ++step) {
        float value = static_cast<float>(step + rank);
        const Bucket bucket(Type::kF32, {{&value, &value, 1}});
        CHECK(collective(call_of(way, rank, 2, step % 2), bucket).ok());
        CHECK(value == static_cast<float>(step) + 0.5f);
      }
    });
    reset();
  }
}

// Two runs of one program and two groups of ranks: same bucket number, different sums.
void test_runs_groups_and_communicators_do_not_mix() {
  for (const Way& way : kWays) {
    make_segment(2, 1, 0);
    make_segment(2, 1, 1);
    make_segment(2, 2, 0);
    make_segment(2, 2, 1);
    on_ranks(range(8), [&](int thread) {
      const int rank = thread % 2, group = thread / 2 % 2, which = thread / 4;
      Way own = way;
      if (own.communicator != 0) own.communicator += which;
      for (int step = 0; step < 200; ++step) {
        float value = static_cast<float>(step + 10 * group + 100 * which);
        const float expected = value;
        const Bucket bucket(Type::kF32, {{&value, &value, 1}});
        CHECK(collective(call_of(own, rank, 2, 3, 1 + which, group), bucket).ok());
        CHECK(value == expected);
      }
    });
    reset();
  }
}

}  // namespace
}  // namespace jdp

// Args: number of small steps.
int main(int, char** arguments) {
  jdp::end_with_parent();
  for (bool flushes : {true, false}) {
    jdp::flushes_subnormals = flushes;
    jdp::test_gives_sums_of_all_types_and_sizes();
    jdp::test_half_types_add_in_float_and_round_once();
    jdp::test_subnormal_numbers_are_added_exactly();
  }
  jdp::test_gives_sums_of_many_tiles_and_rounds();
  jdp::test_ranks_have_equal_bits_close_to_the_sum_in_double();
  jdp::test_ranks_may_come_at_any_time();
  jdp::test_many_small_steps(std::atoi(arguments[1]));
  jdp::test_runs_groups_and_communicators_do_not_mix();
}
