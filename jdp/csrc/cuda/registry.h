// The communicators of this process. A call knows the key of its communicator and its device.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "communicator.h"

namespace jdp {

// `ordinal`: XLA's number of the device that a call runs on. Replaces what was there.
void enter(int64_t key, int32_t ordinal, std::shared_ptr<Communicator> communicator);
// None: nullptr.
std::shared_ptr<Communicator> find(int64_t key, int32_t ordinal);
// True: its memory stays taken, for peers may still write into it.
bool remove(int64_t key, int32_t ordinal);
void for_each(const std::function<void(Communicator&)>& visit);

}  // namespace jdp
