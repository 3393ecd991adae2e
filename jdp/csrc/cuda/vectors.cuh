// The leaves of a bucket as one vector of 16-byte units, in place.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/element.h"
#include "arguments.h"

#ifdef __CUDACC__
#define JDP_DEVICE __device__ __forceinline__
#define JDP_UNROLL _Pragma("unroll")
#define JDP_NO_UNROLL _Pragma("unroll 1")
#else
#define JDP_DEVICE inline
#define JDP_UNROLL
#define JDP_NO_UNROLL
#endif

namespace jdp {

constexpr int kVectorBytes = 16;

// An array of bytes would take one register for each byte.
template <typename E, int kSize>
struct Packed {
  alignas(16) uint32_t words[kSize * sizeof(E) / 4];

  // `i` is a compile-time constant once the loop is unrolled.
  JDP_DEVICE E get(int i) const {
    if constexpr (sizeof(E) >= 4) {
      E element;
      memcpy(&element, words + i * sizeof(E) / 4, sizeof element);
      return element;
    } else {
      using Bits = std::conditional_t<sizeof(E) == 1, uint8_t, uint16_t>;
      const auto bits = static_cast<Bits>(words[i * sizeof(E) / 4] >> shift(i));
      E element;
      memcpy(&element, &bits, sizeof element);
      return element;
    }
  }

  // In ascending order of `i`: it clears the rest of the word.
  JDP_DEVICE void set(int i, E element) {
    if constexpr (sizeof(E) >= 4) {
      memcpy(words + i * sizeof(E) / 4, &element, sizeof element);
    } else {
      std::conditional_t<sizeof(E) == 1, uint8_t, uint16_t> bits;
      memcpy(&bits, &element, sizeof bits);
      const uint32_t lower = shift(i) ? words[i * sizeof(E) / 4] : 0;
      words[i * sizeof(E) / 4] = lower | static_cast<uint32_t>(bits) << shift(i);
    }
  }

 private:
  JDP_DEVICE static int shift(int i) { return i * sizeof(E) % 4 * 8; }
};

template <typename T>
constexpr int kVectorSize = kVectorBytes / sizeof(T);
template <typename T>
using Vector = Packed<T, kVectorSize<T>>;
template <typename T>
using SumVector = Packed<typename Element<T>::Sum, kVectorSize<T>>;

// `pointer` is a multiple of 16, for loads and stores of 16 bytes.
template <typename V>
JDP_DEVICE V load_vector(const void* pointer) {
  V vector;
  memcpy(&vector, __builtin_assume_aligned(pointer, kVectorBytes), sizeof vector);
  return vector;
}

template <typename V>
JDP_DEVICE void store_vector(void* pointer, const V& vector) {
  memcpy(__builtin_assume_aligned(pointer, kVectorBytes), &vector, sizeof vector);
}

template <typename T>
JDP_DEVICE SumVector<T> widen(const Vector<T>& vector) {
  SumVector<T> sums;
  JDP_UNROLL
  for (int i = 0; i < kVectorSize<T>; ++i) sums.set(i, Element<T>::widen(vector.get(i)));
  return sums;
}

template <typename T>
JDP_DEVICE SumVector<T> add(const SumVector<T>& sums, const Vector<T>& own) {
  SumVector<T> more;
  JDP_UNROLL
  for (int i = 0; i < kVectorSize<T>; ++i) {
    more.set(i, sums.get(i) + Element<T>::widen(own.get(i)));
  }
  return more;
}

template <typename T>
JDP_DEVICE Vector<T> round(const SumVector<T>& sums, typename Element<T>::Scale scale) {
  Vector<T> vector;
  JDP_UNROLL
  for (int i = 0; i < kVectorSize<T>; ++i) vector.set(i, Element<T>::round(sums.get(i), scale));
  return vector;
}

// Whole: 16 bytes of an aligned leaf. Part: the end of a leaf, or a unit of an unaligned leaf.
using Whole = std::true_type;
using Part = std::false_type;

template <typename T>
JDP_DEVICE Vector<T> load_own(const Segment& segment, int32_t vector, Whole) {
  return load_vector<Vector<T>>(static_cast<const char*>(segment.in) +
                                int64_t{vector - segment.begin} * kVectorBytes);
}

template <typename T>
JDP_DEVICE void store_own(const Segment& segment, int32_t vector, const Vector<T>& own, Whole) {
  store_vector(static_cast<char*>(segment.out) + int64_t{vector - segment.begin} * kVectorBytes,
               own);
}

template <typename T>
using BitsOf =
    std::conditional_t<sizeof(T) == 1, uint8_t,
                       std::conditional_t<sizeof(T) == 2, uint16_t,
                                          std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

// Rare, so small rather than fast: element by element, in two halves of 64 bits.
template <typename T>
JDP_DEVICE Vector<T> load_own(const Segment& segment, int32_t vector, Part) {
  constexpr int kHalf = kVectorSize<T> / 2;
  int64_t index = int64_t{vector - segment.begin} * kVectorSize<T>;
  uint64_t halves[2] = {0, 0};
  JDP_UNROLL
  for (int half = 0; half < 2; ++half) {
    JDP_NO_UNROLL
    for (int i = 0; i < kHalf; ++i, ++index) {
      if (index >= segment.size) break;
      const uint64_t bits = static_cast<const BitsOf<T>*>(segment.in)[index];
      halves[half] |= bits << (i * 8 * sizeof(T) % 64);
    }
  }
  Vector<T> own;
  memcpy(&own, halves, sizeof own);
  return own;
}

template <typename T>
JDP_DEVICE void store_own(const Segment& segment, int32_t vector, const Vector<T>& own, Part) {
  constexpr int kHalf = kVectorSize<T> / 2;
  int64_t index = int64_t{vector - segment.begin} * kVectorSize<T>;
  uint64_t halves[2];
  memcpy(halves, &own, sizeof own);
  JDP_UNROLL
  for (int half = 0; half < 2; ++half) {
    JDP_NO_UNROLL
    for (int i = 0; i < kHalf; ++i, ++index) {
      if (index >= segment.size) break;
      static_cast<BitsOf<T>*>(segment.out)[index] =
          static_cast<BitsOf<T>>(halves[half] >> (i * 8 * sizeof(T) % 64));
    }
  }
}

// Returns the end of the segment's whole vectors.
template <typename T>
JDP_DEVICE int32_t whole_end(const Segment& segment) {
  const auto address =
      reinterpret_cast<uintptr_t>(segment.in) | reinterpret_cast<uintptr_t>(segment.out);
  if (address % kVectorBytes) return segment.begin;
  return segment.begin + static_cast<int32_t>(segment.size / kVectorSize<T>);
}

// Returns the segment that contains `vector`; segments[0].begin is 0.
JDP_DEVICE int segment_of(const Arguments& arguments, int32_t vector) {
  int low = 0;
  int high = arguments.num_segments;  // the result is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (arguments.segments[middle].begin <= vector ? low : high) = middle;
  }
  return low;
}

// Vectors that each thread loads before it stores the first: 64 bytes of sums.
template <typename T>
constexpr int kInFlight = 64 / sizeof(SumVector<T>);

// Calls `load(segment, vector, whole)`, then `store(segment, vector, whole, loaded)`, for each
// vector of `span`. Thread t takes every vector that equals t modulo the number of threads, so that
// short segments go to different warps.
template <typename T, int kUnroll = kInFlight<T>, typename Block, typename Load, typename Store>
JDP_DEVICE void for_each_vector(const Block& block, const Arguments& arguments, Span span,
                                Load load, Store store) {
  const int stride = block.num_threads();
  const auto begin = static_cast<int32_t>(span.begin);
  const auto end = static_cast<int32_t>(span.begin + span.size);
  int32_t vector = begin + block.thread();
  JDP_NO_UNROLL
  for (int i = segment_of(arguments, begin); vector < end; ++i) {
    const Segment& segment = arguments.segments[i];
    const int32_t next =
        i + 1 < arguments.num_segments ? arguments.segments[i + 1].begin : arguments.num_vectors;
    const int32_t last = next < end ? next : end;
    const int32_t whole = whole_end<T>(segment) < last ? whole_end<T>(segment) : last;
    JDP_NO_UNROLL
    while (vector < whole) {
      decltype(load(segment, vector, Whole())) loaded[kUnroll];
      int taken = 0;
      JDP_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (vector + u * stride < whole) {
          loaded[u] = load(segment, vector + u * stride, Whole());
          ++taken;
        }
      }
      JDP_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (u < taken) store(segment, vector + u * stride, Whole(), loaded[u]);
      }
      vector += taken * stride;
    }
    JDP_NO_UNROLL
    for (; vector < last; vector += stride) {
      store(segment, vector, Part(), load(segment, vector, Part()));
    }
  }
}

}  // namespace jdp
