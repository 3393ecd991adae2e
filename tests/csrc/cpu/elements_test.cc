// Every bit pattern of the 16-bit types, and every midpoint between two neighbours, in threads that
// flush subnormal numbers and in threads that do not.

#include <cmath>

#include "../common/element.h"
#include "testing.h"

namespace jdp {
namespace {

// The value of a pattern by definition. None of these values is subnormal as a double.
double value_of_float16(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), rest = static_cast<int>(bits & 0x3ff);
  const double size =
      exponent == 0 ? std::ldexp(rest, -24) : std::ldexp(1024 + rest, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

bool is_nan_float16(uint32_t bits) { return (bits & 0x7fff) > 0x7c00; }

uint32_t bits_of_float16(float value) { return to_float16(value).bits; }

void test_every_float16_becomes_the_float_of_its_value() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(Float16{static_cast<uint16_t>(bits)});
    const uint32_t sign = (bits & 0x8000) << 16;
    if (is_nan_float16(bits)) {
      CHECK((bits_of(value) & 0x7fffffff) > 0x7f800000);
      CHECK((bits_of_float16(value) & 0x7fff) > 0x7c00);
      continue;
    }
    if ((bits & 0x7fff) == 0x7c00) {
      CHECK(bits_of(value) == (sign | 0x7f800000));
    } else {
      CHECK(static_cast<double>(value) == value_of_float16(bits));
      CHECK((bits_of(value) & 0x80000000) == sign);
    }
    CHECK(bits_of_float16(value) == bits);
  }
}

// Tests the floats around the midpoint between two neighbours, of either sign.
void test_every_float_becomes_the_nearest_float16_and_ties_the_even_one() {
  for (uint32_t below = 0; below < 0x7c00; ++below) {
    const double low = value_of_float16(below);
    const double high = below == 0x7bff ? 65536 : value_of_float16(below + 1);
    const uint32_t middle = bits_of(static_cast<float>((low + high) / 2));
    const uint32_t even = below % 2 == 0 ? below : below + 1;
    for (uint32_t sign : {0u, 0x8000u}) {
      const auto rounded = [&](uint32_t bits) {
        return bits_of_float16(float_of(bits | sign << 16));
      };
      CHECK(rounded(middle - 1) == (sign | below));
      CHECK(rounded(middle) == (sign | even));
      CHECK(rounded(middle + 1) == (sign | (below + 1)));
    }
  }
  for (uint32_t tiny : {0u, 1u, 0x7fffffu, 0x800000u}) CHECK(bits_of_float16(float_of(tiny)) == 0);
  for (uint32_t huge : {0x47800000u, 0x7f7fffffu, 0x7f800000u}) {
    CHECK(bits_of_float16(float_of(huge)) == 0x7c00);
  }
}

void test_every_bfloat16_is_the_upper_half_of_a_float() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const BFloat16 element{static_cast<uint16_t>(bits)};
    const uint32_t whole = bits << 16;
    CHECK(bits_of(to_float(element)) == whole);
    const bool is_nan = (whole & 0x7fffffff) > 0x7f800000;
    const uint32_t back = to_bfloat16(float_of(whole)).bits;
    CHECK(is_nan ? back == (bits | 0x40) : back == bits);
    if ((bits & 0x7fff) >= 0x7f80) continue;
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    CHECK(to_bfloat16(float_of(whole + 0x7fff)).bits == bits);
    CHECK(to_bfloat16(float_of(whole + 0x8000)).bits == even);
    CHECK(to_bfloat16(float_of(whole + 0x8001)).bits == bits + 1);
  }
}

void test_a_call_leaves_the_thread_as_it_was() {
#ifdef __SSE2__
  for (bool flushes : {true, false}) {
    flushes_subnormals = flushes;
    on_ranks({0}, [&](int rank) {
      const unsigned before = _mm_getcsr();
      float value = 1;
      const Bucket bucket(Type::kF32, {{&value, &value, 1}});
      CHECK(collective(call_of(kWays[0], rank, 1), bucket).ok());
      CHECK(_mm_getcsr() == before && (before & 0x8040) == (flushes ? 0x8040 : 0));
    });
  }
#endif
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::end_with_parent();
  for (bool flushes : {true, false}) {
    jdp::flushes_subnormals = flushes;
    jdp::on_ranks({0}, [](int) {
      jdp::test_every_float16_becomes_the_float_of_its_value();
      jdp::test_every_float_becomes_the_nearest_float16_and_ties_the_even_one();
      jdp::test_every_bfloat16_is_the_upper_half_of_a_float();
    });
  }
  jdp::test_a_call_leaves_the_thread_as_it_was();
}
