#include "reduce.h"

#include <algorithm>
#include <cstring>

#include "bucket.h"

namespace jdp {
namespace {

// Some blocks stay in the L1 cache. Local arrays alias nothing, so compilers vectorize the loops.
constexpr int64_t kBlockBytes = 4096;
constexpr int kLevels = 16;  // more than the logarithm of any number of ranks

// Calls store(begin, results, size) for each block.
template <typename T, typename Store>
inline __attribute__((always_inline)) void reduce_blocks(const T* const* inputs, int num_inputs,
                                                         int64_t count,
                                                         typename Element<T>::Scale scale,
                                                         const Store& store) {
  using E = Element<T>;
  using Sum = typename E::Sum;
  constexpr int64_t kBlock = kBlockBytes / sizeof(Sum);
  alignas(64) Sum sums[kLevels][kBlock];  // of 2^k inputs each, the most first
  alignas(64) T results[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    const T* first = inputs[0] + begin;
    if (num_inputs == 1) {
      for (int64_t i = 0; i < size; ++i) results[i] = E::round(E::widen(first[i]), scale);
    } else if (num_inputs == 2) {
      const T* last = inputs[1] + begin;
      for (int64_t i = 0; i < size; ++i) {
        results[i] = E::round(static_cast<Sum>(E::widen(first[i]) + E::widen(last[i])), scale);
      }
    } else {
      int num_sums = 0;
      const auto add_last_two = [&] {
        --num_sums;
        for (int64_t i = 0; i < size; ++i) sums[num_sums - 1][i] += sums[num_sums][i];
      };
      for (int rank = 0; rank + 1 < num_inputs; rank += 2) {
        const T *left = inputs[rank] + begin, *right = inputs[rank + 1] + begin;
        Sum* const pair = sums[num_sums++];
        for (int64_t i = 0; i < size; ++i) pair[i] = E::widen(left[i]) + E::widen(right[i]);
        for (int pairs = rank / 2 + 1; pairs % 2 == 0; pairs /= 2) add_last_two();
      }
      if (num_inputs % 2 == 1) {
        const T* last = inputs[num_inputs - 1] + begin;
        Sum* const alone = sums[num_sums++];
        for (int64_t i = 0; i < size; ++i) alone[i] = E::widen(last[i]);
      }
      while (num_sums > 1) add_last_two();
      for (int64_t i = 0; i < size; ++i) results[i] = E::round(sums[0][i], scale);
    }
    store(begin, results, size);
  }
}

#ifdef __x86_64__
// The library may run on another CPU than it was built on.
const bool has_avx2 = __builtin_cpu_supports("avx2");

template <typename T, typename Store>
__attribute__((target("avx2"))) void reduce_avx2(const T* const* inputs, int num_inputs,
                                                 int64_t count, typename Element<T>::Scale scale,
                                                 const Store& store) {
  reduce_blocks(inputs, num_inputs, count, scale, store);
}
#endif

template <typename T, typename Store>
void reduce_and_store(const T* const* inputs, int num_inputs, int64_t count,
                      typename Element<T>::Scale scale, const Store& store) {
#ifdef __x86_64__
  if (has_avx2) return reduce_avx2(inputs, num_inputs, count, scale, store);
#endif
  reduce_blocks(inputs, num_inputs, count, scale, store);
}

}  // namespace

template <typename T>
void reduce(const T* const* inputs, int num_inputs, T* const* outputs, int num_outputs,
            int64_t count, typename Element<T>::Scale scale) {
  reduce_and_store<T>(inputs, num_inputs, count, scale,
                      [&](int64_t begin, const T* results, int64_t size) {
                        for (int i = 0; i < num_outputs; ++i) {
                          std::memcpy(outputs[i] + begin, results, size * sizeof(T));
                        }
                      });
}

template <typename T>
void reduce_to_slices(const T* const* inputs, int num_inputs, T* const* slices, int64_t run,
                      int64_t begin, int64_t count, typename Element<T>::Scale scale) {
  reduce_and_store<T>(
      inputs, num_inputs, count, scale, [&](int64_t offset, const T* results, int64_t size) {
        runs_of_whole(run, num_inputs, begin + offset, size,
                      [&](int rank, int64_t at, int64_t done, int64_t length) {
                        std::memcpy(slices[rank] + at, results + done, length * sizeof(T));
                      });
      });
}

#define JDP_INSTANTIATE(T)                                                                      \
  template void reduce<T>(const T* const*, int, T* const*, int, int64_t, Element<T>::Scale);    \
  template void reduce_to_slices<T>(const T* const*, int, T* const*, int64_t, int64_t, int64_t, \
                                    Element<T>::Scale);
JDP_INSTANTIATE(float)
JDP_INSTANTIATE(double)
JDP_INSTANTIATE(BFloat16)
JDP_INSTANTIATE(Float16)
JDP_INSTANTIATE(uint8_t)
JDP_INSTANTIATE(uint16_t)
JDP_INSTANTIATE(uint32_t)
JDP_INSTANTIATE(uint64_t)
#undef JDP_INSTANTIATE

}  // namespace jdp
