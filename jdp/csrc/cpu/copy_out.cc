#include "copy_out.h"

#include <cstring>

namespace jdp {
namespace {

constexpr int64_t kMaxLoops = 64;

// Returns the end of what was read.
const char* copy_loops(const char* source, char* target, const Place& place, size_t depth) {
  if (depth == place.loops.size()) {
    std::memcpy(target, source, static_cast<size_t>(place.run_bytes));
    return source + place.run_bytes;
  }
  const Loop& loop = place.loops[depth];
  for (int64_t i = 0; i < loop.count; ++i) {
    source = copy_loops(source, target + i * loop.stride, place, depth + 1);
  }
  return source;
}

}  // namespace

int64_t Place::num_bytes() const {
  int64_t bytes = run_bytes;
  for (const Loop& loop : loops) bytes *= loop.count;
  return bytes;
}

std::string read_places(const void* words, size_t num_words, std::vector<Place>* places) {
  const char* next = static_cast<const char*>(words);
  const auto num_left = [&] {
    return num_words -
           static_cast<size_t>(next - static_cast<const char*>(words)) / sizeof(int64_t);
  };
  const auto read = [&] {
    int64_t word;
    std::memcpy(&word, next, sizeof word);
    next += sizeof word;
    return word;
  };
  while (num_left() > 0) {
    if (num_left() < 4) return "a place ends early";
    Place place{reinterpret_cast<char*>(read()), read(), read(), {}};
    const int64_t num_loops = read();
    if (num_loops < 0 || num_loops > kMaxLoops || num_left() < 2 * static_cast<size_t>(num_loops)) {
      return "a place has " + std::to_string(num_loops) + " loops";
    }
    for (int64_t i = 0; i < num_loops; ++i) {
      const int64_t count = read();
      place.loops.push_back({count, read()});
    }
    places->push_back(std::move(place));
  }
  return "";
}

void copy_out(const char* source, const Place& place) {
  copy_loops(source + place.first, place.target, place, 0);
}

}  // namespace jdp
