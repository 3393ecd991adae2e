// Integers whose sums over ranks are exact in every type, and the sums, on host and device.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/element.h"

namespace jdp {

// A round of consecutive all-reduces in the same memory: each sums the results of the one before.
// Every call, rank, round and place has different numbers, so that a stale or misplaced result is
// detected.
struct WholeNumbers {
  static constexpr int kPeriod = 113;  // a prime: places at a distance of a power of two differ
  static constexpr int kRounds = 8;    // until numbers repeat

  int num_ranks;  // a power of two
  int round;
  int num_calls;  // 0: nothing is reduced, and each rank still has its input

  // The scale of floats. Not 1 / num_ranks: a mean of equal numbers changes nothing, so a call that
  // does nothing would pass. Integers are not scaled.
  double scale() const { return 2.0 / num_ranks; }

  // The input of rank `rank` at place `i`.
  template <typename T>
  JDP_HOST_DEVICE T input(int rank, int64_t i) const {
    return Element<T>::round(static_cast<typename Element<T>::Sum>(place(i) + rank), 1);
  }

  // Whether `element` is the exact result of rank `rank` at place `i` after the last call. False
  // for NaN.
  template <typename T>
  JDP_HOST_DEVICE bool is_right(T element, int rank, int64_t i) const {
    using Sum = typename Element<T>::Sum;
    const Sum found = Element<T>::widen(element);
    if (num_calls == 0) return found == Element<T>::widen(input<T>(rank, i));
    const uint64_t n = num_ranks;
    if (std::is_integral<T>::value) {
      return found == static_cast<Sum>((n * place(i) + n * (n - 1) / 2) * power(n));
    }
    return found == static_cast<Sum>(2 * place(i) + n - 1) * static_cast<Sum>(power(2));
  }

 private:
  JDP_HOST_DEVICE uint64_t place(int64_t i) const { return i % kPeriod + 1 + round % kRounds; }

  JDP_HOST_DEVICE uint64_t power(uint64_t base) const {
    uint64_t product = 1;
    for (int call = 1; call < num_calls; ++call) product *= base;
    return product;
  }
};

}  // namespace jdp
