// The expected values of the kernels' benchmark (benchmarks/gpu/whole_numbers.h) equal the result
// of the kernels' source on host threads, in every type, and wrong results differ from them.

#include "whole_numbers.h"

#include <functional>

#include "host_ranks.h"

namespace jdp {
namespace {

constexpr int kSize = 1000;

template <typename T>
Case case_of(Algorithm algorithm, Type type, const WholeNumbers& numbers) {
  Case one = {};
  one.header.layout = {numbers.num_ranks, 2, 256, 64};
  one.header.type = static_cast<int32_t>(type);
  one.header.algorithm = static_cast<int32_t>(algorithm);
  one.header.num_channels = one.header.num_threads = 2;
  one.header.num_calls = numbers.num_calls;
  one.header.num_leaves = one.header.in_place = 1;
  one.header.missing_rank = one.header.timeout_rank = one.header.abort_rank = -1;
  one.header.odd_rank = -1;
  one.header.scale = numbers.scale();
  one.sizes = {kSize};
  for (int rank = 0; rank < numbers.num_ranks; ++rank) {
    one.in.emplace_back(one.room(), kInFill);
    T* leaf = reinterpret_cast<T*>(one.in[rank].data() + one.place(0));
    for (int i = 0; i < kSize; ++i) leaf[i] = numbers.input<T>(rank, i);
  }
  return one;
}

template <typename T>
int count_wrong(const std::vector<std::vector<char>>& memory, const WholeNumbers& numbers) {
  int count = 0;
  for (int rank = 0; rank < numbers.num_ranks; ++rank) {
    const T* leaf = reinterpret_cast<const T*>(memory[rank].data());
    for (int i = 0; i < kSize; ++i) count += !numbers.is_right(leaf[i], rank, i);
  }
  return count;
}

void require(bool is_so, const char* what, Type type, const WholeNumbers& numbers) {
  if (is_so) return;
  fprintf(stderr, "%s: type %d, %d ranks, round %d, %d calls\n", what, static_cast<int>(type),
          numbers.num_ranks, numbers.round, numbers.num_calls);
  exit(1);
}

// Spoils a right result in several ways, each of which the comparison must detect.
template <typename T>
void require_that_mistakes_show(const std::vector<std::vector<char>>& right, Type type,
                                const WholeNumbers& numbers) {
  const auto wrong_after = [&](const std::function<void(std::vector<T*>)>& spoil) {
    std::vector<std::vector<char>> memory = right;
    std::vector<T*> leaves;
    for (auto& one : memory) leaves.push_back(reinterpret_cast<T*>(one.data()));
    spoil(leaves);
    return count_wrong<T>(memory, numbers);
  };
  const int last = numbers.num_ranks - 1;
  const int one = wrong_after([&](std::vector<T*> leaves) { leaves[last][kSize - 1] = T{}; });
  require(one == 1, "one element on the last rank", type, numbers);
  const int nan = wrong_after([](std::vector<T*> leaves) { memset(leaves[0], 0xff, sizeof(T)); });
  require(nan == 1, "an element that is NaN, or all ones", type, numbers);
  const int moved = wrong_after([&](std::vector<T*> leaves) {
    for (int i = 0; i + 16 < kSize; ++i) leaves[last][i] = leaves[last][i + 16];
  });
  require(moved == kSize - 16, "elements that are 16 places away", type, numbers);
  // In 8 bits some numbers are equal by chance.
  const auto is_told_from = [&](const WholeNumbers& other) {
    return count_wrong<T>(right, other) > 0.9 * numbers.num_ranks * kSize;
  };
  const int num_ranks = numbers.num_ranks, round = numbers.round, num_calls = numbers.num_calls;
  require(is_told_from({num_ranks, round + 1, num_calls}), "the round before", type, numbers);
  require(is_told_from({num_ranks, round, num_calls + 1}), "a call too few", type, numbers);
  require(is_told_from({num_ranks, round, 0}), "what was put in", type, numbers);
}

template <typename T>
void check(Type type) {
  // Integers grow by a factor of num_ranks in each call, which overflows short types.
  const bool is_float = type <= Type::kF16;
  for (int num_ranks : {2, 4, 8}) {
    for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kOneShot, Algorithm::kTwoShot}) {
      const WholeNumbers numbers = {num_ranks, WholeNumbers::kRounds - 1, is_float ? 3 : 1};
      const Result result = run(case_of<T>(algorithm, type, numbers));
      require(count_wrong<T>(result.out, numbers) == 0, "the kernels' result", type, numbers);
      require_that_mistakes_show<T>(result.out, type, numbers);
    }
  }
}

}  // namespace
}  // namespace jdp

int main() {
  using jdp::Type;
  jdp::check<float>(Type::kF32);
  jdp::check<double>(Type::kF64);
  jdp::check<jdp::BFloat16>(Type::kBF16);
  jdp::check<jdp::Float16>(Type::kF16);
  jdp::check<uint8_t>(Type::kU8);
  jdp::check<uint16_t>(Type::kU16);
  jdp::check<uint32_t>(Type::kU32);
  jdp::check<uint64_t>(Type::kU64);
}
