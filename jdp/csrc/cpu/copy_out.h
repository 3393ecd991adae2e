// Copies boxes to other memory, where each is a box of a larger array.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jdp {

// A loop around the runs of a box.
struct Loop {
  int64_t count;
  int64_t stride;  // bytes in the larger array
};

// Where bytes of an array go: equal runs inside of loops, outermost first.
struct Place {
  char* target;
  int64_t first;  // byte of the array
  int64_t run_bytes;
  std::vector<Loop> loops;

  int64_t num_bytes() const;
};

// Reads places as Python writes them, for each array: target, first, run_bytes, number of loops,
// and count and stride of each loop.
//
// `words`: [num_words] int64, of any alignment. Returns "" and sets `places`, or what is wrong.
std::string read_places(const void* words, size_t num_words, std::vector<Place>* places);

void copy_out(const char* source, const Place& place);

}  // namespace jdp
