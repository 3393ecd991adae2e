// The communicators of this process, by key and device.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "communicator.h"

namespace jdp {

// `ordinal` is XLA's. Replaces an earlier communicator.
void enter(int64_t key, int32_t ordinal, std::shared_ptr<Communicator> communicator);
// Returns nullptr if there is none.
std::shared_ptr<Communicator> find(int64_t key, int32_t ordinal);
// Returns true if its memory stays allocated because peers may still write into it.
bool remove(int64_t key, int32_t ordinal);
void for_each(const std::function<void(Communicator&)>& visit);

}  // namespace jdp
