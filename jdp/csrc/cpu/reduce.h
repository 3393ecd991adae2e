// Sums the elements of all ranks.

#pragma once

#include <cstdint>

#include "../common/element.h"

namespace jdp {

// Writes the sum of `num_inputs` (>= 1) vectors, scaled and rounded once, to each of `num_outputs`
// vectors. Neighbours are added in pairs, then the pairs in pairs, and so on; a last one without a
// partner waits. An output may be an input, but must not partly overlap one.
template <typename T>
void reduce(const T* const* inputs, int num_inputs, T* const* outputs, int num_outputs,
            int64_t count, typename Element<T>::Scale scale);

// The same for elements [begin, begin + count) of a whole leaf; writes each sum to its slice.
template <typename T>
void reduce_to_slices(const T* const* inputs, int num_inputs, T* const* slices, int64_t run,
                      int64_t begin, int64_t count, typename Element<T>::Scale scale);

}  // namespace jdp
