#include "registry.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace jdp {
namespace {

using Key = std::pair<int64_t, int32_t>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Communicator>> entries;
  std::map<int64_t, std::shared_ptr<DeviceBarrier>> devices;  // of this process, by key
};

// Never destroyed: at exit CUDA may shut down before this memory is freed.
Registry& registry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

void enter(int64_t key, int32_t ordinal, std::shared_ptr<Communicator> communicator) {
  remove(key, ordinal);
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::shared_ptr<DeviceBarrier>& devices = registry().devices[key];
  if (!devices) devices = std::make_shared<DeviceBarrier>();
  communicator->join_barrier(ordinal, devices);
  registry().entries[{key, ordinal}] = std::move(communicator);
}

std::shared_ptr<Communicator> find(int64_t key, int32_t ordinal) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().entries.find({key, ordinal});
  return found == registry().entries.end() ? nullptr : found->second;
}

bool remove(int64_t key, int32_t ordinal) {
  std::shared_ptr<Communicator>
      last;  // its destructor waits for the device, so it must run without the lock
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().entries.find({key, ordinal});
    if (found == registry().entries.end()) return false;
    last = std::move(found->second);
    registry().entries.erase(found);
  }
  last->abort();
  // A later communicator with this key gets a new barrier.
  if (last->leave_barrier()) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().devices.erase(key);
  }
  if (!last->is_known_to_peers()) return false;
  // The end of the last kernel of the last peer is unknown, so the memory is kept until the process
  // ends.
  new std::shared_ptr<Communicator>(std::move(last));
  return true;
}

void for_each(const std::function<void(Communicator&)>& visit) {
  std::vector<std::shared_ptr<Communicator>> all;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& [key, communicator] : registry().entries) all.push_back(communicator);
  }
  for (const auto& communicator : all) visit(*communicator);
}

}  // namespace jdp
