// Arrays and parts of them are copied to their places: every byte of every box, by several threads
// at once.

#include "copy_out.h"

#include <numeric>

#include "testing.h"

namespace jdp {
namespace {

using Sizes = std::vector<int64_t>;

int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Cuts `whole` along each dim into `parts` boxes, copies each on a thread of its own, and compares.
void copies_boxes(const Sizes& whole, const Sizes& parts, int64_t item) {
  const size_t num_dims = whole.size();
  Sizes strides(num_dims, item), box(num_dims);
  for (size_t d = num_dims; d-- > 0;) {
    if (d + 1 < num_dims) strides[d] = strides[d + 1] * whole[d + 1];
    box[d] = whole[d] / parts[d];
  }
  const int64_t num_bytes = product(whole) * item;
  std::vector<char> target(num_bytes + 2, 'x');
  on_ranks(range(static_cast<int>(product(parts))), [&](int number) {
    const int64_t first_byte = number;
    Sizes first(num_dims);
    for (size_t d = num_dims; d-- > 0; number /= parts[d]) first[d] = number % parts[d] * box[d];
    // The oracle: each element of the box is its position in the whole array. Before the part of
    // the source that is copied there are other bytes, as many as the number of the box.
    std::vector<char> source(static_cast<size_t>(first_byte), 'y');
    int64_t start = 0;
    for (size_t d = 0; d < num_dims; ++d) start += first[d] * strides[d];
    for (int64_t i = 0; i < product(box); ++i) {
      int64_t rest = i, at = start;
      for (size_t d = num_dims; d-- > 0; rest /= box[d]) at += rest % box[d] * strides[d];
      for (int64_t byte = 0; byte < item; ++byte) source.push_back(char((at + byte) * 7 % 251));
    }
    std::vector<int64_t> words = {reinterpret_cast<int64_t>(target.data() + 1 + start), first_byte,
                                  item, static_cast<int64_t>(num_dims)};
    for (size_t d = 0; d < num_dims; ++d) words.insert(words.end(), {box[d], strides[d]});
    std::vector<Place> places;
    CHECK(read_places(words.data(), words.size(), &places).empty());
    CHECK(places.size() == 1 &&
          first_byte + places[0].num_bytes() == static_cast<int64_t>(source.size()));
    copy_out(source.data(), places[0]);
  });
  for (int64_t at = 0; at < num_bytes; ++at) CHECK(target[at + 1] == char(at * 7 % 251));
  CHECK(target.front() == 'x' && target.back() == 'x');
}

void test_boxes_of_an_array_are_put_together() {
  copies_boxes({}, {}, 8);
  copies_boxes({1}, {1}, 1);
  copies_boxes({997}, {1}, 4);
  copies_boxes({8, 3}, {8, 1}, 4);
  copies_boxes({3, 8}, {1, 2}, 2);
  copies_boxes({4, 5, 6}, {2, 1, 3}, 16);
  copies_boxes({6, 61, 64}, {3, 1, 2}, 4);
}

void test_several_arrays_are_read_from_words_of_any_alignment() {
  char target[8] = {};
  const int64_t words[] = {reinterpret_cast<int64_t>(target),
                           0,
                           3,
                           0,
                           reinterpret_cast<int64_t>(target + 4),
                           1,
                           1,
                           1,
                           2,
                           2};
  std::vector<char> shifted(sizeof words + 1);
  std::memcpy(shifted.data() + 1, words, sizeof words);
  std::vector<Place> places;
  CHECK(read_places(shifted.data() + 1, 10, &places).empty());
  CHECK(places.size() == 2);
  copy_out("abc", places[0]);
  copy_out("cde", places[1]);
  CHECK(std::memcmp(target, "abc\0d\0e\0", 8) == 0);
}

void test_words_that_are_no_places_are_refused() {
  std::vector<Place> places;
  const int64_t words[] = {0, 0, 1, 2, 3, 4, 5};
  CHECK(contains(read_places(words, 3, &places), "ends early"));
  CHECK(contains(read_places(words, 7, &places), "2 loops"));
  const int64_t negative[] = {0, 0, 1, -1};
  CHECK(contains(read_places(negative, 4, &places), "-1 loops"));
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::test_boxes_of_an_array_are_put_together();
  jdp::test_several_arrays_are_read_from_words_of_any_alignment();
  jdp::test_words_that_are_no_places_are_refused();
}
