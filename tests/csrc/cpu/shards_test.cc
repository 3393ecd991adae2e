// Results of reduce-scatters, all-gathers and all-to-alls: every element of every rank.

#include <random>
#include <utility>

#include "testing.h"

namespace jdp {
namespace {

const Way kDirectWays[] = {kWays[0], kWays[2]};
// Each operation, and whether it is in place.
const std::pair<Operation, bool> kOperations[] = {{Operation::kReduceScatter, false},
                                                  {Operation::kAllGather, false},
                                                  {Operation::kAllGather, true},
                                                  {Operation::kAllToAll, false}};

template <typename T>
void gives_slices_and_wholes(const Way& way, int num_ranks, const std::vector<Cut>& cuts,
                             int shift) {
  for (const auto& [operation, in_place] : kOperations) {
    on_ranks(range(num_ranks), [&, operation = operation, in_place = in_place](int rank) {
      Shards<T> shards(operation, rank, num_ranks, cuts, shift, 0, in_place);
      const Status status = collective(call_of(operation, way, rank, num_ranks), shards.bucket());
      const std::string wrong = status.ok() ? shards.first_wrong(num_ranks) : status.message;
      if (!wrong.empty()) describe(wrong);
      CHECK(wrong.empty());
    });
  }
}

void test_gives_slices_and_wholes_of_all_types_and_cuts() {
  const std::vector<std::vector<Cut>> buckets = {
      {{1, 0}},
      {{0, 5}},
      {{1, 1}},
      {{1, 17}},
      {{13, 1}},
      {{7, 3}},
      {{1, 997}},
      {{61, 65}},
      {{1, 3}, {0, 1}, {5, 1}, {43, 3}, {1, 0}, {1, 4099}, {2, 1030}},
      {{7, 30, 6}, {7, 30, 210}, {2, 1030, 5}, {97, 1, 97}, {1, 97, 1}},
      {{1, 997, 0, true}},
      {{1, 1, 0, true}, {3, 5}, {1, 0, 0, true}, {1, 4099, 0, true}, {1, 33}, {7, 3, 0, true}}};
  // Any two of the edges meet, and not all at once.
  size_t turn = flushes_subnormals ? 2 : 0;
  for (const Way& way : kDirectWays) {
    for (int num_ranks : {1, 2, 3, 8}) {
      make_segment(num_ranks);
      for (size_t i = 0; i < buckets.size(); ++i) {
        on_some_types(turn + i, [&](auto element) {
          const int shift = static_cast<int>((turn / 2 + i) % 4);
          gives_slices_and_wholes<decltype(element)>(way, num_ranks, buckets[i], shift);
        });
      }
      reset();
      ++turn;
    }
    ++turn;
  }
}

void test_gives_slices_and_wholes_of_many_tiles_and_rounds() {
  for (const Way& way : kDirectWays) {
    for (int num_ranks : {2, 3}) {
      make_segment(num_ranks);
      gives_slices_and_wholes<float>(way, num_ranks, {{1, (1 << 18) + 3}}, 1);
      gives_slices_and_wholes<float>(way, num_ranks,
                                     {{1009, 257}, {20011, 3}, {257, 1009, 257 * 1009}}, 0);
      gives_slices_and_wholes<BFloat16>(
          way, num_ranks, {{100, 1}, {3, (1 << 17) + 3}, {1, 7}, {8, 1 << 13, 1 << 7}}, 3);
      gives_slices_and_wholes<float>(
          way, num_ranks, {{1, (1 << 17) + 5, 0, true}, {257, 1009}, {1, 1000003, 0, true}}, 2);
      reset();
    }
  }
}

std::vector<float> random_vector(int rank, int64_t count) {
  std::mt19937 generator(rank);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

void test_a_slice_has_the_bits_of_the_all_reduce() {
  constexpr int64_t kRows = 37, kRun = 29;
  for (int num_ranks : {2, 3, 8}) {
    const int64_t count = kRows * kRun * num_ranks;
    for (const Way& way : kDirectWays) {
      make_segment(num_ranks);
      on_ranks(range(num_ranks), [&](int rank) {
        const std::vector<float> values = random_vector(rank, count);
        std::vector<float> sums(count), slice(kRows * kRun);
        Call call = call_of(way, rank, num_ranks, 3, 1, 0, 1.0 / 3);
        CHECK(collective(call, Bucket(Type::kF32, {{values.data(), sums.data(), count}})).ok());
        std::vector<float> whole(count);
        call.operation = Operation::kReduceScatter;
        call.bucket = 4;
        CHECK(collective(call, Bucket(Type::kF32, {{values.data(), slice.data(), count, kRun},
                                                   {values.data(), whole.data(), count}}))
                  .ok());
        CHECK(whole == sums);
        for (int64_t row = 0; row < kRows; ++row) {
          const float* own = sums.data() + (row * num_ranks + rank) * kRun;
          CHECK(std::memcmp(slice.data() + row * kRun, own, kRun * sizeof(float)) == 0);
        }
      });
      reset();
    }
  }
}

void test_ranks_that_disagree_on_the_operation_or_the_cut_get_an_error() {
  const Operation of_ranks[][2] = {{Operation::kAllReduce, Operation::kReduceScatter},
                                   {Operation::kReduceScatter, Operation::kAllGather},
                                   {Operation::kAllGather, Operation::kAllToAll},
                                   {Operation::kReduceScatter, Operation::kReduceScatter},
                                   {Operation::kAllToAll, Operation::kAllToAll}};
  for (const Way& way : kDirectWays) {
    for (const auto& operations : of_ranks) {
      make_segment(2);
      on_ranks(range(2), [&](int rank) {
        std::vector<float> in(12), out(12);
        // If the operations are equal, the cuts differ, of the result alone in an all-to-all.
        const int64_t other = operations[0] == operations[1] ? 3 + 3 * rank : 3;
        const bool is_exchanged = operations[rank] == Operation::kAllToAll;
        const Leaf leaf{in.data(), out.data(), 12, is_exchanged ? 3 : other,
                        is_exchanged ? other : 0};
        const Status status =
            collective(call_of(operations[rank], way, rank, 2), Bucket(Type::kU8, {leaf}));
        CHECK(status.code == Code::kInvalidArgument);
        CHECK(contains(status.message, "ranks disagree"));
      });
      reset();
    }
  }
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::end_with_parent();
  for (bool flushes : {true, false}) {
    jdp::flushes_subnormals = flushes;
    jdp::test_gives_slices_and_wholes_of_all_types_and_cuts();
  }
  jdp::test_gives_slices_and_wholes_of_many_tiles_and_rounds();
  jdp::test_a_slice_has_the_bits_of_the_all_reduce();
  jdp::test_ranks_that_disagree_on_the_operation_or_the_cut_get_an_error();
}
