// Allocates and frees at random, and compares with an array that holds the owner of each 256 bytes.

#include "cuda/arena.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

void check(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}

constexpr int64_t kUnit = 256;
constexpr int kUnits = 64;

bool has_gap(const std::vector<int>& owner, int64_t units) {
  int64_t free = 0;
  for (int one : owner) {
    free = one ? 0 : free + 1;
    if (free >= units) return true;
  }
  return false;
}

}  // namespace

int main() {
  jdp::Arena arena(kUnits * kUnit);
  std::vector<int> owner(kUnits, 0);
  std::vector<std::pair<int64_t, int64_t>> taken;  // begin and units
  std::minstd_rand random(1);
  for (int step = 1; step < 20000; ++step) {
    if (random() % 2 && !taken.empty()) {
      const size_t i = random() % taken.size();
      arena.free(taken[i].first);
      for (int64_t u = 0; u < taken[i].second; ++u) owner[taken[i].first / kUnit + u] = 0;
      taken.erase(taken.begin() + i);
      continue;
    }
    const int64_t bytes = random() % (12 * kUnit);
    const int64_t units = bytes ? (bytes + kUnit - 1) / kUnit : 1;
    const bool fits = has_gap(owner, units);
    const int64_t begin = arena.allocate(bytes);
    check((begin >= 0) == fits,
          "an allocation succeeded without a gap, or failed although there was one");
    if (begin < 0) continue;
    check(begin % kUnit == 0, "a region is not aligned");
    for (int64_t u = 0; u < units; ++u) {
      check(owner[begin / kUnit + u] == 0, "a region was given twice");
      owner[begin / kUnit + u] = step;
    }
    taken.push_back({begin, units});
  }
  arena.clear();
  check(arena.used() == 0 && arena.allocate(kUnits * kUnit) == 0,
        "clear() leaves a region allocated");
}
