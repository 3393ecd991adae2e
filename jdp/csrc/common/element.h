// Element types, their accumulation types, and rounding. For host and device.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ring_all_reduce.h"

namespace jdp {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

JDP_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

JDP_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

JDP_HOST_DEVICE inline float to_float(BFloat16 element) {
  return float_of(static_cast<uint32_t>(element.bits) << 16);
}

// Rounds to nearest, ties to even. Branch-free, so that compilers vectorize it.
JDP_HOST_DEVICE inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uint32_t quiet_nan = bits >> 16 | 0x40;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

// Exact. No intermediate value is subnormal, because threads that flush subnormals would lose it.
JDP_HOST_DEVICE inline float to_float(Float16 element) {
  const uint32_t sign = static_cast<uint32_t>(element.bits & 0x8000) << 16;
  const uint32_t size = element.bits & 0x7fff;
  // Rebias the exponent by 112, that of infinity and NaN by 112 more.
  const uint32_t special = size >= 0x7c00 ? 112u << 23 : 0;
  // A subnormal uses the next exponent and has no implicit leading one.
  const uint32_t subnormal = size < 0x400 ? ~0u : 0;
  const uint32_t bits = (size << 13) + (112u << 23) + special + (subnormal & 1u << 23);
  const float value = float_of(bits) - float_of(subnormal & 113u << 23);
  return float_of(sign | bits_of(value));
}

// Computes both: compilers do not vectorize a loop that may skip a float addition.
JDP_HOST_DEVICE inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// Rounds to nearest, ties to even; values above 65519 become infinity.
JDP_HOST_DEVICE inline Float16 to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  // Normal: subtract 112 from the exponent and round off 13 bits.
  const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  // Subnormal: adding 0.5 moves multiples of 2^-24 into the last bits, and the addition rounds
  // them. A subnormal float, which some threads treat as 0, rounds to 0 anyway.
  const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  const uint32_t special = select(size > 0x7f800000, 0x7e00, 0x7c00);
  const uint32_t finite = select(size < 0x38800000, subnormal, normal);
  return {static_cast<uint16_t>(sign | select(size >= 0x477ff000, special, finite))};
}

// Signed integers are reduced as unsigned ones, which wrap around alike.
enum class Type : int32_t { kF32, kF64, kBF16, kF16, kU8, kU16, kU32, kU64 };

// Sum is the accumulation type, in which partial sums travel between ranks. Scale is the type of
// `scale`. Integers wrap around, as in XLA, and are not scaled.
template <typename T>
struct Element {
  static_assert(std::is_integral<T>::value, "T must be an integer, or have a specialization below");
  using Sum = typename std::make_unsigned<T>::type;
  using Scale = float;
  JDP_HOST_DEVICE static Sum widen(T element) { return static_cast<Sum>(element); }
  JDP_HOST_DEVICE static T round(Sum sum, Scale) { return static_cast<T>(sum); }
};

template <>
struct Element<double> {
  using Sum = double;
  using Scale = double;
  JDP_HOST_DEVICE static Sum widen(double element) { return element; }
  JDP_HOST_DEVICE static double round(Sum sum, Scale scale) { return sum * scale; }
};

template <>
struct Element<float> {
  using Sum = float;
  using Scale = float;
  JDP_HOST_DEVICE static Sum widen(float element) { return element; }
  JDP_HOST_DEVICE static float round(Sum sum, Scale scale) { return sum * scale; }
};

template <>
struct Element<BFloat16> {
  using Sum = float;
  using Scale = float;
  JDP_HOST_DEVICE static Sum widen(BFloat16 element) { return to_float(element); }
  JDP_HOST_DEVICE static BFloat16 round(Sum sum, Scale scale) { return to_bfloat16(sum * scale); }
};

template <>
struct Element<Float16> {
  using Sum = float;
  using Scale = float;
  JDP_HOST_DEVICE static Sum widen(Float16 element) { return to_float(element); }
  JDP_HOST_DEVICE static Float16 round(Sum sum, Scale scale) { return to_float16(sum * scale); }
};

}  // namespace jdp
